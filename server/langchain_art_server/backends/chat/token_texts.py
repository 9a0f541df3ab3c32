"""The text of each token, for people to read: by the model's own tokenizer, without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from langchain_art_server.backends.chat.output_processor import Detokenizer


def token_texts(model: str, token_ids: Sequence[int]) -> list[str] | None:
    """What each token adds to the text; special tokens by their names.

    A character of several tokens stands with the last of them; the others add nothing.

    Args:
        model: a folder, or a name on the Hub whose files are in this machine's cache.
        token_ids: of one reply.

    Returns:
        One text a token. None: the model has no ``tokenizer.json``, which alone is read.
    """
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        return None
    text = Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    last = len(token_ids) - 1
    return [text.push([one], last=at == last) for at, one in enumerate(token_ids)]


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Any:
    # A server that nobody looks at needs neither.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415

    if Path(model).is_dir():
        path: object = str(Path(model) / "tokenizer.json")
    else:  # a path, None, or what stands for "known not to exist"
        path = try_to_load_from_cache(model, "tokenizer.json")
    return Tokenizer.from_file(path) if isinstance(path, str) and Path(path).is_file() else None
