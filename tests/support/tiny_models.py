"""Small random models, tokenizers and adapters on disk, and a sampler that runs in the test."""

import dataclasses
import functools
import itertools
import queue
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from langchain_art_server import merge_adapter
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import ChatReply, ChatRequest, Sampling
from langchain_art_server.backends.embedded import batch_invariance
from langchain_art_server.backends.embedded.process import TransformersHost
from langchain_art_server.backends.ipc.channel import EngineCall
from langchain_art_server.backends.ipc.chat_codec import unpack_reply
from langchain_art_server.backends.models.base_weights import auto_class, read_config
from langchain_art_server.config import Settings

torch.set_num_threads(1)


def _once(measure: Any) -> Any:
    """Measures this machine's kernels once for the same sizes, in each process."""
    known: dict[tuple[str, int], Any] = {}

    def measured(*sizes: Any) -> Any:
        key = repr(sizes), torch.get_num_threads()
        if key not in known:
            known[key] = measure(*sizes)
        return known[key]

    return measured


for _name in ("_lengths", "_multiple", "_rule_agrees"):  # they take most of a sampler's start
    setattr(batch_invariance, _name, _once(getattr(batch_invariance, _name)))

CHATML = (
    "{%- if tools %}<|im_start|>system\n# Tools\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nAnswer with <tool_call>\n"
    '{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n{% endif %}'
    "{%- for message in messages %}"
    "{%- if message.role == 'alien' %}{{ raise_exception('no aliens here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{% if message.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = (
    "the weather in Paris is sunny and the mail of Ann was sent on Monday at ten to the team " * 3
)

#: Two tools, as OpenAI writes them.
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"$ref": "#/$defs/Days"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of a few hundred tokens that speaks ChatML with Hermes' calls."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    raw.train_from_iterator([_TEXT], trainer)
    raw.add_tokens([AddedToken(t, special=False) for t in ("<tool_call>", "</tool_call>")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    made.chat_template = CHATML
    return made


#: Of gated delta nets.
DELTA_HEADS: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
#: Gated delta nets in two of three layers.
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **DELTA_HEADS,
}
SMALL: dict[str, Any] = {
    "vocab_size": 344,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
#: Name -> configuration class and what differs from `SMALL`.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "qwen2": ("Qwen2Config", {}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma2": ("Gemma2Config", {"sliding_window": 9, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", DELTA | {"num_experts": 0, "mlp_only_layers": [0, 1, 2]}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
}


def save_model(path: Path, kind: str = "qwen3", shard: str = "5GB", **changes: Any) -> Path:
    """Write a random model of `kind` with the tokenizer, in files of at most that size."""
    name, special = KINDS[kind]
    config = getattr(transformers, name)(**{**SMALL, **special, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path, max_shard_size=shard)
    tokenizer().save_pretrained(path)
    return path


def load_plain(path: Path) -> Any:
    """The model as transformers loads it."""
    return auto_class(read_config(str(path))).from_pretrained(path).eval()


def save_adapter(path: Path, model: Path, seed: int, **changes: Any) -> Path:
    """Write a random adapter, as PEFT does."""
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | changes
    torch.manual_seed(seed)
    tuned = get_peft_model(load_plain(model), LoraConfig(task_type="CAUSAL_LM", **options))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tuned.save_pretrained(path)
    return path


def with_adapter(model: Path, adapter: Path) -> Any:
    """The model under PEFT's own layers."""
    return PeftModel.from_pretrained(load_plain(model), adapter).eval()


@torch.no_grad()
def teacher_logprobs(model: Any, reply: ChatReply, temperature: float = 1.0) -> torch.Tensor:
    """What a plain forward pass over prompt and reply gives the reply's tokens."""
    ids = torch.tensor([reply.prompt_token_ids + reply.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    start = len(reply.prompt_token_ids) - 1
    rows = (logits[start:-1] / (temperature or 1.0)).log_softmax(-1)
    return rows.gather(1, torch.tensor(reply.token_ids).unsqueeze(1)).squeeze(1)


def three_adapters(folder: Path, model: Path) -> dict[str, Path]:
    """Adapters of different shapes for one model, by the names that they are loaded under."""
    return {
        "a@1": save_adapter(folder / "a", model, 1),
        "b@1": save_adapter(folder / "b", model, 2, r=8, lora_alpha=4, use_rslora=True),
        "c@1": save_adapter(folder / "c", model, 3, target_modules=["q_proj", "down_proj"]),
    }


MEAN, WORST = 1e-5, 5e-5


def check_logprobs(
    plain: Any, replies: list[ChatReply], temperature: float = 1.0, worst: float = WORST
) -> None:
    """The recorded logprobs are those of a plain forward pass, up to float32's noise."""
    gaps: list[torch.Tensor] = []
    for reply in replies:
        assert len(reply.logprobs) == len(reply.token_ids) == len(reply.token_texts) > 0
        expected = teacher_logprobs(plain, reply, temperature)
        gaps.append((torch.tensor(reply.logprobs) - expected).abs())
    gap = torch.cat(gaps)
    assert gap.mean().item() <= MEAN
    assert gap.max().item() <= worst


class LocalSampler:
    """The sampler's host without a process: calls are queued, and `run` takes them to their end."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.inbox: queue.Queue[EngineCall] = queue.Queue()
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.events: dict[int, list[dict[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._sent: list[EngineCall] = []
        options = {"sampler": {"threads": 1, "kv_cache_bytes": 64 << 20}} | settings
        self.host = TransformersHost(
            Settings.model_validate({"model": str(model), **options}), self
        )

    # What the host does with a channel.
    def event(self, call: EngineCall, payload: Any) -> None:
        self.events.setdefault(call.id, []).append(payload)

    def result(self, call: EngineCall, payload: Any) -> None:
        self.results[call.id] = payload

    def error(self, call: EngineCall, error: BaseException) -> None:
        self.errors[call.id] = error

    def flush(self) -> None:
        pass

    # What a test does.
    def call(self, method: str, params: dict[str, Any]) -> EngineCall:
        call = EngineCall(next(self._ids), method, params)
        self.inbox.put(call)
        self._sent.append(call)
        return call

    def send(self, request: ChatRequest) -> EngineCall:
        return self.call("chat", dataclasses.asdict(request))

    def load(self, name: str, path: Path) -> None:
        call = self.call("load_adapter", {"name": name, "path": str(path)})
        self.host._take()
        if error := self.errors.get(call.id):
            raise error

    def unload(self, name: str) -> None:
        self.call("unload_adapter", {"name": name})
        self.host._take()

    def turn(self) -> None:
        """One step, never waiting."""
        if self.host.scheduler.busy or not self.inbox.empty():
            self.host.step()

    def run(self) -> None:
        """Until nothing is left to do, by threads neither."""
        while self.host.scheduler.busy or not self.inbox.empty() or self._open():
            self.host.step()

    def _open(self) -> bool:
        known = self.results.keys() | self.errors.keys()
        self._sent = [c for c in self._sent if c.id not in known and not c.cancelled]
        return bool(self._sent)

    def reply(self, call: EngineCall) -> ChatReply:
        if error := self.errors.get(call.id):
            raise error
        reply = unpack_reply(self.results[call.id])
        numbers = ("prompt_token_ids", "token_ids", "logprobs")
        return dataclasses.replace(reply, **{n: list(getattr(reply, n)) for n in numbers})

    def chat(self, *requests: ChatRequest) -> list[ChatReply]:
        """Send all at once and wait for all."""
        calls = [self.send(request) for request in requests]
        self.run()
        return [self.reply(call) for call in calls]


_ids = itertools.count()


def ask(
    text: str = "the weather in Paris", *, adapter: str | None = None, **options: Any
) -> ChatRequest:
    """A request with one user message; options are those of the request or of its sampling."""
    fields = {field.name for field in dataclasses.fields(ChatRequest)}
    request = {key: options.pop(key) for key in list(options) if key in fields}
    request.setdefault("messages", [{"role": "user", "content": text}])
    options.setdefault("max_tokens", 12)
    return ChatRequest(
        id=f"call-{next(_ids)}", adapter=adapter, sampling=Sampling(**options), **request
    )


def row_of(reply: ChatReply, advantage: float) -> Row:
    """A reply for the learner."""
    prompt, said = list(reply.prompt_token_ids), list(reply.token_ids)
    zeros = [0.0] * len(prompt)
    return Row(
        prompt + said,
        [0] * len(prompt) + [1] * len(said),
        zeros + [min(0.0, value) for value in reply.logprobs],
        zeros + [advantage] * len(said),
    )


def merge_here(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """The program of an export that merges, in this process, where torch is imported already."""
    why = ""
    with mock.patch.object(sys, "argv", command[2:]):
        try:
            merge_adapter.main()
        except SystemExit as end:
            why = str(end.code)
    return subprocess.CompletedProcess(command, bool(why), stderr=why)
