import pytest

from langchain_art.training.fit_state import FitState
from langchain_art.wire import TrainJob, TrainResult
from langchain_art_server.page.overview import series_of
from tests.support.fits import identity


@pytest.mark.parametrize("policy", ["p", "q-1"])
def test_a_fit_is_shown_by_its_name_and_an_earlier_one_of_the_name_with_its_id(policy: str) -> None:
    def job(at: float, name: str, fit_id: str) -> TrainJob:
        state = FitState(fit_id=fit_id, name=name, identity=identity())
        return TrainJob(
            id=f"j{at}",
            key=state.key(policy, 1),
            policy=policy,
            state="succeeded",
            created_at=at,
            finished_at=at,
            result=TrainResult(policy=policy, version=1, metrics={}, excluded={}),
        )

    first, second = "0123456789ab", "ba9876543210"
    jobs = [job(1, "my_fit", first), job(2, "my_fit", second), job(3, "", first)]
    jobs.append(job(4, "facade-1", first))
    shown = [one.fit for one in series_of(jobs)]
    assert shown == ["facade-1", first, "my_fit", f"my_fit-{first}"]
