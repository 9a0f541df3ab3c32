"""The e-mail example for tests: a small inbox."""

from pathlib import Path

from examples.email_search.inbox import MailStore, build
from examples.email_search.train import make_rollout
from langchain_art import AsyncArtClient, ChatART, TrainConfig, gather
from tests.support.live_server import LiveServer


def mails_of(folder: Path, n_train: int, n_test: int) -> MailStore:
    return MailStore(build(folder / "mails.sqlite3", n_train=n_train, n_test=n_test, seed=5))


async def check_exact_runs(server: LiveServer, folder: Path) -> None:
    """Runs of the agent are captured, recorded and trained token for token."""
    mails = mails_of(folder, 2, 1)
    model = ChatART(model="tiny", base_url=server.base_url, max_tokens=48)
    async with AsyncArtClient(server.base_url) as client:
        await client.create_policy("exact")
        model = model.model_copy(update={"model_name": "exact"})
        done = await gather(
            make_rollout(model, mails), mails.scenarios("train"), group_size=4, seed=0
        )
        assert not done.failed
        runs = done.trajectories
        assert {turn.node for run in runs for turn in run.turns} == {"model"}
        for run in runs:
            shown: list[int] = []
            for turn in run.turns:
                assert turn.model == "exact@0" and turn.call_id
                call = await client.call(turn.call_id)
                assert call["tags"]["trajectory_id"] == run.id
                assert len(call["token_ids"]) == len(call["logprobs"])
                # No sampled token was tokenised again: each prompt begins with all of the last.
                assert call["prompt_token_ids"][: len(shown)] == shown
                shown = call["prompt_token_ids"] + call["token_ids"]
        config = TrainConfig(learning_rate=1e-3)
        result = await client.wait(await client.train(done.groups, "exact", config))
        metrics = result.metrics
        assert metrics["rows"] == metrics["runs_trained"]  # one row a run: nothing forked
        assert metrics["logprob_gap_mean"] <= 1e-5
        assert abs(metrics["ratio_mean"] - 1) <= 1e-5
        # The worst of some thousand tokens: 7e-6 as a rule, and now and then twice that.
        assert metrics["ratio_max_dev"] <= 5e-5
        assert result.version == 1
