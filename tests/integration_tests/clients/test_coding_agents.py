"""Claude Code, its SDK and Codex as they are published: a key and a base URL name the run."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_art import ArtClient
from tests.conformance.suite.scripts import script
from tests.support.client_matrix import CLIENTS, trained
from tests.support.environments import NPM, environment, node_modules
from tests.support.live_server import RuleServer
from tests.support.soak import in_soak

ANSWER = "It says hello and has 12 bytes."
#: The tool of each that runs a command, and the argument that has it.
TOOLS = {
    "claude": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "claude-agent-sdk": ("Bash", "command"),
}
CODEX = """
model = "tiny"
model_provider = "art"
web_search = "disabled"
[agents]
enabled = false
[model_providers.art]
name = "art"
base_url = "{base_url}"
env_key = "ART_API_KEY"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuleServer]:
    with RuleServer(tmp_path_factory.mktemp("agents") / "data", context=65536) as made:
        yield made


def argv_of(client: str, prompt: str) -> list[str]:
    if client == "claude-agent-sdk":  # its wheel has its own Claude Code
        python = environment(client, ["claude-agent-sdk>=0.2.189,<0.3"])
        return [str(python), str(CLIENTS / "coding_agents" / "claude_agent.py"), prompt]
    binaries = node_modules(CLIENTS / "coding_agents" / "package.json") / "node_modules" / ".bin"
    if client == "claude":
        return [str(binaries / client), "-p", prompt, "--allowedTools", "Bash"]
    free = "--dangerously-bypass-approvals-and-sandbox"
    return [str(binaries / client), "exec", "--skip-git-repo-check", free, prompt]


def variables(server: RuleServer, client: str, home: Path, key: str) -> dict[str, str]:
    path = {"PATH": f"{NPM.parent}:{os.environ['PATH']}", "HOME": str(home)}
    if client == "codex":
        settings = home / ".codex" / "config.toml"
        settings.parent.mkdir(exist_ok=True)
        settings.write_text(CODEX.format(base_url=server.base_url))
        return path | {"ART_API_KEY": key}
    return path | {
        "ANTHROPIC_BASE_URL": server.root,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    }


@in_soak
@pytest.mark.soak("H1", 1, "fit of three steps of each coding agent, unmodified")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("client", list(TOOLS))
def test_a_coding_agent_is_captured_and_trained(
    client: str, server: RuleServer, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("hello world\n")
    tool, argument = TOOLS[client]
    commands = ({"call": tool, "args": {argument: line}} for line in ("cat a.txt", "wc -c a.txt"))
    prompt = script(*commands, ANSWER)
    with ArtClient(base_url=server.base_url) as art:
        first = art.policy("tiny").version + 1
        for version in range(first, first + 3):
            prefixes = [f"{client}-{uuid.uuid4().hex[:8]}" for _ in range(2)]
            for number, prefix in enumerate(prefixes):
                env = variables(server, client, tmp_path, art.run_key(f"{prefix}-run"))
                done = subprocess.run(
                    argv_of(client, prompt),
                    cwd=tmp_path,
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=300,
                    stdin=subprocess.DEVNULL,
                )
                assert done.returncode == 0 and ANSWER in done.stdout, done.stdout + done.stderr
                turns = art.reward(f"{prefix}-run", float(number)).turns
                assert [turn.extends for turn in turns] == [None, 0, 1]
                calls = [art.call(turn.call_id or "") for turn in turns]
                seen = {one["id"]: one for one in server.witnessed()}
                for before, call in zip([None, *calls], calls, strict=False):
                    for name in ("prompt_token_ids", "token_ids", "logprobs"):
                        assert call[name] == seen[call["id"]][name]
                    if before is not None:  # nothing was tokenised again
                        sampled = before["prompt_token_ids"] + before["token_ids"]
                        assert call["prompt_token_ids"][: len(sampled)] == sampled
            result = trained(server, prefixes, ["run"])
            assert result["version"] == version and result["metrics"]["calls_trained"] == 6
