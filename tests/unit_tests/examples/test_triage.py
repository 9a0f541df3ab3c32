from collections import Counter

from examples.triage.tickets import DEPARTMENTS, PROBLEMS, tickets


def test_each_department_gets_as_many_messages_and_none_comes_twice() -> None:
    train, held_out = tickets("train", 288), tickets("test", 96)
    assert Counter(one.department for one in train) == dict.fromkeys(DEPARTMENTS, 72)
    assert Counter(one.department for one in held_out) == dict.fromkeys(DEPARTMENTS, 24)
    messages = [one.message for one in (*train, *held_out)]
    assert len(set(messages)) == len(messages) == 384
    assert not [one for one in messages if "{" in one or "}" in one]
    assert tickets("train", 288) == train != tickets("train", 288, seed=1)


def test_held_out_messages_tell_problems_that_no_training_message_tells() -> None:
    def told(split_seed: str) -> set[str]:
        found = tickets("train" if split_seed == "train" else "test", 400)
        return {
            problem
            for one in found
            for problem in PROBLEMS[one.department]
            if all(part.casefold() in one.message.casefold() for part in _parts(problem))
        }

    train, held_out = told("train"), told("test")
    assert train and held_out and not train & held_out


def _parts(problem: str) -> list[str]:
    """Its text between the braces."""
    return [part.partition("}")[2] or part for part in problem.split("{")]
