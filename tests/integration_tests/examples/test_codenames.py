"""Codenames: each role learns on its own calls; one adapter against two; a hosted model plays."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from examples.codenames import compare
from examples.codenames.train import DEMO
from tests.support.examples import evaluation, server_of, steps_of


@pytest.mark.slow
def test_each_role_is_trained_on_its_own_calls_and_one_adapter_is_compared_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arm in ("DEMO", "ONE"):
        # Rewards are few at first: with 4 groups of 4, all four were of equal rewards now and then.
        small = replace(getattr(compare, arm), groups_per_step=4, group_size=8, held_out=4)
        monkeypatch.setattr(compare, arm, small)
    with server_of(DEMO, tmp_path) as server:
        monkeypatch.setattr(compare, "run", partial(compare.run, base_url=server.base_url))
        compare.main(seeds=1, steps=1)
        mixed = ["spymaster@1", "guesser@0", "--n", "2", "--base-url", server.base_url]
        evaluated = evaluation(DEMO, *mixed)
    said = capsys.readouterr().out
    folders = [tmp_path / "out" / f"demo-codenames{arm}" for arm in ("", "-one")]
    two, one = (json.loads((folder / "summary.json").read_text()) for folder in folders)
    assert (two["adapter"], one["adapter"]) == ("spymaster@1 + guesser@1", "player@1")
    assert two["measures"]["legal_clues"]["after"]["n"] == 4
    apart = two["after"]["mean"] - one["after"]["mean"]
    spread = (two["after"]["ci95"] ** 2 + one["after"]["ci95"] ** 2) ** 0.5
    for what in ("seed 0", "all seeds"):
        assert f"{what}: two adapters less one: {apart:+.3f} ± {spread:.3f}" in said
    for name, found in (("two adapters", two), ("one adapter", one)):
        assert found["tokens_trained"] > 0
        assert re.search(rf"{name}: .*; {found['tokens_trained']} tokens trained on", said)
    [step] = steps_of(folders[0])
    for role, other in (("spymaster", "guesser"), ("guesser", "spymaster")):
        nodes = step[role]["nodes"]
        assert nodes[role]["calls"] > 0 and not nodes[other]["calls"], nodes
    assert re.search(r"spymaster@1 \+ guesser@0: [01]\.\d+ ± 0\.\d+ \(n=2\)", evaluated)
    assert "good_clues: " in evaluated and "assassin_met: " in evaluated
