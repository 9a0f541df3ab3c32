"""The names of an adapter's weights: the real vLLM puts every one of them in place.

It passes over those of a layer that its model does not have, without a word: the adapter is served
as if it were the base (vllm#41384, vllm#40005).
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE
from langchain_art_server.backends.models.loading import load_outline
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.adapter_copies import AdapterCopies
from langchain_art_server.config import Settings
from tests.support import vllm_lora_child
from tests.support.environments import vllm_python
from tests.support.families import FAMILIES, LORA, LORAS, save_family

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("vllm-names"),
]
#: By a name that no layer has in the class that vLLM serves: what it says nothing about.
ELSEWHERE = "Gemma 3, with images, by the text model's names"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM made of each family's adapter, by the one that the learner writes."""
    folder = tmp_path_factory.mktemp("names")
    cases: dict[str, tuple[str, str, list[str]]] = {}
    for number, family in enumerate(FAMILIES):
        model, adapter = save_family(family, folder / f"m{number}"), folder / f"a{number}"
        adapter.mkdir()
        core = LearnerCore(str(model), "cpu")
        core.init_adapter(adapter, LORAS.get(family, LORA))
        outline = load_outline(Settings.model_validate({"model": str(model)}))
        copies = AdapterCopies(outline.model, 4, "float32")
        copies.folder.rmdir()
        cases[family] = str(model), str(adapter), copies.targets
    model, adapter, names = cases["Gemma 3, with images"]
    weights = load_file(Path(adapter, WEIGHTS_FILE))
    (other := folder / "other").mkdir()
    for file in Path(adapter).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    save_file(
        {name.replace("language_model.", ""): one for name, one in weights.items()},
        other / WEIGHTS_FILE,
    )
    cases[ELSEWHERE] = model, str(other), names
    argv = [str(vllm_python()), vllm_lora_child.__file__, json.dumps(list(cases.values()))]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=folder)
    lines = [json.loads(one) for one in done.stdout.splitlines() if one.startswith("{")]
    assert len(lines) == len(cases), done.stdout[-2000:] + done.stderr[-4000:]
    return {
        family: one | {"model": cases[family][0], "adapter": cases[family][1]}
        for family, one in zip(cases, lines, strict=True)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_puts_every_weight_of_an_adapter_in_place(
    family: str, found: dict[str, dict[str, Any]]
) -> None:
    one = found[family]
    published = json.loads(Path(one["model"], "config.json").read_text())["architectures"]
    assert [one["architecture"]] == published
    assert one["dropped"] == []
    assert len(one["reached"]) == len(load_file(Path(one["adapter"], WEIGHTS_FILE))) / 2


def test_vllm_says_nothing_of_weights_by_other_names(found: dict[str, dict[str, Any]]) -> None:
    """Else the tests above would not see it."""
    assert found[ELSEWHERE]["reached"] == []
    assert found[ELSEWHERE]["dropped"]
