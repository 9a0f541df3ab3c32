"""Build the small base model that the example trains.

Run `python -m examples.email_search.build_base_model`. The warm start imitates a random policy
(`demonstrations`), so the model can speak to the tools and copy from what they return, and has to
learn by reinforcement which choices are good.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from langchain_core.utils.function_calling import convert_to_openai_tool
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.email_search import inbox
from examples.email_search.agent import TOOLS
from examples.email_search.demonstrations import Message, demonstrations
from examples.email_search.warm_start import Example, WarmStart, warm_start

VOCAB_SIZE = 768
DEMONSTRATIONS = 12_000
TOKENIZER_DEMONSTRATIONS = 400
MAX_LENGTH = 2048
WORD_REPEATS = 200
# No database of the example is built with this seed; the tokenizer is the same whatever the seed of
# the weights.
INBOX_SEED = 1234
SHIPPED = Path(__file__).parent / "base_model"
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


def words() -> list[str]:
    """Words and numbers that must be one token, with a space before them or without."""
    names = [*inbox.PROJECTS, *inbox.EVENTS]
    spaced = [*names, *inbox.MONTHS, *inbox.SENDERS, *inbox.ERRANDS]
    return [*names, *(f" {word}" for word in spaced), *(str(number) for number in range(10, 100))]


def build_tokenizer(conversations: list[list[Message]]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer and give it the chat template.

    Raises:
        ValueError: If a word of the inbox does not come out as one token.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    texts = [render(_wrap(core), conversation, tokenize=False) for conversation in conversations]
    for token in (*SPECIAL_TOKENS, *MARKUP_TOKENS):
        texts = [text.replace(token, "\n") for text in texts]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*texts, *(words() * WORD_REPEATS)], trainer)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    tokenizer = _wrap(core)
    if split := [word for word in words() if len(tokenizer.encode(word)) != 1]:
        raise ValueError(
            f"{len(split)} words are more than one token, such as {split[:5]}; raise VOCAB_SIZE"
        )
    return tokenizer


def _wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
    )


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Message], **options: Any) -> Any:
    """Apply the chat template with the agent's tools, as a server does with its requests.

    Args:
        tokenizer: The tokenizer, which bears the template.
        messages: Messages in OpenAI's shape.
        **options: Passed on to `apply_chat_template`.

    Returns:
        Token ids, or text with `tokenize=False`.
    """
    tools = [convert_to_openai_tool(tool) for tool in TOOLS]
    return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **options)


def as_example(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> Example:
    """Render a conversation and mark what the assistant says, <|im_end|> included."""
    ids = render(tokenizer, messages)
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


def record_demonstrations(count: int) -> list[list[Message]]:
    """Conversations of the random policy about training pairs, each in an inbox of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = inbox.MailStore(inbox.build(Path(folder) / "mails.db", count, 0, INBOX_SEED))
        conversations = list(demonstrations(store, INBOX_SEED))
        store.close()
    return conversations


def build(out: Path, plan: WarmStart, n_demonstrations: int = DEMONSTRATIONS) -> None:
    """Build the base model and save it with its tokenizer.

    On one machine the same arguments give the same files.

    Args:
        out: Folder for the files; made if missing.
        plan: How much to train.
        n_demonstrations: Number of conversations to imitate, at least `TOKENIZER_DEMONSTRATIONS`.
    """
    conversations = record_demonstrations(n_demonstrations)
    tokenizer = build_tokenizer(conversations[:TOKENIZER_DEMONSTRATIONS])
    model = build_model(tokenizer, plan.seed)
    examples = [as_example(tokenizer, conversation) for conversation in conversations]
    warm_start(model, examples, plan, first_id=len(SPECIAL_TOKENS))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 5 writes a class name that 4 does not know; this one is known to both.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Read the command line (or `argv`) and build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=SHIPPED, help="folder to write (default: the shipped one)"
    )
    parser.add_argument(
        "--steps", type=int, default=WarmStart.steps, help="steps on conversations (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=WarmStart.seed, help="seed of the weights (%(default)s)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="train for a moment only: shows that the script works"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.smoke:
        build(args.out, WarmStart(steps=2, copy_steps=2, seed=args.seed), TOKENIZER_DEMONSTRATIONS)
    else:
        build(args.out, WarmStart(steps=args.steps, seed=args.seed))


if __name__ == "__main__":
    main()
