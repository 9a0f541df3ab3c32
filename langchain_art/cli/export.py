"""Export an adapter: its files with a model card, or whole weights with the adapter merged in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from langchain_art.client.endpoints import new_folder
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ArtError, ConfigError
from langchain_art.packages import require_packages
from langchain_art.training.fits import read_fits
from langchain_art.wire import Checkpoint
from langchain_art.wire.identifiers import is_folder


def export_adapter(
    client: ArtClient,
    policy: str,
    version: int,
    directory: Path,
    base: str | None = None,
    *,
    root: Path = Path("out"),
    merged: bool = False,
) -> Path:
    """Download ``policy@version`` into the new directory and write its card, ``README.md``.

    The directory appears whole or not at all; a ConfigError if it exists and is not empty, or if
    the server does not keep that version. `base` is the base model's name for the card; None: what
    the adapter says, else the server. Below `root` is the fit that made it, whose rewards are in
    the card. `merged`: the card is for weights with it merged in.
    """
    known = {one.version: one for one in client.checkpoints(policy)}
    if version not in known:
        raise ConfigError(
            f"The server keeps no {policy}@{version}; it has versions {sorted(known)}. Others "
            "are deleted after newer ones, unless a fit, an export or `langchain-art checkpoints "
            "pin` has pinned them"
        )
    learned = _learned(known[version], root)
    client.download_adapter(policy, version, directory)
    config: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    template = json.loads((directory / "manifest.json").read_text()).get("chat_template")
    named = base or config.get("base_model_name_or_path") or client.status().model_path
    (directory / "README.md").write_text(
        card(known[version], config, named, learned, merged=merged, template=template)
    )
    return directory


def export_merged(
    client: ArtClient,
    policy: str,
    version: int,
    directory: Path,
    base: str | None = None,
    *,
    root: Path = Path("out"),
    float32: bool = False,
) -> Path:
    """Write the base model with ``policy@version`` merged into its weights, and its tokenizer.

    Another process merges, so that torch is not imported here. It prints the share of what was
    trained that the written weights lack, with a warning above 5 %; its error becomes an ArtError.
    They have the base's dtype, or are `float32`. A ConfigError if `directory` exists and is not
    empty, if the base model is a folder that is not here, or if a package is missing.
    """
    require_packages("Merging", ("torch", "transformers", "peft"), "local")
    model = base or client.status().model_path
    if is_folder(model) and not Path(model).is_dir():
        raise ConfigError(
            f"The base model is the folder {model}, which is not on this machine, and merging "
            "needs its weights. Copy it here and name it, or its name on the Hub: --base MODEL"
        )
    with new_folder(directory) as whole:
        adapter = whole.with_name("adapter")
        export_adapter(client, policy, version, adapter, base, root=root, merged=True)
        merge = [sys.executable, "-m", "langchain_art_server.merge_adapter"]
        command = [*merge, model, str(adapter), str(whole), *(["--float32"] if float32 else [])]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            why = "".join(done.stderr.strip().splitlines()[-1:])
            raise ArtError(
                f"Merging {policy}@{version} into {model} failed (exit code {done.returncode}): "
                f"{why}"
            )
        (adapter / "README.md").rename(whole / "README.md")
    return directory


_USE = """\
Load it with peft:

```python
from peft import PeftModel
from transformers import {loader}, AutoTokenizer

model = PeftModel.from_pretrained({loader}.from_pretrained({base!r}), "PATH/TO/THIS")
tokenizer = AutoTokenizer.from_pretrained({base!r})
```

or serve it with vLLM:

```bash
vllm serve {base} --generation-config vllm --enable-lora --max-lora-rank {rank} \\
    --lora-modules {policy}=PATH/TO/THIS
```
"""
_USE_MERGED = """\
The adapter is merged into these weights: load this directory as any model, with transformers'
`{loader}.from_pretrained("PATH/TO/THIS")` or `vllm serve PATH/TO/THIS`. Float32 weights
need `vllm serve PATH/TO/THIS --dtype float32`: vLLM rounds them otherwise.
"""
_TEMPLATE = """
It was trained with the chat template `{template}` of `langchain-art serve --chat-template`, which
is not among these files. Give it to whatever serves them: with the model's own, prompts are others.
"""
_UNKNOWN = """\
The fit that made this version was not found below `{root}` when this card was written. Say here
which scenarios it learned from, what the reward was, and what the reward on others is.
"""


def _learned(checkpoint: Checkpoint, root: Path) -> str:
    """Scenarios and rewards of the fit below `root` whose step has this version's metrics."""
    for fit in reversed(read_fits(root)):
        for step in fit.steps:
            made = step.results.get(checkpoint.policy)
            if made is None or made.version != checkpoint.version:
                continue
            if not checkpoint.metrics.items() <= made.metrics.items():
                continue  # another server's version of that name
            told = fit.state.identity
            rows = [
                ("fit", f"`{fit.name}`, step {step.step}"),
                ("scenarios", f"{told.scenarios.split()[0]} to learn from"),
                ("reward by", ", ".join(f"`{one}`" for one in told.evaluator or told.rollout)),
                *(
                    (f"reward on held-out scenarios, `{one.version}`", str(one))
                    for one in fit.evals
                    if one.step == 0 or checkpoint.name in one.versions
                ),
            ]
            table = "".join(f"| {name} | {value} |\n" for name, value in rows)
            return f"| | |\n|---|---|\n{table}"
    return _UNKNOWN.format(root=root)


def card(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    base: str,
    learned: str,
    *,
    merged: bool = False,
    template: str | None = None,
) -> str:
    """The model card of an adapter, or of weights with it merged in; `learned` from what.

    `template`: the server's chat template that it was trained with, None for the model's own.
    """
    targets = config.get("target_modules")
    modules = ", ".join(sorted(targets)) if isinstance(targets, list) else str(targets)
    trained = (
        "trained by reinforcement learning on an agent's own runs with\nlangchain-art"
        if checkpoint.version
        else "as langchain-art made it: it is not trained, and changes nothing"
    )
    metrics = "".join(
        f"| {name} | {value:.6g} |\n" for name, value in sorted(checkpoint.metrics.items())
    )
    use = _USE_MERGED if merged else _USE
    # Layers are left out where a text model stands inside of a vision model, by `peft_config`.
    kind = "ImageTextToText" if config.get("exclude_modules") else "CausalLM"
    loader, rank = f"AutoModelFor{kind}", config.get("r")
    use = use.format(base=base, rank=rank, policy=checkpoint.policy, loader=loader)
    if template:
        use += _TEMPLATE.format(template=template)
    return f"""\
---
base_model: {base}
library_name: {"transformers" if merged else "peft"}
tags: [lora, reinforcement-learning, langchain-art]
---

# {checkpoint.name}

A LoRA adapter of `{base}`, {trained}.
It is version {checkpoint.version} of the policy `{checkpoint.policy}`.

| LoRA | |
|---|---|
| rank | {config.get("r")} |
| alpha | {config.get("lora_alpha")} |
| modules | {modules} |

## Use

{use}
## Data and rewards

{learned}
## Training metrics of this version

| metric | value |
|---|---|
{metrics or "| none | |" + chr(10)}
## Licence

The adapter is of no use without its base model, and the base model's licence applies to both
(and to merged weights): see the card of `{base}`.
"""
