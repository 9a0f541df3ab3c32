"""``python -m tests.support.forked_ranks MODEL``: the server; its learner's ranks are forked."""

from langchain_art_server import __main__ as door
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service
from tests.support.worker_child import FORKED


def build(settings: Settings) -> Service:
    learner = PeftLearner(settings)
    learner._program.target = "tests.support.worker_child:serve_learner"
    learner._program._env[FORKED] = "1"
    return Service(settings, TransformersSampler(settings), learner)


if __name__ == "__main__":
    door.build = build
    door.cli()
