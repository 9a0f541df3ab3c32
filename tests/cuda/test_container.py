"""The image for GPUs: what is mounted into it can be written by its user."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def owned(dockerfile: str) -> set[str]:
    """The folders that are made, and the user's, before the image's user is set."""
    text = (REPO / "server" / dockerfile).read_text().replace("\\\n", " ").partition("\nUSER ")[0]
    made = re.findall(r"&& mkdir ([^&\n]+)", text)
    given = [
        (flag, folder)
        for flag, folders in re.findall(r"&& chown (--recursive )?\w+:\w+ ([^&\n]+)", text)
        for folder in folders.split()
    ]
    return {
        one
        for one in " ".join(made).split()
        if any(one == at or (flag and one.startswith(f"{at}/")) for flag, at in given)
    }


@pytest.mark.parametrize(("image", "file"), [("gpu", "Dockerfile"), ("cpu", "Dockerfile.cpu")])
def test_each_mounted_folder_is_there_and_belongs_to_the_user(image: str, file: str) -> None:
    """A volume takes its owner from the image's folder; without one it is root's."""
    pages = "".join(page.read_text() for page in (REPO / "docs").rglob("*.md"))
    commands = re.findall(r"docker run (?:[^\n]*\\\n)*[^\n]*", pages)
    mounts = [
        mount.split(":")[1]
        for command in commands
        if f"langchain-art:{image}" in command
        for mount in re.findall(r"-v (\S+)", command)
        if not mount.endswith(":ro")
    ]
    if image == "gpu":  # where vLLM, Triton and torch keep compiled code
        mounts.append("/home/art/.cache")
    assert mounts and set(mounts) <= owned(file)
