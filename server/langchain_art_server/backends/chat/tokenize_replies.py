"""Replies that nobody sampled here, put into tokens with the model's chat template. Child side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedModel

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art_server.backends.base import Demonstration, TokenTurn
from langchain_art_server.backends.chat.chat_template import ChatFormat
from langchain_art_server.backends.models.loading import eos_ids


def token_turns(
    path: str, base: PreTrainedModel, turns: Sequence[Demonstration]
) -> list[TokenTurn | str]:
    """Put replies into tokens, in the order given.

    What is remembered of earlier turns, so that later ones begin with their tokens, ends with the
    call: the same turns give the same tokens, whatever was asked before.

    Args:
        path: hub name or local path of the model, where its tokenizer is.
        base: the model; says which tokens end a turn.
        turns: those of one conversation in the order in which they were said.

    Returns:
        The tokens of each turn, or why it cannot be shown to the model.

    Raises:
        ConfigError: the tokenizer cannot be read, or has no chat template.
    """
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"The tokenizer of {path!r} cannot be read: {error}") from error
    chat = ChatFormat(tokenizer, eos_ids(base, tokenizer))
    return [_token_turn(chat, turn) for turn in turns]


def _token_turn(chat: ChatFormat, turn: Demonstration) -> TokenTurn | str:
    try:
        prompt = chat.prompt(turn.messages, turn.tools)
        said = chat.reply_ids(prompt, turn.messages, turn.tools, turn.reply)
        chat.remember(prompt, said, turn.messages, turn.tools, turn.reply)
    except InvalidRequest as error:
        return str(error)
    return TokenTurn(prompt.ids, said)
