"""``python -m tests.support.rule_model.server MODEL``: the server with the rule's engine."""

from langchain_art_server import __main__ as door
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service


class RuleSampler(TransformersSampler):
    """The embedded sampler, over the rule's process."""

    target = "tests.support.rule_model.engine:serve"


class VllmRuleSampler(VllmSampler):
    """vLLM as the sampler, over the rule's process."""

    target = "tests.support.rule_model.vllm_engine:serve"


def build(settings: Settings) -> Service:
    sampler = VllmRuleSampler if settings.sampler.kind == "vllm" else RuleSampler
    return Service(settings, sampler(settings), PeftLearner(settings))


if __name__ == "__main__":
    door.build = build
    door.cli()
