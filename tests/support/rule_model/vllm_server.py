"""``python -m tests.support.rule_model.vllm_server MODEL``: the server, its vLLM led by it."""

from langchain_art_server import __main__ as door
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service


class RuleSampler(VllmSampler):
    """vLLM as the sampler, over the rule's process."""

    target = "tests.support.rule_model.vllm_engine:serve"


def build(settings: Settings) -> Service:
    return Service(settings, RuleSampler(settings), PeftLearner(settings))


if __name__ == "__main__":
    door.build = build
    door.cli()
