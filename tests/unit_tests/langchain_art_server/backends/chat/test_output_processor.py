"""The text of a reply is the same, streamed in whatever pieces or whole, valid UTF-8 or not."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.chat.output_processor import (
    Detokenizer,
    OutputProcessor,
    token_texts,
)
from tests.support.live_server import BASE_MODEL
from tests.support.soak import count
from tests.support.tiny_models import CHATML, ask, tokenizer

SEEDS = range(count(300, 20_000))


def byte_level() -> Any:
    return copy.copy(tokenizer())


def byte_fallback() -> Any:
    """As SentencePiece's: letters that it lacks are tokens of single bytes, as line ends are."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁a", "▁the", "b", "é", "▁", "日", "\ufffd"]
    ids = {word: at for at, word in enumerate(words)}
    raw = Tokenizer(models.BPE(ids, [], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    made.chat_template = CHATML
    return made


def drawn(rng: random.Random, made: Any) -> list[int]:
    """Words and bytes: whole letters, cut ones, and bytes that are none."""
    ids: list[int] = []
    for _ in range(rng.randrange(1, 9)):
        letter = rng.choice(("A", "\n", "é", "€", "😀", "\ufffd")).encode()
        cut = letter[: rng.randrange(len(letter) + 1)]
        data = rng.choice((letter, letter, cut, b"\xff", b"\x80", b""))
        if data:
            ids += [made.convert_tokens_to_ids(one) for one in names(data, made)]
        else:
            ids.append(rng.randrange(3, len(made)))
    return ids


def names(data: bytes, made: Any) -> list[str]:
    if "<0x00>" in made.get_vocab():
        return [f"<0x{byte:02X}>" for byte in data]
    letters = list(map(chr, range(33, 127))) + list(map(chr, [*range(161, 173), *range(174, 256)]))
    table = {ord(letter): letter for letter in letters}
    table |= {
        byte: chr(256 + at) for at, byte in enumerate(b for b in range(256) if b not in table)
    }
    return [table[byte] for byte in data]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_stream_has_the_text_of_the_whole(make: Callable[[], Any]) -> None:
    made = make()
    template = ChatTemplate(made, {made.eos_token_id})
    replaced = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        ids = drawn(rng, made)
        whole = OutputProcessor(ask(), template, [])
        whole.update(ids, last=True)
        streamed, at, text = OutputProcessor(ask(), template, []), 0, ""
        while at < len(ids):
            at = min(len(ids), at + rng.randrange(1, 4))
            text += streamed.update(ids[:at], last=at == len(ids)).content
        assert text == streamed.parser.content == whole.parser.content, seed
        assert template.text(ids) == whole.parser.content
        replaced += "\ufffd" in text
    assert replaced > len(SEEDS) // 4


@given(
    text=st.text(alphabet="abcé😀 <", max_size=30),
    stop=st.lists(st.text(alphabet="abc <", min_size=1, max_size=4), max_size=2),
    seed=st.integers(0, 99),
)
@example(text="cab", stop=["b", "ab"], seed=0)  # both end at once: the longer one began first
def test_growing_text_is_cut_where_the_whole_text_is(text: str, stop: list[str], seed: int) -> None:
    raw = text.encode()

    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    growing, got = Detokenizer(decode, tuple(stop)), ""
    rng, at = random.Random(seed), 0
    while at < len(raw) and not growing.stopped:
        size = rng.randint(1, 3) if not stop else 1
        got += growing.push(list(raw[at : at + size]))
        at += size
    got += growing.push([], last=True)
    ends = sorted((text.index(s) + len(s), text.index(s)) for s in stop if s in text)
    if not ends:
        assert got == text
        assert not growing.stopped
    else:
        first = [start for end, start in ends if end == ends[0][0]]
        assert got == text[: min(first)]


def test_valid_letters_beside_invalid_bytes_are_kept() -> None:
    made = byte_fallback()
    template = ChatTemplate(made, {made.eos_token_id})
    ids = made.convert_tokens_to_ids([*names("€A\n".encode(), made), "<0xFF>", "▁the", "<0xE2>"])
    assert template.text(ids) == "€A\n\ufffd the\ufffd"


def test_one_text_a_token_whose_sum_is_the_reply() -> None:
    tokenizer = Tokenizer.from_file(str(BASE_MODEL / "tokenizer.json"))
    for text in ("Dear Ann, <b>bold</b>\n", "Übung 日本語 🦜!", ""):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        texts = token_texts(str(BASE_MODEL), ids)
        assert texts is not None and len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_model_without_a_tokenizer_file_has_no_texts(tmp_path: Path) -> None:
    assert token_texts(str(tmp_path), [1, 2]) is None
    assert token_texts("nobody/has-this-model", [1, 2]) is None
