"""What a number of rollouts a day asks of each part, by arithmetic.

What was measured comes in by `Measured`; what was not, as parameters with their sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86_400
#: Bytes: the default of `max_stored_bytes`.
QUOTA = 64 * 2**30
#: Of one client's address, by default.
MAX_RUNNING_CALLS = 1024
#: Calls that a replica answers at once, each so many times slower than all of them together.
SLOTS_OF_REPLICA = 64


@dataclass(frozen=True)
class Workload:
    """Rollouts of an agent with tools, each of which is one conversation that grows."""

    runs_a_day: float = 1e6
    calls: int = 12
    first_prompt: int = 2000
    """Tokens of system prompt, tools and question."""
    tool_result: int = 350
    reply: int = 150
    group: int = 8
    runs_a_step: int = 1024
    peak: float = 2.0
    """The busiest hour over the mean."""

    @property
    def runs_a_second(self) -> float:
        return self.runs_a_day / DAY

    @property
    def calls_a_second(self) -> float:
        return self.runs_a_second * self.calls

    @property
    def prompt_tokens(self) -> int:
        """Of a run's prompts, each counted whole: what the gateway reads and the database keeps."""
        grown = self.reply + self.tool_result
        return self.calls * self.first_prompt + grown * self.calls * (self.calls - 1) // 2

    @property
    def distinct_tokens(self) -> int:
        """Of a run, each once: what a learner's row has."""
        last = self.first_prompt + (self.calls - 1) * (self.reply + self.tool_result)
        return last + self.reply

    @property
    def learned_tokens(self) -> float:
        """Of a run that shares its first prompt with its group, which is computed once."""
        return self.distinct_tokens - self.first_prompt * (1 - 1 / self.group)

    @property
    def steps_a_day(self) -> float:
        return self.runs_a_day / self.runs_a_step


@dataclass(frozen=True)
class Measured:
    """Of this machine, or of whoever is named in `docs/scale.md`."""

    gateway_ms: float
    """CPU milliseconds of the gateway for a call."""
    bytes_of_run: float
    """Of the database."""
    runs_written_a_second: float
    """That its one writer can insert, with nothing else to do."""
    runs_deleted_a_second: float
    """The same, one after the other."""
    rows_of_run: float
    adapter_bytes: float = 4 * 16 * 75_776 * 36
    """Qwen3-8B at rank 16 on all linear layers: in and out sizes of a layer's seven matrices add up
    to 75,776; 36 layers; float32."""
    decode: float = 12_500
    """Sampled tokens a second of a replica."""
    prefill: float = 30_000
    """Tokens of prompts a second that a replica computes: half of 989 TFLOP/s over 2 x 8.2e9."""
    cache_hits: float = 0.76
    """Share of prompts' tokens in the prefix cache of the replica that the run sticks to."""
    learn: float = 5_350
    """Tokens a second of one GPU that learns."""
    full: float = 0.7
    """How busy a part may be in the busiest hour."""


#: Measured on 2026-11-25, as docs/scale.md says.
DOCUMENTED = Measured(
    gateway_ms=0.78,
    bytes_of_run=400_000,
    runs_written_a_second=30,
    runs_deleted_a_second=57,
    rows_of_run=29,
)


@dataclass(frozen=True)
class Needs:
    """Of one workload; GPUs and gateways are whole ones."""

    gateway_cores: float
    gigabytes_a_day: float
    hours_of_quota: float
    """Until 64 GiB, the default of `max_stored_bytes`, are stored."""
    rows_a_second: float
    writer: float
    """How busy the database's one writer is in the busiest hour. Deletions are spread evenly."""
    lease_writes_a_second: float
    """Leased, heard of twice, completed."""
    replicas: int
    learners: int
    step_seconds: float
    """Between two versions."""
    adapter_gigabytes_a_day: float
    """From the learner to all replicas."""
    runs_at_once: float


def gpu_seconds(load: Workload, known: Measured) -> tuple[float, float]:
    """Of a replica and of the learner, for one run."""
    sampled = load.prompt_tokens * (1 - known.cache_hits) / known.prefill
    sampled += load.calls * load.reply / known.decode
    return sampled, load.learned_tokens / known.learn


def writer_seconds(load: Workload, known: Measured) -> float:
    """Of the writer, for each run of the mean rate: to write the busiest hour's, and delete one."""
    return load.peak / known.runs_written_a_second + 1 / known.runs_deleted_a_second


def needs(load: Workload, known: Measured, run_seconds: float) -> Needs:
    """What `load` asks for; `run_seconds`: from a run's first call to its end."""
    busiest = load.runs_a_second * load.peak
    sampling, learning = gpu_seconds(load, known)
    replicas = math.ceil(busiest * sampling / known.full)
    stored = load.runs_a_day * known.bytes_of_run
    return Needs(
        gateway_cores=load.calls_a_second * load.peak * known.gateway_ms / 1000,
        gigabytes_a_day=stored / 1e9,
        hours_of_quota=QUOTA / stored * 24,
        rows_a_second=load.runs_a_second * known.rows_of_run,
        writer=load.runs_a_second * writer_seconds(load, known),
        lease_writes_a_second=4 * load.runs_a_second,
        replicas=replicas,
        # Behind in the busiest hour it catches up later: the mean is what counts.
        learners=math.ceil(load.runs_a_second * learning / known.full),
        step_seconds=DAY / load.steps_a_day,
        adapter_gigabytes_a_day=load.steps_a_day * known.adapter_bytes * replicas / 1e9,
        runs_at_once=load.runs_a_second * run_seconds,
    )


def breaks(load: Workload, known: Measured) -> dict[str, float]:
    """Rollouts a day from which on a part is over its limit, the first one first.

    All needs grow in proportion to the rollouts. A day of runs is to be kept.
    """
    sampling, learning = gpu_seconds(load, known)
    per_day = DAY * known.full
    found = {
        "64 GiB, the default of max_stored_bytes": QUOTA / known.bytes_of_run,
        "a disk of 4 TB": 4e12 / known.bytes_of_run,
        "one GPU that learns": per_day / learning,
        "eight GPUs for all": 8 * per_day / (sampling * load.peak + learning),
        "eight GPUs that learn": 8 * per_day / learning,
        "64 replicas, the most that one server takes": 64 * per_day / sampling / load.peak,
        "the writer of one database": per_day / writer_seconds(load, known),
        "1,024 calls at once, the default of max_running_calls": DAY
        * MAX_RUNNING_CALLS
        / (sampling * SLOTS_OF_REPLICA * load.peak),
        "one gateway": per_day / (load.calls * known.gateway_ms / 1000) / load.peak,
    }
    return dict(sorted(found.items(), key=lambda one: one[1]))
