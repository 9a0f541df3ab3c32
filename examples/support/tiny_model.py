"""A small base model for an example: tokenizer, chat template, weights, and a warm start.

An example says in a `Recipe` what its model imitates; `main` is then its script's command line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from langchain_core.utils.function_calling import convert_to_openai_tool
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.support.warm_start import Example, WarmStart, warm_start

Message = dict[str, Any]

#: Conversations that the tokenizer is trained on.
TOKENIZER_CONVERSATIONS = 400
MAX_LENGTH = 2048
WORD_REPEATS = 200
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# As Qwen's: a run of punctuation is one piece. Two digits are one piece too, so a day or a mail id
# is one token.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": ' + (call.name | tojson) + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's shape, and the tools that the model was offered."""

    messages: list[Message]
    tools: Sequence[Any] = ()


@dataclass(frozen=True)
class Phase:
    """A second phase of the warm start, on conversations that show more often what came too seldom.

    Attributes:
        conversations: Of a count, as a `Recipe` has them.
        count: Number of conversations.
        plan: How much to train.
    """

    conversations: Callable[[int], list[Conversation]]
    count: int
    plan: WarmStart


@dataclass(frozen=True)
class Recipe:
    """How an example's base model is made.

    Attributes:
        conversations: Of a count: so many conversations to imitate, of a random policy. The first
            of them must be the same for every count.
        count: Number of conversations.
        words: Texts that must be one token each, as they stand: ``" Falcon"`` is one with a space.
        vocab_size: Tokens of the tokenizer, at least 263 (bytes and markup) and the words.
        plan: How much to train.
        dtype: Of the saved weights. Half precision halves the file; a server on a CPU computes in
            float32 all the same.
        further: What follows upon `plan`, from weights rounded to `dtype`. None: nothing.
        template: Chat template.
    """

    conversations: Callable[[int], list[Conversation]]
    count: int
    words: Sequence[str]
    vocab_size: int
    plan: WarmStart = field(default_factory=WarmStart)
    dtype: torch.dtype = torch.float16
    further: Phase | None = None
    template: str = CHAT_TEMPLATE


def build_tokenizer(
    texts: Iterable[str], words: Sequence[str], vocab_size: int, template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer and give it the chat template.

    Args:
        texts: Rendered conversations.
        words: Texts that must be one token each.
        vocab_size: Tokens in all.
        template: Chat template.

    Raises:
        ValueError: If one of the words does not come out as one token.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    for token in (*SPECIAL_TOKENS, *MARKUP_TOKENS):
        texts = [text.replace(token, "\n") for text in texts]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*texts, *(list(words) * WORD_REPEATS)], trainer)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    tokenizer = _wrap(core, template)
    if split := [word for word in words if len(tokenizer.encode(word)) != 1]:
        raise ValueError(
            f"{len(split)} words are more than one token, such as {split[:5]}; raise vocab_size"
        )
    return tokenizer


def _wrap(core: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        model_max_length=MAX_LENGTH,
    )


def text_of(conversation: Conversation, template: str = CHAT_TEMPLATE) -> str:
    """The conversation as the chat template renders it."""
    return render(_wrap(Tokenizer(models.BPE()), template), conversation, tokenize=False)


def render(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, **options: Any) -> Any:
    """Apply the chat template with the conversation's tools, as a server does with its requests.

    Args:
        tokenizer: The tokenizer, which bears the template.
        conversation: The messages and the tools.
        **options: Passed on to `apply_chat_template`.

    Returns:
        Token ids, or text with `tokenize=False`.
    """
    tools = [convert_to_openai_tool(tool) for tool in conversation.tools] or None
    return tokenizer.apply_chat_template(
        conversation.messages, tools=tools, return_dict=False, **options
    )


def as_example(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Example:
    """Render a conversation and mark what the assistant says, <|im_end|> included."""
    ids = render(tokenizer, conversation)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    header = [start, *tokenizer.encode("assistant\n")]
    said = [False] * len(ids)
    speaking = False
    for at, token in enumerate(ids):
        said[at] = speaking
        if token == end:
            speaking = False
        elif ids[at - len(header) + 1 : at + 1] == header:
            speaking = True
    return Example(ids, said)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of about 0.2 million parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def build(recipe: Recipe, out: Path) -> None:
    """Build the base model and save it with its tokenizer.

    On one machine the same arguments give the same files.

    Args:
        recipe: How to make it.
        out: Folder for the files; made if missing.
    """
    conversations = recipe.conversations(recipe.count)
    texts = [text_of(one, recipe.template) for one in conversations[:TOKENIZER_CONVERSATIONS]]
    tokenizer = build_tokenizer(texts, recipe.words, recipe.vocab_size, recipe.template)
    model = build_model(tokenizer, recipe.plan.seed)
    examples = [as_example(tokenizer, conversation) for conversation in conversations]
    warm_start(model, examples, recipe.plan, first_id=len(SPECIAL_TOKENS))
    model.to(recipe.dtype)
    if further := recipe.further:
        conversations = further.conversations(further.count)
        examples = [as_example(tokenizer, conversation) for conversation in conversations]
        warm_start(model.float(), examples, further.plan, first_id=len(SPECIAL_TOKENS))
    model.to(recipe.dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 5 writes a class name that 4 does not know; this one is known to both.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def main(recipe: Recipe, shipped: Path, argv: list[str] | None = None) -> None:
    """Read the command line (or `argv`) and build; `shipped` is the folder that is committed."""
    plan = recipe.plan
    parser = argparse.ArgumentParser(description="Build the small base model of an example.")
    parser.add_argument(
        "--out", type=Path, default=shipped, help="folder to write (default: the shipped one)"
    )
    parser.add_argument(
        "--steps", type=int, default=plan.steps, help="steps on conversations (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=plan.seed, help="seed of the weights (%(default)s)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="train for a moment only: shows that the script works"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan = replace(plan, steps=args.steps, seed=args.seed)
    if args.smoke:
        plan = replace(plan, steps=2, copy_steps=min(2, plan.copy_steps))
        recipe = replace(recipe, count=TOKENIZER_CONVERSATIONS)
        if further := recipe.further:
            short = replace(further.plan, steps=2)
            further = replace(further, count=TOKENIZER_CONVERSATIONS, plan=short)
            recipe = replace(recipe, further=further)
    build(replace(recipe, plan=plan), args.out)
