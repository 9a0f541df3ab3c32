"""The engines by the `kind` of their table in the settings.

A new one is a folder beside this module, its table in `config`, and a line here.
"""

from __future__ import annotations

from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.ipc.process_sampler import ProcessSampler
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.replicas.sampler import ReplicatedSampler
from langchain_art_server.backends.unsloth.learner import UnslothLearner
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings

SAMPLERS: dict[str, type[ProcessSampler]] = {
    "transformers": TransformersSampler,
    "vllm": VllmSampler,
}
LEARNERS: dict[str, type[PeftLearner]] = {"peft": PeftLearner, "unsloth": UnslothLearner}


def make_sampler(settings: Settings) -> ProcessSampler | ReplicatedSampler:
    """The sampler of a server whose engines are on its machine."""
    kind, replicas = SAMPLERS[settings.sampler.kind], settings.sampler.replicas
    if replicas == 1:
        return kind(settings)
    return ReplicatedSampler([kind(settings, number) for number in range(replicas)])
