from langchain_art.review.report import bands_of
from langchain_art.statistics.intervals import wilson


def test_a_band_is_trusted_where_people_agree_beyond_what_is_asked() -> None:
    judged = {f"r{i}": i / 40 for i in range(40)}
    human: dict[str, float | None] = {f"r{i}": 0.0 for i in range(8)}  # as the judge says
    human |= {f"r{i}": float(i % 2) for i in range(20, 28)}  # one half otherwise
    human |= {"r30": 1.0, "r31": None}  # one alone, and one on which people disagree
    low, second, third, high = bands_of(judged, human)
    assert [(one.reviewed, one.agree) for one in (low, second, third, high)] == [
        (8, 8),
        (0, 0),
        (8, 4),
        (1, 1),
    ]
    assert [one.trusted for one in (low, second, third, high)] == [True, False, False, False]
    assert low.interval == wilson(8, 8) and second.interval is None
    assert low.open == {"r8": 0.2, "r9": 0.225}
    assert "r31" not in high.open and len(high.open) == 8
    assert (low.low, low.high, high.high) == (0.0, second.low, judged["r39"])
    assert not any(one.trusted for one in bands_of(judged, human, at_least=0.7))
    swapped = bands_of(judged, dict.fromkeys(human, 1.0), good=0.9)
    assert swapped[0].agree == 0 and not swapped[0].trusted


def test_equal_scores_are_in_one_band() -> None:
    judged = {"a": 0.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0}
    bands = bands_of(judged, dict.fromkeys("bcde", 1.0))
    assert [len(one.open) + one.reviewed for one in bands] == [1, 4]
    assert [one.trusted for one in bands] == [False, True]
    assert len(bands_of({"a": 0.5, "b": 0.5}, {})) == 1
    assert bands_of({}, {}) == []
