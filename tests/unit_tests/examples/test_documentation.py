import json
from collections import Counter

import pytest

from examples.documentation.pages import HITS, Index, Question, pages, questions, words
from examples.documentation.train import progress, solved


def test_an_answer_is_on_its_page_among_others_and_the_page_can_be_found() -> None:
    index, asked = Index(), [*questions("train"), *questions("test")]
    reachable = 0
    for one in asked:
        page = pages()[one.page]
        assert f"{one.parameter}={one.answer}" in str(page).replace("'", "")
        assert len({*page.defaults.values()}) > 1
        hits = [index.search(word) for word in words(one.does)]
        assert all(0 < len(found) <= HITS for found in hits)
        reachable += any(page in found for found in hits)
    assert reachable > 0.85 * len(asked)
    answers = Counter(one.answer for one in asked)
    assert max(answers.values()) < len(asked) / 4, answers


def test_a_solved_question_is_what_the_agent_is_shown_and_answers_rightly() -> None:
    answered = 0
    for one in questions("train")[:40]:
        if messages := solved(one):
            choices = [json.loads(reply.text) for reply in messages[1::2]]
            hits = [page.name for page in Index().search(choices[0]["search"])]
            state = {"hits": hits, "opened": choices[1]["open"], "answer": choices[2]["answer"]}
            assert sum(progress(one, state).values()) == 3
            answered += 1
    assert answered > 30


def test_held_out_questions_are_of_modules_that_no_training_question_is_about() -> None:
    train, held_out = questions("train"), questions("test")
    assert len(train) > len(held_out) >= 96
    asked = [one.id for one in (*train, *held_out)]
    assert len(set(asked)) == len(asked)
    modules = [{one.page.partition(".")[0] for one in part} for part in (train, held_out)]
    assert not modules[0] & modules[1]
    assert questions("train", 1) != train == questions("train")
    assert sorted(one.id for one in questions("train", 1)) == sorted(one.id for one in train)


@pytest.mark.parametrize(
    ("hits", "opened", "answer", "steps"),
    [
        (["a.f", "b.g"], "b.g", "70", 3),
        (["a.f", "b.g"], "b.g", "71", 2),
        (["a.f", "b.g"], "a.f", "70", 1),  # by chance, from another page
        (["a.f"], "a.f", "70", 0),
    ],
)
def test_a_run_is_worth_how_far_it_came(
    hits: list[str], opened: str, answer: str, steps: int
) -> None:
    question = Question("q", "Does", "width", "b.g", "70")
    found = progress(question, {"hits": hits, "opened": opened, "answer": answer})
    assert [*found.values()] == [1.0] * steps + [0.0] * (3 - steps)
    assert [*found] == ["found", "opened", "answered"]
