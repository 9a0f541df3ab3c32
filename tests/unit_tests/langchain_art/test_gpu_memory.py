"""The GPUs that CUDA may use, as the driver's tool lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from langchain_art.gpu_memory import gpus

#: A tool of two cards that knows ``-i``, and fails for a card that is not there.
TOOL = """#!/bin/sh
for last; do :; done
a="A, 24576, 20000, 580.65.06"; b="B, 81920, 81000, 580.65.06"
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


def test_without_the_tool_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
