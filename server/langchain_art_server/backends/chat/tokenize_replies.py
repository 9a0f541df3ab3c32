"""Tokenises given replies with the chat template, for supervised fine-tuning. Runs in a child."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import Demonstration, TokenTurn
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.models.loading import eos_ids, load_tokenizer


def token_turns(
    path: str,
    base: PreTrainedModel,
    turns: Sequence[Demonstration],
    template: str | None = None,
) -> list[TokenTurn | str]:
    """Tokenise replies, in the order given.

    Later turns begin with the tokens of earlier ones; of a turn that cannot be rendered, the reason
    is returned. Nothing is kept between calls: the same turns give the same tokens.

    Args:
        path: hub name or local path of the model with the tokenizer.
        base: the model; its config has the tokens that end a turn.
        turns: those of one conversation.
        template: see `Settings.chat_template`.

    Raises:
        ConfigError: the tokenizer cannot be read, or has no chat template.
    """
    tokenizer = load_tokenizer(path, template)
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
