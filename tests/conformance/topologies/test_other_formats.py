"""Topologies whose nodes ask through `ChatOpenAI` and `ChatAnthropic`, in each format of calls."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

from langchain_art.client.sync_client import ArtClient
from tests.conformance.suite import checks
from tests.conformance.suite.harness import Kit
from tests.conformance.suite.performance import Performance, perform
from tests.conformance.topologies.journal import JournalWitness, each_token_once, served_by
from tests.conformance.topologies.test_topologies import ALL, LAST, PART, client, witness
from tests.support.live_server import RuleServer
from tests.support.soak import count, share

__all__ = ["client", "witness"]  # fixtures


def address(kit: Kit) -> str:
    """The base URL of the kit's run."""
    return f"{kit.served.base_url}/runs/{kit.handler.run.id}"


def completions(kit: Kit, name: str | None = None, **options: Any) -> Any:
    model = name or kit.served.policy
    return ChatOpenAI(model=model, base_url=address(kit), api_key="none", max_retries=0, **options)


def responses(kit: Kit, name: str | None = None, **options: Any) -> Any:
    return completions(kit, name, use_responses_api=True, **options)


def messages(kit: Kit, name: str | None = None, **options: Any) -> Any:
    options["max_tokens_to_sample"] = options.pop("max_tokens", 1000)
    # LangChain drops the ids of Anthropic's streamed replies.
    options |= {"max_retries": 0, "disable_streaming": True}
    model = name or kit.served.policy
    return ChatAnthropic(model_name=model, base_url=address(kit), api_key="none", **options)


def texts(said: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Texts by role: who said what, whatever it was cut into. Empty ones may be left out."""
    told = [(one["role"], checks._text(one.get("content"))) for one in said]
    told = [(role, text) for role, text in told if text]
    return [(role, "".join(t for _, t in of)) for role, of in groupby(told, lambda one: one[0])]


def judged(seen: Performance) -> None:
    for index, turn in enumerate(seen.trajectory.turns):
        if (call := seen.witnessed.get(turn.call_id or "")) is not None:
            assert texts(seen.trajectory.prompt(index)) == texts(call.messages)
            assert checks._said(turn.reply) == checks._said(seen.reply(call.id))


#: Topologies that are checked with `ChatART` alone, and why.
EXCEPT = {
    "events, version 3": "LangChain's events of version 3 have no id of the reply",
    "with_retry on a model that refuses": "a refused request has no call",
    "with_fallbacks on a model that is not there": "the same",
    "model-fallback middleware": "the same",
    "the base model beside a policy": "the base model's name has no version",
    "a remote graph as a node": "the other process has a `ChatART` of its own",
}
#: Responses and Messages have no `n`, and Responses no `top_k`.
_NO_CHOICES = {
    "several choices of one request",
    "the second of three choices",
    "choices that the node makes something else of",
    "samplings of all kinds",
}
#: Topologies that a format cannot say.
NOT_SAID: dict[Callable[..., Any], set[str]] = {
    completions: set(),
    # A message whose content was edited has no id: it and the call of a tool are one reply.
    responses: _NO_CHOICES | {"replies that the graph edits in place"},
    messages: _NO_CHOICES
    # `ChatAnthropic` joins messages of the user, scripts among them ...
    | {
        "several interrupts in one node",
        "interrupts in parallel branches, resumed one by one",
        "a graph on a thread of its own, left waiting",
    }
    # ... and forces a tool where the script is the value.
    | {
        "tool-selecting middleware",
        "with_structured_output in a node",
        "create_react_agent with a response format",
    },
}
CASES = [(case, mode) for case, mode in ALL if case.name not in EXCEPT]


@pytest.mark.parametrize(("number", "form"), enumerate([completions, responses, messages]))
@pytest.mark.soak("C3", len(CASES), "topologies in a mode, by each format of calls")
@pytest.mark.timeout(count(300, 3600))
def test_topologies_in_another_format(
    number: int,
    form: Callable[..., Any],
    rule_server: RuleServer,
    client: ArtClient,
    witness: JournalWitness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {case.name for case, _ in PART} >= EXCEPT.keys() | NOT_SAID[form]
    monkeypatch.setattr(Kit, "chat", form)
    served, wrong = served_by(rule_server), list[str]()
    # Others for each format; one of its three has a tool.
    for case, mode in CASES if share() == 1 else PART[13 * (number + 1) :: 65]:
        if case.name in EXCEPT.keys() | NOT_SAID[form]:
            continue
        try:
            seen = perform(case, mode, served, witness, client, number=1)
            checks.captured(seen)
            checks.exact_tokens(seen)
            each_token_once(seen)
            checks.audited(seen, rule_server.policy)
            judged(seen)
            if mode == LAST[case.name]:
                other = perform(case, mode, served, witness, client)
                checks.trained(other, seen, rule_server.policy)
        except Exception as error:  # noqa: BLE001 - whatever a program raises is the finding
            wrong.append(f"{case.name}, {mode}: {error!r:.700}")
    assert not wrong, "\n".join(wrong)
