"""Names that lead elsewhere, and fields that reach for the engine: none gets through.

Which files the server's process opens is what its interpreter says (an audit hook).
"""

import itertools
import json
import random
import re
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.live_server import LiveServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.stub_engines import StubServer

CANARY = "the-canary-sings"
UP = (
    *("../", "..\\", "..%2f", "..%5c", "%2e%2e/", "%2e%2e%2f", "%252e%252e%252f", "..%c0%af"),
    "....//",
)
TARGETS = ("secret.txt", "secret.txt%00", "etc/passwd", "data/art.sqlite3")
SINGLE = [
    *("..", ".", "...", "../", "./", "/", "//", "\\", "~", "~/secret.txt", "-", "--config", ""),
    " ",
    *("/etc/passwd", "//etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x", "C:\\secret.txt"),
    *("\\\\host\\share", "CON", "NUL", "tiny\0", "tiny%00", "tiny\n", "tiny\r\nX-A: b"),
    "ti\u202eny",
    *(".staging", ".deleted", "tiny/0", "tiny/../tiny", "tiny@../..", "tiny@0/../../secret.txt"),
    *("tiny@-1", "tiny@1e9", "tiny@0x1", "tiny@٣", "tiny@00", "tiny@999999999999", "ana/tiny@0"),
    *("art.sqlite3", "art.sqlite3-wal", "lock", "x" * 5000, "é" * 300),
    *("\u2025/secret.txt", "\uff0e\uff0e/secret.txt", "\u2215etc\u2215passwd"),
    *("$HOME", "`id`", "%s%n"),
    *("{{7*7}}", "${jndi:ldap://x}", "'; DROP TABLE calls; --", "<script>", "\x7f", "`id`", " "),
]
UPWARDS = ["".join((up * n, t)) for up, n, t in itertools.product(UP, range(1, 10), TARGETS)]
NAMES = [*dict.fromkeys([*SINGLE, *UPWARDS])]
TRIED = count(6, len(NAMES))
#: Fields of which each would have the engine read, fetch, compile, or hold too much.
FORBIDDEN: dict[str, Any] = {
    "chat_template": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "chat_template_kwargs": {"tokenize": True, "enable_thinking": False},
    "mm_processor_kwargs": {"num_crops": 10**9},
    "media_io_kwargs": {"video": {"num_frames": 10**9}},
    "documents": [{"text": "x"}],
    "prompt_embeds": "AAAA",
    "prompt_logprobs": 10**6,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "echo": True,
    "guided_regex": "(a+)+$",
    "guided_json": {"$ref": "#"},
    "guided_grammar": "root ::= root root",
    "guided_choice": ["x"] * 10**5,
    "structured_outputs": {"regex": "(a|a)*b"},
    "structural_tag": "x",
    "logits_processors": ["os.system"],
    "lora_request": {"lora_path": "/etc"},
    "lora_path": "/etc/passwd",
    "kv_transfer_params": {"remote_host": "127.0.0.1"},
    "vllm_xargs": {"x": 1},
    "cache_salt": "x" * 10**6,
    "request_id": "x",
    "priority": -(10**9),
    "best_of": 10**9,
    "use_beam_search": True,
    "ignore_eos": True,
    "min_tokens": 10**9,
    "min_p": 0.5,
    "repetition_penalty": 1e9,
    "length_penalty": 1e9,
    "stop_token_ids": [0] * 10**5,
    "bad_words": ["x"] * 10**5,
    "allowed_token_ids": list(range(1000)),
    "truncate_prompt_tokens": 1,
    "return_token_ids": True,
    "bootstrap_host": "127.0.0.1",
    "n": 10**9,
    "max_tokens": 10**12,
    "max_completion_tokens": -1,
    "temperature": 1e308,
    "top_p": -1.0,
    "top_k": 10**12,
    "top_logprobs": 10**6,
    "seed": 2**70,
    "stop": ["x" * 10**5],
    "logit_bias": {"1": 100},
    "frequency_penalty": 2,
    "audio": {"voice": "x"},
    "functions": [{"name": "x"}],
    "web_search_options": {},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1/x"}},
    },
    "tools": [{"type": "function", "function": {"name": "x", "parameters": {}}}] * 300,
    "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}
    ],
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StubServer]:
    (tmp_path / "secret.txt").write_text(CANARY)
    with StubServer(tmp_path / "data", env={"STUB_OPENS": str(tmp_path / "opens")}) as made:
        yield made


def targets(document: dict[str, Any], name: str) -> Iterator[tuple[str, str, Any]]:
    """Method, path and body of each request that has room for a name."""
    quoted = quote(name, safe="")
    forms = {quoted, quote(name, safe="/%\\~@:")}
    for path, methods in document.items():
        for hole in re.findall(r"\{\w+\}", path):
            for method, form in itertools.product(methods, forms):
                where = path.replace(hole, form)
                yield method.upper(), re.sub(r"\{\w+\}", "0", where), {"version": 0}
    said = [{"role": "user", "content": "?"}]
    yield "POST", "/v1/chat/completions", {"model": name, "messages": said}
    tags = {"trajectory_id": name, "node": name, "scenario": name}
    yield "POST", "/v1/chat/completions", {"model": "tiny", "messages": said, "art": tags}
    yield "POST", "/v1/policies", {"name": name}
    yield "POST", "/v1/trajectories", {"id": name, "scenario": name}
    yield "POST", "/v1/groups", {"id": name, "trajectories": [{"id": f"{name}1"}]}
    yield "POST", "/v1/train", {"policy": name, "groups": [[name]]}
    for query in ("prefix", "scenario", "after"):
        value = quote(name, safe="", errors="surrogatepass")
        yield "GET", f"/v1/trajectories?{query}={value}", None


@pytest.mark.soak("S3", TRIED, "names, each in every place of every route")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 3600))
def test_no_name_leads_out_of_the_data_directory(server: StubServer, tmp_path: Path) -> None:
    assert len(NAMES) > 300
    draw, sent = random.Random(drawn_seed()), 0
    opens = tmp_path / "opens"
    with server.http() as http:
        document = http.get("/openapi.json").json()["paths"]
        before = len(opens.read_bytes())
        for name in draw.sample(NAMES, TRIED):
            for method, path, body in targets(document, name):
                headers = {"Content-Type": "application/json", "Idempotency-Key": "k"}
                content = json.dumps(body) if body is not None else ""
                request = http.build_request(method, "/", content=content, headers=headers)
                # As it is: httpx would take the dots out of the path.
                request.extensions["target"] = path.encode("ascii", "replace")
                answer = http.send(request)
                sent += 1
                assert answer.status_code < 500, (method, path, answer.text)
                assert CANARY not in answer.text, (method, path)
        assert http.get("/readyz").status_code == 200
        assert http.get("/v1/policies/tiny/checkpoints/0/adapter").status_code == 200  # is opened
    opened = [literal_eval(one) for one in opens.read_bytes()[before:].decode().splitlines()]
    assert any(one.startswith(str(server.data_dir)) for one in opened)
    elsewhere = {one for one in opened if not one.startswith(f"{server.data_dir}/")}
    allowed = (str(server.data_dir), "/proc/", "/dev/", "/usr/", "/tmp/art-")
    code = (str(Path(__file__).parents[2]), str(Path(json.__file__).parents[1]))
    assert not [one for one in elsewhere if not one.startswith((*allowed, *code))], elsewhere
    assert (tmp_path / "secret.txt").read_text() == CANARY
    print(f"{sent:,} requests")  # noqa: T201


@pytest.mark.soak("S6", len(FORBIDDEN), "forbidden fields")
def test_no_forbidden_field_is_sampled_with(art_server: LiveServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    with art_server.http() as http:
        before = http.get("/status").json()
        for name, value in FORBIDDEN.items():
            answer = http.post("/v1/chat/completions", json=body | {name: value})
            assert answer.status_code == 400, (name, answer.status_code, answer.text[:300])
            assert name in answer.text or name in ("messages", "tools"), (name, answer.text[:300])
        after = http.get("/status").json()
        assert after["calls"] == before["calls"]
        assert after["engine_restarts"] == before["engine_restarts"]
        assert http.post("/v1/chat/completions", json=body).status_code == 200
