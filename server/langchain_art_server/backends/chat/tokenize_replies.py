"""Tokenises given replies with the chat template, for supervised fine-tuning. Runs in a child."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedModel

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art_server.backends.base import Demonstration, TokenTurn
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.models.loading import eos_ids


def token_turns(
    path: str, base: PreTrainedModel, turns: Sequence[Demonstration]
) -> list[TokenTurn | str]:
    """Tokenise replies, in the order given.

    Later turns begin with the tokens of earlier ones; of a turn that cannot be rendered, the reason
    is returned. Nothing is kept between calls: the same turns give the same tokens.

    Args:
        path: hub name or local path of the model with the tokenizer.
        base: the model; its config has the tokens that end a turn.
        turns: those of one conversation.

    Raises:
        ConfigError: the tokenizer cannot be read, or has no chat template.
    """
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"The tokenizer of {path!r} cannot be read: {error}") from error
    chat = ChatTemplate(tokenizer, eos_ids(base, tokenizer))
    return [_token_turn(chat, turn) for turn in turns]


def _token_turn(chat: ChatTemplate, turn: Demonstration) -> TokenTurn | str:
    try:
        prompt = chat.prompt(turn.messages, turn.tools)
        reply = chat.reply_ids(prompt, turn.reply)
        chat.remember(prompt, reply, turn.reply)
    except InvalidRequest as error:
        return str(error)
    return TokenTurn(prompt.ids, reply)
