"""``python -m tests.support.replicated_server MODEL``: the server over two embedded samplers."""

from langchain_art_server import __main__ as door
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.replicas.sampler import ReplicatedSampler
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service


def build(settings: Settings) -> Service:
    samplers = [TransformersSampler(settings) for _ in range(2)]
    return Service(settings, ReplicatedSampler(samplers), PeftLearner(settings))


if __name__ == "__main__":
    door.build = build
    door.cli()
