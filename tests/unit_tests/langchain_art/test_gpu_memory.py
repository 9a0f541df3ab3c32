from pathlib import Path

import pytest

from langchain_art.gpu_memory import gpus, half_precision

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
    ("visible", "expected", "dtype"),
    [
        (None, "AB", "float16"),
        ("1", "B", "float16"),
        ("0", "A", "bfloat16"),
        ("1,0", "BA", "float16"),
        ("GPU-b", "B", "float16"),
        ("", "", "bfloat16"),
        ("MIG-1", "", "bfloat16"),
    ],
)
def test_cuda_visible_devices_chooses_and_orders_them_and_one_without_bfloat16_decides(
    visible: str | None, expected: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpus()
    assert "".join(card["name"] for card in found) == expected
    assert all(card["free"] < card["total"] for card in found)
    assert half_precision(found) == dtype


def test_without_the_tool_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
