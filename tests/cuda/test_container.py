"""The image for GPUs: what is mounted into it can be written by its user."""

import re
import shlex
from pathlib import Path, PurePosixPath

import pytest

REPO = Path(__file__).parents[2]
FILES = {"langchain-art:gpu": "Dockerfile", "langchain-art:cpu": "Dockerfile.cpu"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """The Dockerfile's instructions: name and rest, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(n, r) for n, _, r in (line.partition(" ") for line in text.splitlines() if line)]


def owned(path: Path) -> set[PurePosixPath]:
    """The directories that are there and the user's when the image's user is set."""
    made: set[str] = set()
    given: set[str] = set()
    for name, rest in instructions(path):
        if name == "USER":
            break
        for command in re.split(r"&&|;", rest) if name == "RUN" else []:
            match shlex.split(command):
                case ["mkdir", *folders]:
                    made |= {one for one in folders if one.startswith("/")}
                case ["chown", "--recursive" | "-R", _user, *folders]:
                    under = [m for m in made if any(m.startswith(f) for f in folders)]
                    given |= {*folders, *under}
                case ["chown", _user, *folders]:
                    given |= set(folders)
                case _:
                    pass
    return {PurePosixPath(one) for one in made & given}


def writable_mounts(image: str) -> list[PurePosixPath]:
    """Where the documentation's commands mount volumes that are written, by image."""
    found: list[PurePosixPath] = []
    for page in (REPO / "docs").rglob("*.md"):
        for command in re.findall(r"docker run (?:[^\n]*\\\n)*[^\n]*", page.read_text()):
            if image in command:
                mounts = re.findall(r"(?:-v|--volume)[ =](\S+)", command)
                found += [PurePosixPath(m.split(":")[1]) for m in mounts if not m.endswith(":ro")]
    return found


@pytest.mark.parametrize("image", FILES)
def test_each_mounted_folder_is_there_and_belongs_to_the_user(image: str) -> None:
    """A volume takes its owner from the image's folder; without one it is root's."""
    folders = owned(REPO / "server" / FILES[image])
    assert writable_mounts(image)
    for mount in writable_mounts(image):
        assert mount in folders, f"{mount} of docs is not made for the user; made: {folders}"


def test_what_libraries_keep_beside_the_hub_can_be_written_too() -> None:
    """vLLM, Triton and torch keep compiled code under the home's cache."""
    folders = owned(REPO / "server" / "Dockerfile")
    assert PurePosixPath("/home/art/.cache") in folders
