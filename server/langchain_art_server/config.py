"""The server's settings: typed, frozen, unknown keys refused. From a TOML file, flags or both."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from langchain_art.errors import ConfigError
from langchain_art.wire import LoraConfig, Name
from langchain_art.wire.api_keys import key_problem
from langchain_art.wire.choices import BUILT_IN_LOSSES
from langchain_art.wire.field_hints import unknown_field

#: The built-in chat template: before the model's own, which shows no tools.
TOOLS_TEMPLATE = "tools"
TEMPLATES = Path(__file__).parent / "chat_templates"
#: ``MODULE:FUNCTION``.
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _SamplerSettings(_Table):
    takes_gpu: ClassVar[bool] = False
    """It starts on a GPU before the learner; several on one machine have GPUs of their own."""
    threads: int | None = Field(default=None, ge=1)
    """Threads, on a CPU, of the process that computes; None: half of the cores, at least one (with
    more threads than free cores, decoding gets slower by an order of magnitude)."""
    max_batch: int = Field(default=128, ge=1, le=4096)
    """Completions that are decoded at once; more wait."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Samplers, each of which serves all versions. vLLMs are on GPUs one on each (with
    ``--tensor-parallel-size=2`` on two), from the first on; with `ray`, those of any kind are on
    the cluster's nodes. A run's calls go to one of them, and to another if that ends."""
    hang_seconds: float = Field(default=300, gt=0)
    """The sampler is ended and started again if calls run and it makes no token for so long. One
    that was stopped, and so answers nothing at all, is noticed within 30 s."""


class TransformersSettings(_SamplerSettings):
    """The embedded sampler, on transformers: ``[sampler]`` with ``kind = "transformers"``."""

    kind: Literal["transformers"] = "transformers"
    kv_cache_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Memory for running calls' keys and values; the prefix cache has as much again."""


class VllmSettings(_SamplerSettings):
    """vLLM: ``[sampler]`` with ``kind = "vllm"``."""

    kind: Literal["vllm"] = "vllm"
    takes_gpu: ClassVar[bool] = True
    max_batch: int = Field(default=256, ge=1, le=4096)
    """As of the embedded sampler. Fewer run while the cache has no room, by vLLM's own count."""
    python: Path = Path(sys.executable)
    """Python of the environment that vLLM is installed in; may be one of its own, so that its pins
    never meet the learner's."""
    gpu_memory: float | None = Field(default=None, gt=0, lt=1)
    """Share of a GPU's memory for vLLM's weights, activations and cache. The learner needs the
    rest; with `take_turns` its weights alone do, since vLLM's share is free during a step. None:
    what the learner leaves, estimated at the start, which the log says."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """Memory for keys and values; None: what `gpu_memory` leaves on a GPU, 1 GiB on a CPU."""
    max_loras: int = Field(default=4, ge=1, le=64)
    """Versions that are computed in one batch (multi-LoRA); calls of more wait for each other."""
    max_rank: int | None = Field(default=None, ge=1, le=512)
    """Highest rank of an adapter; None: that of `lora`."""
    tool_format: str | None = None
    """Format in which the model writes tool calls, a key of `FORMATS`; None: read off its chat
    template."""
    start_seconds: float = Field(default=1800, gt=0)
    """A start that takes longer has failed."""
    args: tuple[str, ...] = ()
    """More options of ``vllm serve``, such as ``--tensor-parallel-size=2``."""


class _LearnerSettings(_Table):
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of each of its processes; None: half of the cores in all, at least one."""
    python: Path = Path(sys.executable)
    """Python of the environment that learns; may be one of its own, so that its pins never meet
    the server's. It needs torch, transformers, PEFT and what `kind` names; not this package, which
    the server puts on the process's path."""
    hang_seconds: float = Field(default=900, gt=0)
    """The learner is ended and started again if it has work and ends no micro-batch for so long;
    the job has then failed, and may be sent again."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """``adamw_8bit``: Adam's moments in 8 bits (bitsandbytes), 2 bytes of a LoRA weight, not 8. A
    policy goes on with the one that it began with."""
    offload_activations: bool = False
    """True to keep the layers' inputs, with gradient checkpointing, in the host's memory until the
    backward pass: longer rows, and two copies of each over the bus. The adapter is the same to the
    bit."""


class PeftSettings(_LearnerSettings):
    """transformers and PEFT: ``[learner]`` with ``kind = "peft"``."""

    kind: Literal["peft"] = "peft"
    ranks: int = Field(default=1, ge=1, le=64)
    """Processes that learn together, each with the whole base unless `shard` is set: on GPUs one on
    each, from `device` on. Their adapter is that of one process, up to the order of additions."""
    shard: bool = False
    """Each rank holds a part of each of the base's layers (FSDP2), for a base that does not fit on
    one GPU. Slower: the ranks send each other the layers in every pass."""

    @model_validator(mode="after")
    def _sharded_over_ranks(self) -> PeftSettings:
        if self.shard and self.ranks < 2:
            raise ValueError(
                "got shard=true with ranks=1, expected as many ranks as there are GPUs to hold the "
                "base's parts, at least 2"
            )
        return self


class UnslothSettings(_LearnerSettings):
    """Unsloth's kernels, on one GPU: ``[learner]`` with ``kind = "unsloth"``."""

    kind: Literal["unsloth"] = "unsloth"


class PageSettings(_Table):
    """Settings that the page in the browser cannot know by itself: ``[page]``."""

    gpu_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """US dollars an hour of this server, for the cost of its calls; None: not shown."""
    langfuse_project: str | None = Field(
        default=None, pattern=r"^https?://[^\s?#]+/project/[^\s/?#]+$"
    )
    """The address of the project in Langfuse that runs are exported to, for a link to each run's
    trace: ``https://cloud.langfuse.com/project/ID``; None: no link."""


class RaySettings(_Table):
    """Samplers and the learner on the nodes of a Ray cluster: ``[ray]``, or ``--ray``.

    The server is on one of the nodes. Each of the others has the same packages, at the same paths.
    """

    address: str = "auto"
    """Address of the head, ``10.0.0.1:6379``; ``auto``: of the cluster with this machine."""
    replica: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    """Resources, in Ray's terms, that a replica of the sampler takes of one node; None: its
    `threads` (or else 1) of ``CPU``, and ``GPU`` as vLLM's options say, unless `device` is cpu."""
    learner: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    """The same of each of the learner's ranks, which are on as few nodes as there is room on; None:
    its `threads` (or else 1) of ``CPU``, and one ``GPU``, unless `device` is cpu."""
    start_seconds: float = Field(default=600, gt=0)
    """Seconds that the server's start, or a step whose node is lost, waits for room on Ray."""


def _with_kind(default: str) -> BeforeValidator:
    """Makes `kind` optional in a table that is discriminated by it."""

    def fill_in(table: Any) -> Any:
        return {"kind": default} | table if isinstance(table, dict) else table

    return BeforeValidator(fill_in)


def _template(value: Any) -> Any:
    """The text of the file that a setting names; a built-in name and a text stay as they are."""
    if not isinstance(value, str) or value == TOOLS_TEMPLATE or "{" in value:
        return value
    wanted = f"expected {TOOLS_TEMPLATE!r} or a file with a Jinja template"
    try:
        text = Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"got {value!r}, {wanted}: {error}") from error
    if "{" not in text:
        raise ValueError(f"got {value!r}, {wanted}: the file has no expression of Jinja's")
    return text


SamplerTable = Annotated[
    TransformersSettings | VllmSettings, Field(discriminator="kind"), _with_kind("transformers")
]
LearnerTable = Annotated[
    PeftSettings | UnslothSettings, Field(discriminator="kind"), _with_kind("peft")
]


class Settings(_Table):
    """All settings of ``langchain-art serve``."""

    model: str
    """Base model: a hub name (``Qwen/Qwen2.5-0.5B-Instruct``), a folder, or a GGUF file, whose
    weights the first start writes to `data_dir`. ``smollm2-135m``: a model that pip fetches."""
    served_model_name: str | None = None
    """The base model's name for clients, without ``@``; None: the last part of `model`."""
    policies: tuple[Name, ...] = ()
    """Policies that exist from the start. More are made with ``POST /v1/policies``."""
    lora: LoraConfig = LoraConfig()
    """The shape of the adapters of `policies`."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    data_dir: Path = Path("art-data")
    """Holds the database and the adapters."""
    database_url: str | None = None
    """URL of SQLite or PostgreSQL, as SQLAlchemy has it; None: SQLite in `data_dir`."""
    fleet: bool = False
    """Several servers, all with this setting, share the database, which is PostgreSQL's then, and
    `data_dir`, which is on a file system that they share. Each answers calls and runs jobs."""
    api_key: SecretStr | None = None
    """Required unless `host` is a loopback address: at least 32 random bytes, as the command
    ``langchain-art key new`` prints them. Also read from the environment variable ART_API_KEY."""
    device: str | None = None
    """Torch device; None: cuda, mps or cpu, whichever torch finds."""
    dtype: str | None = None
    """Torch dtype; None: float32 on a CPU, bfloat16 elsewhere, float16 on GPUs that have none."""
    quantization: Literal["nf4"] | None = None
    """``nf4``: the base's linear layers in 4 bits for sampler and learner, on a GPU or a CPU. The
    first start writes a copy of the model in 4 bits to `data_dir`, which both load."""
    chat_template: Annotated[str | None, BeforeValidator(_template)] = None
    """Chat template in place of the model's own: a file with one (Jinja), or ``tools``, which shows
    tools, calls and their results as text to a model whose template shows none. A policy goes on
    with the one that it was trained with."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Tokens of prompt and completion together; None: what the model's config allows, at most
    32768, and on a GPU what its memory holds; the log and ``/status`` say how many."""
    max_body_bytes: int = Field(default=32 << 20, ge=1024)
    max_running_calls: int = Field(default=1024, ge=1)
    """Calls of one client that may wait or run at once, and of all but for a sixteenth more; others
    get 429 with Retry-After."""
    take_turns: bool = False
    """Sampler and learner take turns, for the two on one device: calls that arrive during a
    training step wait for its end, and are answered by the new version. vLLM sleeps in that time:
    its weights are in the host's memory, its cache is dropped."""
    max_waiting_calls: int = Field(default=256, ge=0)
    """Calls that may wait for such a step; more get 503 with Retry-After."""
    max_policies: int = Field(default=64, ge=1)
    """Policies, which take the sampler's memory; one more gets 429 until one is deleted."""
    max_queued_jobs: int = Field(default=256, ge=1)
    """Jobs that may wait or run; more get 429 with Retry-After."""
    max_stored_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Bytes of the database and the adapters. Once there are more, what would add to them (calls,
    runs, policies, jobs) gets 429, until runs or policies are deleted."""
    min_free_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Free bytes of the data's disk. With fewer, the server is not ready, jobs wait, and what
    would add to the data gets 503 with Retry-After, until there is space again. Four times as much
    is warned of."""
    keep_checkpoints: int = Field(default=4, ge=1)
    """Newest versions kept per policy, beside pinned ones, the first and the one that serves."""
    losses: dict[Name, str] = Field(default_factory=dict)
    """Losses of your own beside the built-in ones: name -> ``MODULE:FUNCTION``, of a package that
    is installed where the learner runs (`langchain_art_server.losses`)."""
    ray: RaySettings | None = None
    sampler: SamplerTable = TransformersSettings()
    learner: LearnerTable = PeftSettings()
    drain_seconds: float = Field(default=10, ge=0, le=86_400)
    """Seconds that running work may take to end after SIGTERM, SIGINT or SIGHUP; then it is cut."""
    stop_when_idle_seconds: float | None = Field(default=None, gt=0)
    """The server ends, as it does on SIGTERM, when for so long no call and no job ran, and nobody
    sent anything but GET or a wish for a lease; None: never. For a machine that is paid by time."""
    page: PageSettings = PageSettings()
    log_format: Literal["text", "json"] = "text"
    """``json``: each record of the log is a JSON object on a line of standard error, the engines'
    too, and each request is one."""

    @model_validator(mode="after")
    def _named(self) -> Settings:
        if "@" in self.base_name:
            raise ValueError(
                f"got the base model's name {self.base_name!r}, expected one without '@': it would "
                "answer for the version of a policy. Give another --served-model-name"
            )
        if self.base_name in self.policies:
            raise ValueError(
                f"policies: got {self.base_name!r}, which is the base model's name; name the "
                "policy otherwise, or give another --served-model-name"
            )
        for name, where in self.losses.items():
            if name in BUILT_IN_LOSSES:
                raise ValueError(f"losses: got {name!r}, a built-in loss; give yours another name")
            if not _FUNCTION.fullmatch(where):
                raise ValueError(
                    f"losses.{name}: got {where!r}, expected MODULE:FUNCTION, such as "
                    "'my_package.losses:mine'"
                )
        return self

    @model_validator(mode="after")
    def _places(self) -> Settings:
        chosen = self.sampler
        if self.ray is None:
            if chosen.replicas > 1 and not chosen.takes_gpu:
                raise ValueError(
                    f"sampler: got replicas={chosen.replicas} with kind={chosen.kind!r}, expected "
                    "it with kind='vllm', or with [ray]: on one machine a second one gains nothing"
                )
        elif self.take_turns:
            raise ValueError(
                "got take_turns with [ray], where sampler and learner have devices of their own; "
                "leave one of the two out"
            )
        elif ":" in (self.device or ""):
            raise ValueError(
                f"got device={self.device!r} with [ray], which gives each engine its own GPUs; "
                "expected cuda, cpu or nothing"
            )
        if self.fleet and not self.url.startswith("postgresql"):
            raise ValueError(
                "got fleet=true without a database that several servers can use, expected a "
                "database_url of PostgreSQL, such as postgresql://art@db/art"
            )
        return self

    @model_validator(mode="after")
    def _key_off_loopback(self) -> Settings:
        if self.api_key and (problem := key_problem(self.api_key.get_secret_value())):
            raise ValueError(f"api_key (or ART_API_KEY): {problem}")
        if not self.api_key and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines, and no api_key is set; set "
                "ART_API_KEY (or api_key in the TOML file) to what `langchain-art key new` prints, "
                "or bind to 127.0.0.1"
            )
        return self

    @property
    def base_name(self) -> str:
        """The base model's name for clients."""
        return self.served_model_name or Path(self.model).name.removesuffix(".gguf")

    @property
    def template_id(self) -> str | None:
        """A name and a digest of `chat_template`; None: the model's own."""
        if (text := self.chat_template) is None:
            return None
        name = "file"
        if text == TOOLS_TEMPLATE:
            name, text = text, (TEMPLATES / f"{TOOLS_TEMPLATE}.jinja").read_text(encoding="utf-8")
        return f"{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def alike_in_words(self) -> str:
        """Settings alike on all servers of a fleet: those of the base model."""
        dtype, weights = self.dtype or "of the device", self.quantization or "unquantised"
        template = self.template_id or "the model's own"
        return f"{self.base_name!r}, {weights}, dtype {dtype}, chat template {template}"

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the store."""
        return self.database_url or sqlite_url(self.data_dir)


def sqlite_url(data_dir: Path) -> str:
    """SQLAlchemy URL of the database in a data directory."""
    return f"sqlite:///{data_dir / 'art.sqlite3'}"


def is_loopback(host: str) -> bool:
    """True if only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(path: Path | None = None, **overrides: Any) -> Settings:
    """Read a TOML file, the environment and overrides (None: not given), in rising precedence.

    Raises:
        ConfigError: with every problem in words, one a line.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
    if key := os.environ.get("ART_API_KEY"):
        values["api_key"] = key
    for name, value in overrides.items():
        if value is not None:
            table: Any = values.get(name)
            parts = isinstance(table, dict) and name in ("lora", "ray")
            values[name] = table | value if parts else value
    if isinstance(model := values.get("model"), str) and Path(model).exists():
        values["model"] = str(Path(model).absolute())  # adapters say so where they are from
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [_in_words(dict(one)) for one in error.errors()]
        raise ConfigError("The server's settings are not valid.\n" + "\n".join(lines)) from error


def _in_words(error: dict[str, Any]) -> str:
    """One of pydantic's errors, with the option's full name."""
    where = ".".join(map(str, error["loc"])) or "settings"
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 3:
        table, kind, option = map(str, error["loc"])
        where = f"{table}.{option}"
        for other in get_args(Settings.model_fields[table].annotation):
            if option in other.model_fields:
                got = f"got {option}={error['input']!r} with kind={kind!r}"
                return f"{where}: {got}, expected it with kind={other().kind!r}"
    if error["type"] == "extra_forbidden":
        return unknown_field(Settings, error["loc"])
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"
