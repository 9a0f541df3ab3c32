from pathlib import Path

import pytest

from langchain_art.gpu_memory import MemoryNeeds, Shape, gpus, half_precision

#: A tool of two cards that knows ``-i``, and fails for a card that is not there.
TOOL = """#!/bin/sh
for last; do :; done
a="A, 24576, 20000, 580.65.06, 8.6"; b="B, 15360, 15100, 580.65.06, 7.5"
case "$last" in
  0) echo "$a";; 1|GPU-b) echo "$b";; *nounits) echo "$a"; echo "$b";; *) exit 6;;
esac
"""


@pytest.fixture
def two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "AB"), ("1", "B"), ("1,0", "BA"), ("GPU-b", "B"), ("", ""), ("MIG-1", ""), ("7", "")],
)
def test_cuda_visible_devices_chooses_and_orders_them(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpus()
    assert "".join(card["name"] for card in found) == expected
    assert all(card["free"] < card["total"] for card in found)


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize(
    ("visible", "dtype"),
    [("0", "bfloat16"), ("1", "float16"), ("0,1", "float16"), ("", "bfloat16")],
)
def test_one_card_without_bfloat16_makes_it_float16(
    visible: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert half_precision(gpus()) == dtype


def test_float16_needs_what_bfloat16_does() -> None:
    shape = Shape(8, 100, 300, 100, 50, 20_000)
    assert len({MemoryNeeds(shape, dtype, 4).step(99) for dtype in ("bfloat16", "float16")}) == 1


def test_without_the_tool_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
