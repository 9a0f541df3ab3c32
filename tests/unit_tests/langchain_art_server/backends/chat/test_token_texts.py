"""The texts of tokens, put together, are the text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from langchain_art_server.backends.chat.output_processor import token_texts
from tests.support.live_server import BASE_MODEL


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
