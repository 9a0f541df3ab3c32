import json
import re

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from examples.email_assistant.mailbox import ABOUT_EVENT, Scenario, scenarios
from examples.email_assistant.train import BASE_MODEL

SEEDS = st.integers(0, 10**6)


def one(split: str, seed: int) -> Scenario:
    return next(scenarios(split, 1, seed))  # type: ignore[arg-type]


def pair_of(scenario: Scenario) -> str:
    return re.findall(r'"(.+?)"', scenario.question)[0]


@given(SEEDS)
def test_a_reader_of_the_whole_mailbox_comes_to_the_same_answer(seed: int) -> None:
    """Without tools: from the question and the mails alone."""
    scenario = one("train", seed)
    about = [mail for mail in scenario.mails if mail.subject == pair_of(scenario)]
    assert len(about) == ABOUT_EVENT == len({mail.sender for mail in about})
    assert len({mail.day for mail in scenario.mails}) == len(scenario.mails)
    by_day = sorted(about, key=lambda mail: mail.day)
    right = {
        "newest": by_day[-1:],
        "oldest": by_day[:1],
        "sender": [mail for mail in about if f'as "{mail.sender}" says' in scenario.question],
    }[scenario.kind]
    assert [mail.body.endswith(f" on {scenario.answer}.") for mail in right] == [True]
    assert sum(mail.body.endswith(f" on {scenario.answer}.") for mail in about) == 1


def test_the_sender_is_the_same_token_in_the_question_and_in_the_call() -> None:
    """Or else a small model cannot copy it: it took the sender asked for in 1 of 20 filters."""
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    asked = [one for one in scenarios("train", 60, 4) if one.kind == "sender"]
    for scenario in asked:
        sender = next(mail.sender for mail in scenario.mails if mail.sender in scenario.question)
        call = json.dumps({"name": "filter", "arguments": {"sender": sender}})
        [token] = tokenizer.encode(sender)
        assert token in tokenizer.encode(call)
        assert token in tokenizer.encode(scenario.question), scenario.question
    assert len(asked) > 10


def test_held_out_pairs_are_in_no_training_mail() -> None:
    asked = {pair_of(scenario) for scenario in scenarios("test", 300, 1)}
    seen = {mail.subject for scenario in scenarios("train", 300, 2) for mail in scenario.mails}
    assert len(asked) > 30 and not asked & seen
