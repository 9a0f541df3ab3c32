"""Base models whose folder contradicts itself: the start ends with one line of file and fact.

Weights that a file does not hold would be made up at random, others at each start.
"""

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from langchain_art.errors import ConfigError
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.models.loading import load_outline
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.config import Settings
from langchain_art_server.quantize_base import quantized
from langchain_art_server.start_checks import check_model
from tests.support.live_server import ForkedServer
from tests.support.model_folders import (
    INDEX,
    WEIGHTS,
    Damage,
    change_json,
    copied,
    encoder,
    end_ids,
    fields,
    gpt2,
    long_rope,
    tensors,
    token_beyond,
)
from tests.support.soak import count, share
from tests.support.tiny_models import (
    LocalSampler,
    ask,
    check_logprobs,
    load_plain,
    save_model,
    tokenizer,
)

NAN, INF = math.nan, math.inf
UP = "model.layers.1.mlp.up_proj.weight"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
Start = Callable[[Path], Any]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: a head of its own; the embedding's; two files; its first steps in 4 bits."""
    made = tmp_path_factory.mktemp("models")
    in_blocks = {"hidden_size": 64, "num_attention_heads": 8}
    return {
        "whole": save_model(made / "whole"),
        "tied": save_model(made / "tied", tie_word_embeddings=True),
        "sharded": save_model(made / "sharded", shard="60KB"),
        "mixture": save_model(made / "mixture", "qwen3_moe"),
        "nf4": quantized(str(save_model(made / "wide", **in_blocks)), made / "bases", "cpu"),
    }


def sample(folder: Path) -> LocalSampler:
    """The start of the embedded sampler."""
    check_model(str(folder))
    return LocalSampler(folder)


def learn(folder: Path) -> LearnerCore:
    """The start of the learner."""
    check_model(str(folder))
    return LearnerCore(str(folder), "cpu")


def outline(folder: Path) -> None:
    """What is checked before vLLM is started."""
    check_model(str(folder))
    found = load_outline(Settings(model=str(folder)))
    ChatTemplate(found.tokenizer, found.eos)


EVERY: tuple[Start, ...] = (sample, learn, outline)
SAMPLERS: tuple[Start, ...] = (sample, outline)
WITH_WEIGHTS: tuple[Start, ...] = (sample, learn)


def spoil(tensors_: dict[str, torch.Tensor], number: float) -> None:
    tensors_[UP].view(-1)[3] = number


def write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def cut(name: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / name, size)


def shaped(*shape: int, dtype: torch.dtype = torch.float32) -> Damage:
    return tensors(lambda t: t.update({UP: torch.ones(*shape, dtype=dtype)}))


@dataclass(frozen=True)
class Case:
    """A damage to one of `bases`, what is said of it, and by whom."""

    damage: Damage
    words: str
    base: str = "whole"
    starts: tuple[Start, ...] = EVERY


#: What is wrong.
CASES = {
    # Names and shapes.
    "a tensor left out": Case(
        tensors(lambda t: t.pop(UP)), rf"{WEIGHTS} lacks '{UP}', which config.json asks for"
    ),
    "no head": Case(
        fields("config.json", tie_word_embeddings=False), "lacks 'lm_head.weight'", base="tied"
    ),
    "a head beside the tied one": Case(
        fields("config.json", tie_word_embeddings=True),
        "config.json has tie_word_embeddings.*and model.safetensors holds another 'lm_head.weight'",
        starts=WITH_WEIGHTS,
    ),
    "all names in module.": Case(
        tensors(lambda t: {f"module.{key}": one for key, one in t.items()}),
        "lacks 'lm_head.weight' and 35 others.*holds 'module.lm_head.weight' and 35 others",
    ),
    "fewer layers": Case(
        fields("config.json", **TWO_LAYERS),
        r"holds 'model\.layers\.2\.\S+' and 10 others, which config.json has no place for",
    ),
    "a tensor more": Case(
        tensors(lambda t: t.update({"model.extra.weight": torch.zeros(2)})),
        "holds 'model.extra.weight', which config.json has no place for",
    ),
    "another shape": Case(
        shaped(3, 4), rf"holds '{UP}' as \[3, 4\], and config.json has \[64, 32\]"
    ),
    "integers": Case(
        shaped(64, 32, dtype=torch.int32),
        rf"{WEIGHTS} holds '{UP}' as I32, expected floating-point numbers",
    ),
    "an expert's half": Case(
        tensors(lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight")),
        r"does not give 'model\.layers\.1\.mlp\.experts\.gate_up_proj'",
        base="mixture",
    ),
    "a whole expert": Case(
        tensors(
            lambda t: {key: one for key, one in t.items() if "layers.1.mlp.experts.3." not in key}
        ),
        r"model\.layers\.1\.mlp\.experts\.\S+' as \[3, ",
        base="mixture",
    ),
    "a shard less": Case(
        lambda folder: (folder / "model-00002-of-00004.safetensors").unlink(),
        f"{INDEX} names model-00002-of-00004.safetensors, which is not there",
        base="sharded",
    ),
    "both forms of weights": Case(
        write(INDEX, '{"weight_map": {}}'), f"holds {WEIGHTS} and {INDEX}"
    ),
    "a shard beside the whole": Case(
        lambda folder: shutil.copy(folder / WEIGHTS, folder / "model-00001-of-00002.safetensors"),
        f"holds {WEIGHTS} and model-00001-of-00002.safetensors",
    ),
    "a tensor of 4 bits left out": Case(tensors(lambda t: t.pop(UP)), f"lacks '{UP}'", base="nf4"),
    "a tensor beside 4 bits left out": Case(
        tensors(lambda t: t.pop("model.norm.weight")), "lacks 'model.norm.weight'", base="nf4"
    ),
    "a scale that is not finite": Case(
        tensors(lambda t: t[f"{UP}.absmax"].fill_(NAN)),
        f"'{UP}.absmax' holds numbers that are not finite",
        base="nf4",
        starts=WITH_WEIGHTS,
    ),
    # An adapter beside the base.
    "an adapter": Case(write("adapter_config.json", "{}"), "holds adapter_config.json"),
    # Numbers and bytes.
    "a weight of -inf": Case(
        tensors(lambda t: spoil(t, -INF)),
        rf"{WEIGHTS}: '{UP}' holds numbers that are not finite",
        starts=WITH_WEIGHTS,
    ),
    "weights that are cut": Case(cut(WEIGHTS, 10_000), f"{WEIGHTS} cannot be read"),
    "a pointer": Case(write(WEIGHTS, LFS), f"{WEIGHTS} is a pointer of Git LFS"),
    "a tokenizer's pointer": Case(
        write("tokenizer.json", LFS), "tokenizer.json is a pointer of Git LFS"
    ),
    "a tokenizer that is cut": Case(cut("tokenizer.json", 40), "tokenizer.json cannot be read"),
    "a list for a config": Case(
        write("config.json", "[]"), "config.json cannot be read: .* object"
    ),
    "no weights": Case(lambda folder: (folder / WEIGHTS).unlink(), f"no file named {WEIGHTS}"),
    "no tokenizer": Case(
        lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json", starts=SAMPLERS
    ),
    # Sizes of which no model can be made.
    "no heads": Case(fields("config.json", num_attention_heads=0), r"[^_]config\.json: .*zero"),
    "padding beyond": Case(
        fields("config.json", pad_token_id=9999), r"[^_]config\.json: .*num_embeddings"
    ),
    "a strange kind": Case(
        fields("config.json", model_type="strange"), r"[^_]config\.json: .*strange"
    ),
    # Tokens.
    "an end beyond": Case(
        fields("config.json", eos_token_id=344), r"config\.json.*eos_token_id.*344", starts=SAMPLERS
    ),
    "an end that is a text": Case(end_ids("0"), r"config\.json.*eos_token_id.*0", starts=SAMPLERS),
    "an end of the other config": Case(
        fields("generation_config.json", eos_token_id=[0, 344]),
        r"generation_config\.json has eos_token_id=\[0, 344\], expected ids of 0 to 343",
        starts=SAMPLERS,
    ),
    "a token beyond the embedding": Case(
        token_beyond,
        r"tokenizer has '<\|beyond\|>' with the id 400, expected ids below 344",
        starts=SAMPLERS,
    ),
    # Architectures.
    "an encoder": Case(encoder, "BertLMHeadModel.*tokens after it", starts=WITH_WEIGHTS),
    "no linear layers": Case(gpt2, "GPT2LMHeadModel.*no torch.nn.Linear", starts=(learn,)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_start_names_file_and_fact(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Each start in turn has a case; in the soak all have all."""
    case = CASES[name]
    folder = copied(bases[case.base], tmp_path / "model", case.damage)
    first = [*CASES].index(name) % len(case.starts)
    for start in case.starts if share() else case.starts[first : first + 1]:
        with pytest.raises(ConfigError) as caught:
            start(folder)
        said = str(caught.value)
        assert "\n" not in said and str(folder) in said and re.search(case.words, said), said


def test_a_whole_folder_starts(bases: dict[str, Path], tmp_path: Path) -> None:
    """Also with an index of its one file, as mlx-lm saves every model."""
    folder = copied(bases["whole"], tmp_path / "model")
    names = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for one in (folder, bases["sharded"], bases["mixture"], bases["nf4"]):
        for start in EVERY:
            start(one)


def test_a_copy_in_4_bits_is_not_made_of_a_damaged_base(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    for name, damage, words in (
        ("less", tensors(lambda t: t.pop(UP)), f"lacks '{UP}'"),
        ("nan", tensors(lambda t: spoil(t, NAN)), "not finite"),
    ):
        folder = copied(bases["whole"], tmp_path / name, damage)
        with pytest.raises(ConfigError, match=words):
            quantized(str(folder), tmp_path / "bases", "cpu")
    assert not list((tmp_path / "bases").glob("*"))


def test_a_token_that_stands_for_an_image_may_be_beyond_the_embedding(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """Gemma 3's text models have one; no text is tokenised to it."""
    folder = copied(
        bases["whole"],
        tmp_path / "model",
        token_beyond,
        fields("tokenizer_config.json", extra_special_tokens={"image_token": "<|beyond|>"}),
    )
    sample(folder)
    outline(folder)


def test_calls_are_no_longer_than_what_can_be_trained(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """The rotary positions of all tokens change in a row that is longer."""
    folder = copied(bases["whole"], tmp_path / "model", fields("config.json", **long_rope(64, 512)))
    assert sample(folder).host.info.max_model_len == 64
    words = r"max_model_len=65.*longrope rotary positions change above 64 tokens"
    for start in (LocalSampler, lambda m, **s: load_outline(Settings(model=str(m), **s))):
        with pytest.raises(ConfigError, match=words):
            start(folder, max_model_len=65)
    LocalSampler(folder, max_model_len=64)


def test_a_server_says_it_in_one_line(bases: dict[str, Path], tmp_path: Path) -> None:
    """No report of transformers' stands before it."""
    folder = copied(bases["whole"], tmp_path / "model", CASES["a tensor left out"].damage)
    said = ForkedServer(tmp_path / "data", model=folder).refusal()
    lines = [line for line in said.splitlines() if UP in line]
    assert len(lines) == 1 and lines[0].startswith("ConfigError:") and "REPORT" not in said


# --- the property ---------------------------------------------------------------------------------

#: Files that a start names.
FILES = re.compile(r"config\.json|model[-\w]*\.safetensors|tokenizer|chat template|adapter_")
OTHERS = ("more", "renamed", "ends", "tokens", "a template")
KINDS = ("a tensor", "a shape", "a number", "a file", "an end", "a bit", "a size", *OTHERS)
#: What is put beside, as a tensor or a file.
MORE = ("x", "model.layers.3.mlp.up_proj.weight", "model.layers.0.q.lora_A.weight")
FILES_MORE = (
    *("adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin"),
    *("model-00009-of-00009.safetensors", "README.md", "trainer_state.json"),
)
PREFIXES = ("module.", "_orig_mod.", "base_model.model.", "x")
ENDS = (-1, 344, 10**6, [0, 344], [-3], "0", 1.5, [[0]], True, None, [])
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
DIALOG = [{"role": "user", "content": "the weather in Paris"}]


def damaged(folder: Path, seed: int) -> str:
    """Change a folder so that it contradicts itself, or means the same; says what was changed.

    What is drawn is decidable. Left out are changes that give another whole model, which nothing
    but a digest tells from the first one: other finite numbers of a tensor, two tensors of one
    shape exchanged, a field of the config that no tensor and no token depends on (an epsilon, the
    rotary base), another valid template or vocabulary. So a bit is flipped where it is a fact of
    the file's form: in the header of safetensors, and in JSON if it is then no JSON, or the same.
    """
    draw, kind, what = random.Random(seed), KINDS[seed % len(KINDS)], ""
    weights = draw.choice(sorted(folder.glob("*.safetensors")))
    file = draw.choice([weights, draw.choice(sorted(folder.glob("*.json")))])
    before = file.read_bytes()
    if kind in ("a tensor", "a shape", "a number"):
        held = load_file(weights)
        one = held.pop(what := draw.choice(sorted(held)))
        if kind == "a shape":
            forms = [torch.cat([one, one[:1]])]
            if one.dim() > 1 and one.shape[0] != one.shape[1]:
                forms += [one.flatten(), one.T.contiguous(), one[:-1]]
            held[what] = draw.choice(forms)
        elif kind == "a number":
            one.view(-1)[draw.randrange(one.numel())] = draw.choice([NAN, -INF, INF])
            held[what] = one
        save_file(held, weights, metadata={"format": "pt"})
    elif kind == "a file":
        file.unlink()
    elif kind == "an end":
        os.truncate(file, draw.randrange(len(before.rstrip())))
    elif kind == "a bit":
        is_json, after = file.suffix == ".json", bytearray(before)
        end = len(before) if is_json else 8 + int.from_bytes(before[:8], "little")
        while after == before or (is_json and value_of(after) not in (None, value_of(before))):
            after = bytearray(before)
            after[draw.randrange(end)] ^= 1 << draw.randrange(8)
        file.write_bytes(after)
    elif kind in OTHERS:
        what = damaged_otherwise(folder, kind, weights, draw)
    else:
        known = json.loads((folder / "config.json").read_text())[what := draw.choice(SIZES)]
        values = [0, -known, known - 1, known + 1, 2 * known, 0.5, None, str(known), [known]]
        value = not known if isinstance(known, bool) else draw.choice(values)
        change_json(folder, "config.json", **{what: value})
        what += f"={value!r}"
    return f"{kind}: {what or file.name}"


def damaged_otherwise(folder: Path, kind: str, weights: Path, draw: random.Random) -> str:
    what, held = "", load_file(weights)
    if kind == "more" and draw.random() < 0.4:
        held[what := draw.choice(MORE)] = torch.zeros(4, 4)
    elif kind == "more":
        what = draw.choice(FILES_MORE)
        (folder / what).write_bytes(b"{}" if what.endswith("json") else b"?")
        return what
    elif kind == "renamed":
        prefix = draw.choice(PREFIXES)
        names = sorted(held) if draw.random() < 0.5 else [draw.choice(sorted(held))]
        held |= {f"{prefix}{name}": held.pop(name) for name in names}
        what = f"{prefix} before {len(names)} of {weights.name}"
    elif kind == "ends":
        ids, names = draw.choice(ENDS), ["config.json", "generation_config.json"]
        for name in draw.choice([names, names[:1], names[1:]]):
            change_json(folder, name, eos_token_id=ids)
        return repr(ids)
    elif kind == "tokens":
        token_beyond(folder, id_ := 344 + draw.choice([0, 1, 1000]))
        return str(id_)
    else:
        (template := folder / "chat_template.jinja").unlink()
        if draw.random() < 0.5:
            template.write_text("")
            what = "empty"
        return what or "none"
    save_file(held, weights, metadata={"format": "pt"})
    return what


def value_of(written: bytes | bytearray) -> Any:
    """What JSON says; None if it is none."""
    try:
        return json.loads(written)
    except ValueError:
        return None


def outcome(folder: Path, plain: Any, expected: list[int]) -> str:
    """What the starts say; empty if sampler and learner compute what the undamaged model does."""
    try:
        sampler, core = sample(folder), learn(folder)
    except ConfigError as error:
        return str(error)
    [reply] = sampler.chat(ask(messages=DIALOG, seed=1))
    assert reply.prompt_token_ids == expected
    check_logprobs(plain, [reply])
    ids = [*reply.prompt_token_ids, *reply.token_ids]
    zeros = [0.0] * len(ids)
    [learned] = core.logprobs(None, [Row(ids, [0] + [1] * (len(ids) - 1), zeros, zeros)])
    assert learned[-len(reply.token_ids) :] == pytest.approx(reply.logprobs, abs=1e-4)
    return ""


@pytest.mark.soak("F4", count(12, 500), "damaged folders of a model")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 3600))
def test_damage_is_named_at_the_start_or_changes_nothing(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    names = ("whole", "tied", "sharded")
    plain = {name: load_plain(bases[name]) for name in names}
    expected = tokenizer().apply_chat_template(DIALOG, add_generation_prompt=True)["input_ids"]
    harmless: list[str] = []
    for seed in range(count(12, 500)):
        name = names[(seed + seed // len(KINDS)) % 3]  # each kind comes to all of them
        folder = copied(bases[name], tmp_path / "model")
        about = f"seed {seed}, {name}: {(what := damaged(folder, seed))}"
        try:
            said = outcome(folder, plain[name], expected)
        except Exception as error:
            raise AssertionError(f"{about}: {error!r}") from error
        files = re.compile(r"[^_]config\.json") if what[:6] in ("a size", "a shap") else FILES
        assert "\n" not in said and (not said or files.search(said)), (about, said)
        if not said:
            harmless.append(about)
        elif "finite" not in said and "another" not in said:  # a fact that is not in the numbers
            with pytest.raises(ConfigError):
                outline(folder)
        shutil.rmtree(folder)
    print(f"{len(harmless)} of {count(12, 500)} change nothing:", *harmless, sep="\n")  # noqa: T201
