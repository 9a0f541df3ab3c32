"""litellm's proxy between the OpenAI SDK and the server: headers that begin with x- pass it."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import httpx
import openai
from openai_answers import headers, report, said_nobody

KEY = f"sk-{secrets.token_hex(32)}"  # without one it does not start


def settings(base_url):
    to = {"model": "openai/*", "api_base": base_url, "api_key": "none"}
    return {
        "model_list": [{"model_name": "*", "litellm_params": to}],
        "general_settings": {"master_key": KEY, "forward_client_headers_to_llm_api": True},
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(url, proxy):
    until = time.monotonic() + 240
    while time.monotonic() < until and proxy.poll() is None:
        try:
            if httpx.get(f"{url}/health/readiness").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the proxy is not ready, exit status {proxy.poll()}")


config = Path(tempfile.mkdtemp()) / "config.yaml"
config.write_text(json.dumps(settings(sys.argv[1])))  # JSON is YAML
port = free_port()
program = [str(Path(sys.executable).parent / "litellm"), "--config", str(config)]
proxy = subprocess.Popen(
    [*program, "--host", "127.0.0.1", "--port", str(port)],
    stdout=sys.stderr,
    env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # else it asks another host
)


def ask(tags, messages, model="tiny", **options):
    return client.chat.completions.create(
        model=model, messages=messages, extra_headers=headers(tags), **options
    )


try:
    wait_until_ready(f"http://127.0.0.1:{port}", proxy)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
    report(f"litellm proxy {version('litellm')}", ask, said_nobody)
finally:
    proxy.terminate()
    proxy.wait(30)
