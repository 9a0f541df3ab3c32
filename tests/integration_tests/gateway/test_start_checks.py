"""A start that cannot succeed is refused in words before a model is loaded."""

import random
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from typer.testing import CliRunner

from langchain_art.cli.export import export_adapter
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art_server.__main__ import cli
from langchain_art_server.backends.models.base_weights import read_config
from langchain_art_server.config import Settings, load_settings
from langchain_art_server.gateway.http_protocol import DeadlineHttp
from langchain_art_server.gateway.request_watch import answer_while_loading, is_loading
from langchain_art_server.gateway.service import Service
from langchain_art_server.start_checks import check_model
from langchain_art_server.storage.schema import connect
from tests.support.hot_swap import train_once
from tests.support.live_server import BASE_MODEL, REPO, ForkedServer, LiveServer, free_port
from tests.support.stub_engines import StubServer

NOWHERE = ("./no/such/model", "/no/such", "~/model", "a/b/c", "../no/x")


@pytest.mark.parametrize("blocked", ["nowhere", "adapters", "lock"])
def test_a_data_directory_that_cannot_be_written_to_is_refused(
    tmp_path: Path, blocked: str
) -> None:
    """By a file where a directory must be, or the reverse, which stop root too."""
    data = tmp_path / "data" if blocked != "nowhere" else Path("/proc/nowhere/data")
    if blocked == "lock":
        (data / "lock").mkdir(parents=True)
    elif blocked == "adapters":
        data.mkdir()
        (data / "adapters").write_text("")
    engine = cast("Any", None)
    with pytest.raises(ConfigError, match=r"got data_dir='.*', expected a directory that this"):
        Service(Settings(model="none", data_dir=data), engine, engine)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_server_says_so_at_once(tmp_path: Path, taken: int) -> None:
    """Nothing is loaded, nothing is written, and the Hub is not asked."""
    nowhere = LiveServer(tmp_path / "a", model=Path("no/such/model")).refusal()
    assert "got the model 'no/such/model'" in nowhere and "does not exist" in nowhere
    said = ForkedServer(tmp_path / "b", "--port", str(taken)).refusal()
    assert f"cannot listen at 127.0.0.1:{taken}: another process listens there" in said
    assert "Loading" not in nowhere + said
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


async def test_a_port_in_use_is_named(taken: int) -> None:
    async def listen(host: str, port: int) -> None:
        config = uvicorn.Config(is_loading, host, port, http=DeadlineHttp, ws="none")
        async with answer_while_loading(config) as sockets:
            for one in sockets:
                one.close()

    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(ConfigError, match=f":{taken}: another process .*Take another --port"):
            await listen(host, taken)
    await listen("127.0.0.1", free_port())
    with pytest.raises(ConfigError, match=r"'no\.such\.host\.invalid', which is no address"):
        await listen("no.such.host.invalid", 8000)
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:8000: "):
        await listen("192.0.2.1", 8000)


def test_what_is_no_model_is_named_before_a_hub_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for model, words in (
        *((one, f"got the model '{one}', but /.* does not exist") for one in NOWHERE),
        (str(tmp_path), r"a folder without a config\.json; expected a folder"),
        (str(tmp_path / "file"), "which is a file"),
        *((one, f"'{one}'; did you mean smollm2-135m") for one in ("smolm2-135m", "SmolLM2-135M")),
    ):
        with pytest.raises(ConfigError, match=words):
            check_model(model)
    check_model(str(BASE_MODEL))
    check_model("Qwen/Qwen2.5-0.5B-Instruct")
    with pytest.raises(ConfigError, match=r"the Hugging Face hub .*no hub is asked .*smollm2-135m"):
        read_config("no/such-model")


def test_a_template_that_shows_nothing_ends_the_start_in_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BASE_MODEL, model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}")
    said = " ".join(ForkedServer(tmp_path / "data", model=model).refusal().split())
    assert "chat template does not show what a message of the role 'user' says" in said
    assert "Unexpected end of template" in said
    assert "Traceback" not in said


def test_no_base_has_a_name_that_a_version_could_have() -> None:
    """Drawn names: those that a policy or a version of one could have are refused, no others.

    Such a base would answer for a version, and be recorded as that.
    """
    draw, refused = random.Random(0), 0
    for _ in range(2000):
        drawn = ["".join(draw.choices("ab@1-", k=draw.randint(1, 4))) for _ in range(4)]
        model, served, *policies = drawn
        policies = [name.strip("@-") or "p" for name in policies]
        policies = [name for name in policies if "@" not in name]
        name = draw.choice([None, served])
        named = model if name is None else name
        try:
            found = load_settings(model=f"org/{model}", served_model_name=name, policies=policies)
        except ConfigError as error:
            refused += 1
            assert "@" in named or named in policies, (named, policies, error)
            said = rf"(?s)base model's name {re.escape(repr(named))}.*--served-model-name"
            assert "@" not in named or re.search(said, str(error))
        else:
            assert found.base_name == named and "@" not in named and named not in policies
    assert 200 < refused < 1800


def test_a_policy_with_the_name_of_the_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policies: got 'm', which is the base model's name"):
        load_settings(model="org/m", policies=("other", "m"))
    server = StubServer(tmp_path / "data").start()
    server.stop()
    server._args[server._args.index("--served-model-name") + 1] = "tiny"
    at = server._args.index("--policy")
    del server._args[at : at + 2]
    said = server.refusal()
    assert "a policy 'tiny' is kept" in said and "--served-model-name" in said


def test_a_model_is_known_by_its_whole_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO / "examples")
    assert load_settings(model="email_search/base_model").model == str(BASE_MODEL)
    assert load_settings(model="Qwen/Qwen2.5-0.5B-Instruct").model == "Qwen/Qwen2.5-0.5B-Instruct"


def test_a_policy_goes_on_with_the_chat_template_that_it_was_trained_with(tmp_path: Path) -> None:
    """One that was not trained yet may have another. The card of an export names it."""
    data, template = tmp_path / "data", ("--chat-template", "tools")
    StubServer(data).start().stop()
    server = StubServer(data, *template).start()
    with server.http() as http:
        train_once(http, 0)
    with ArtClient(server.base_url) as client:
        folder = export_adapter(client, "tiny", 1, tmp_path / "adapter")
    server.stop()
    assert "the chat template `tools " in (folder / "README.md").read_text()
    said = " ".join(StubServer(data).refusal().split())
    assert "'tiny' was trained with the chat template tools " in said
    assert "and this server has the chat template of the model: " in said
    StubServer(data, *template).start().stop()


def test_settings_that_are_not_as_they_look_are_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_bytes('model = "m"  # Käse'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"server\.toml: 'utf-8' codec"):
        load_settings(file)
    file.write_text('model = "m"\n[lora]\nrank = 8\nalpha = 64\ntargets = ["q_proj"]\n')
    lora = load_settings(file, lora={"rank": 16}).lora  # --lora-rank 16
    assert (lora.rank, lora.alpha, lora.targets) == (16, 64, ("q_proj",))
    for url in ("postgresql://art@db:PORT/art", "sqlite://", "sqlite:///:memory:", "my-database"):
        with pytest.raises(ConfigError, match="got a database_url"):
            connect(url)
    for option, value, words in (
        ("--log-level", "verbose", "'verbose' is not one of"),
        ("--lora-rank", "0", "lora.rank"),
    ):
        done = CliRunner().invoke(cli, ["no/such/model", option, value], env={"COLUMNS": "200"})
        assert done.exit_code in (1, 2) and words in done.output
