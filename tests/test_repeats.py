"""A test that failed has failed: its seed is its own, nothing runs it a second time.

And no test before it, or shell, changes how it ends.
"""

import ast
import os
import re
import tomllib
from pathlib import Path

import pytest

from tests.support import forked_start, seeds
from tests.support.soak import VARIABLE as SOAK

REPO = Path(__file__).parents[1]


@pytest.fixture
def item(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.Item:
    """This test, as one without a seed; its runs follow each other."""
    monkeypatch.delenv(seeds.VARIABLE, raising=False)
    monkeypatch.delenv(SOAK, raising=False)
    found: pytest.Item = request.node
    return found


def drawn(item: pytest.Item, *, fails: bool) -> int:
    seeds.begin(item)
    seed = seeds.drawn_seed()
    seeds.end(fails)
    return seed


def test_a_test_draws_the_same_seed_each_time_and_another_than_others(item: pytest.Item) -> None:
    own = drawn(item, fails=False)
    assert drawn(item, fails=False) == own
    seeds.begin(item)
    assert seeds.drawn_seed() == seeds.drawn_seed() == own
    assert item.parent is not None
    other = pytest.Function.from_parent(item.parent, name="test_other", callobj=lambda: None)
    assert drawn(other, fails=False) != own


@pytest.mark.parametrize("how", [(seeds.VARIABLE, "random"), (SOAK, "0.1")])
def test_a_new_seed_that_fails_is_drawn_until_it_passes(
    item: pytest.Item, monkeypatch: pytest.MonkeyPatch, how: tuple[str, str]
) -> None:
    own = drawn(item, fails=False)
    monkeypatch.setenv(*how)
    new = {drawn(item, fails=False) for _ in range(5)}
    assert len(new) > 1 and own not in new  # by chance equal once in 200,000
    found = drawn(item, fails=True)
    assert drawn(item, fails=True) == found
    monkeypatch.delenv(how[0])
    assert drawn(item, fails=True) == found
    monkeypatch.setenv(seeds.VARIABLE, "7")  # another that is asked for does not make it pass
    assert drawn(item, fails=False) == 7
    monkeypatch.delenv(seeds.VARIABLE)
    assert drawn(item, fails=False) == found
    assert drawn(item, fails=False) == own


def test_nothing_runs_a_failed_test_once_more() -> None:
    groups = tomllib.loads((REPO / "pyproject.toml").read_text())["dependency-groups"]
    needs = {re.split(r"[^\w-]", one)[0] for group in groups.values() for one in map(str, group)}
    assert not needs & {"pytest-rerunfailures", "pytest-retry", "flaky"}
    for path in (REPO / "Makefile", *(REPO / ".ci").iterdir(), *(REPO / ".github").rglob("*.yml")):
        for word in ("--last-failed", "--lf", "--failed-first", "--reruns", "make test ||"):
            assert word not in path.read_text(), path
    for path in (REPO / "tests").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "AssertionError" in text else ():
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                caught = ast.unparse(node.type)
                assert "AssertionError" not in caught, f"{path}:{node.lineno}"


def test_no_test_asks_a_server_that_the_shell_or_another_test_named(tmp_path: Path) -> None:
    (tmp_path / "test_named.py").write_text(
        "import os\nimport pytest\n\n"
        "@pytest.mark.parametrize('number', (1, 2))\n"
        "def test_alone(number):\n"
        "    assert 'ART_BASE_URL' not in os.environ and 'ART_API_KEY' not in os.environ\n"
        "    os.environ['ART_BASE_URL'] = 'http://127.0.0.1:1/v1'\n"
    )
    args, log = ["-p", "tests.conftest", "-q", "test_named.py"], tmp_path / "log"
    named = {"ART_BASE_URL": "http://shell/v1", "ART_API_KEY": "key"}
    done = forked_start.start("pytest", args, os.environ | named, tmp_path, log)
    assert done.wait() == 0 and "2 passed" in log.read_text(), log.read_text()
