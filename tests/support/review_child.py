"""A process that pulls and trains reviews, to be killed."""

import os
from pathlib import Path

from langchain_art.client.sync_client import ArtClient
from langchain_art.review.pull import pull
from langchain_art.wire import ReviewTraining


def pull_and_train(base_url: str, policy: str, notes: Path, environment: dict[str, str]) -> None:
    """What `langchain-art review pull` and `review train` do, one after the other."""
    os.environ.update(environment)
    with ArtClient(base_url) as client:
        pull(client, root=notes, everything=True)
        asked = ReviewTraining(policy=policy, correction_steps=1)
        plan = client.plan_reviews(asked)
        for job in client.train_reviews(asked.model_copy(update={"plan": plan.digest})):
            client.wait(job)
