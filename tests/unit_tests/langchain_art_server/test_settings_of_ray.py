from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import typer

import langchain_art.ray
from langchain_art.errors import ConfigError
from langchain_art_server import __main__ as door
from langchain_art_server.backends.ray.engines import replica_needs
from langchain_art_server.config import load_settings


def test_a_replica_takes_what_it_uses_or_what_is_said() -> None:
    def needs(sampler: dict[str, Any], **options: Any) -> dict[str, float]:
        options = {"ray": {}} | options
        return replica_needs(load_settings(model="m", sampler=sampler, **options))

    assert needs({"replicas": 2}) == {"CPU": 1}
    assert needs({"threads": 4}) == {"CPU": 4}
    assert needs({"kind": "vllm"}) == {"CPU": 1, "GPU": 1}
    assert needs({"kind": "vllm", "args": ["-tp=4"]}) == {"CPU": 1, "GPU": 4}
    assert needs({"kind": "vllm"}, device="cpu") == {"CPU": 1}
    assert needs({"kind": "vllm"}, ray={"replica": {"GPU": 0.5, "spot": 1}}) == {
        "GPU": 0.5,
        "spot": 1,
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"take_turns": True}, r"got take_turns with \[ray\]"),
        ({"device": "cuda:1"}, r"got device='cuda:1' with \[ray\], .* expected cuda, cpu"),
        ({"ray": {"replica": {"CPU": -1}}}, r"ray.replica.CPU: .* greater than or equal to 0"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(model="m", **({"ray": {}} | options))


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (["m", "--ray"], "auto"),
        (["m", "--ray", "--port", "1"], "auto"),
        (["m", "--ray", "h:6379"], "h:6379"),
        (["--ray=h:6379", "m"], "h:6379"),
        (["m"], None),
    ],
)
def test_the_option_may_have_an_address(arguments: list[str], address: str | None) -> None:
    command = typer.main.get_command(door.cli)
    with command.make_context("serve", list(arguments)) as context:
        assert (context.params["model"], context.params["ray"]) == ("m", address)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(langchain_art.ray, "version", nowhere)
    with pytest.raises(ConfigError, match=r'pip install "langchain-art\[ray\]"'):
        door.build(load_settings(model="m", ray={}))
