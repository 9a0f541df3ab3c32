"""Agents of other frameworks: the programs in `tests/support/clients/frameworks`."""

import os
from dataclasses import dataclass
from pathlib import Path

from tests.support.client_matrix import CLIENTS, answers, exact_turns, trained, two_prefixes
from tests.support.environments import environment
from tests.support.live_server import REPO, RuleServer
from tests.support.pages import blocks

PROGRAMS = CLIENTS / "frameworks"
#: What every program must have got (see tests/support/clients/frameworks/README.md).
EXPECTED = {
    "tools": "The sum is 5.",
    "schema": {"name": "Bob", "age": 7},
    "stream": ["The sum is 5.", True],
}
#: Feature -> calls of its run.
TURNS = {"tools": 2, "schema": 1, "stream": 2}
#: None of them may ask another host.
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "OTEL_SDK_DISABLED": "true",
}


@dataclass(frozen=True)
class Framework:
    """One framework: its program, what it needs, and whether its prompts repeat its replies."""

    program: str
    wanted: tuple[str, ...]
    repeats: bool = True
    """False: it sends a reply back in words of its own, so that no call continues another."""


#: In the order of docs/other-frameworks.md, each of whose blocks a program imports as `shown`.
FRAMEWORKS = {
    "pydantic-ai": Framework("pydantic_ai_agent.py", ("pydantic-ai-slim[openai]>=2.68,<3",)),
    "openai-agents": Framework("openai_agents_agent.py", ("openai-agents>=0.24,<1",)),
    "smolagents": Framework("smolagents_agent.py", ("smolagents[openai]>=1.26,<2",), repeats=False),
    "autogen": Framework(
        "autogen_agent.py", ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8")
    ),
    "crewai": Framework("crewai_agent.py", ("crewai>=1.15.30,<2",)),
    "llama-index": Framework(
        "llama_index_agent.py",
        ("llama-index-core>=0.14.25,<0.15", "llama-index-llms-openai-like>=0.8,<0.9"),
    ),
    "haystack": Framework("haystack_agent.py", ("haystack-ai>=3.4,<4",)),
}
_, *SHOWN = [
    block.code for block in blocks(REPO / "docs/other-frameworks.md") if block.language == "python"
]


def check_framework(name: str, server: RuleServer, folder: Path) -> None:
    """Its agents answer; the server has their calls and no other; a step learns each token once."""
    framework, prefixes = FRAMEWORKS[name], two_prefixes(name)
    shown = dict(zip(FRAMEWORKS, SHOWN, strict=True))[name]
    (folder / "shown.py").write_text(shown)
    python = environment(f"agents-{name}", list(framework.wanted))
    before = len(server.witnessed())
    argv = [str(python), str(PROGRAMS / framework.program), server.base_url, *prefixes]
    said = answers(argv, REPO, os.environ | QUIET | {"PYTHONPATH": str(folder)})
    assert [{key: got.get(key) for key in EXPECTED} for got in said] == [EXPECTED, EXPECTED]
    witness = {line["id"]: line for line in server.witnessed()[before:]}
    found: list[str] = []
    with server.http() as http:
        for number, prefix in enumerate(prefixes):
            for feature, count in TURNS.items():
                turns = exact_turns(http, f"{prefix}-{feature}", float(number), witness)
                linked = [0] if framework.repeats else [None]
                assert [turn["extends"] for turn in turns] == [None, *linked][:count]
                found += [turn["call_id"] for turn in turns]
    assert sorted(found) == sorted(witness)
    result = trained(server, prefixes, tuple(TURNS))
    assert result["excluded"] == {}
    assert result["metrics"]["calls_trained"] == len(witness)
    sampled = sum(len(line["token_ids"]) for line in witness.values())
    assert result["metrics"]["tokens_trained"] == sampled
