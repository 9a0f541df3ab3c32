"""Share of a GPU's memory for vLLM, and length of a call, where the settings do not say.

`langchain_art.gpu_memory` computes what the learner needs, and what vLLM does. vLLM corrects the
latter: a context that was not asked for is shortened at its start to what its cache holds
(``--max-model-len auto``).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from langchain_art.gpu_memory import (
    LEAST_CONTEXT,
    WIDTH,
    MemoryNeeds,
    Placement,
    Shape,
    VllmShare,
    vllm_share,
)
from langchain_art_server.backends.base import ModelInfo
from langchain_art_server.backends.models.loading import LoadedModel
from langchain_art_server.backends.vllm.sampler import parallel_sizes
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)
#: The share where no GPU is listed by the driver's tool, or nothing fits by the estimate.
UNKNOWN_SHARE = 0.5
#: The result of `gpu_memory.gpus`.
Cards = list[dict[str, Any]]


def fill_in(settings: Settings, outline: LoadedModel, cards: Cards) -> tuple[Settings, LoadedModel]:
    """Settings with vLLM's share of the GPU, and the model with a context that fits beside it.

    `cards` are those before sampler and learner start, from the first of vLLM's on. All of several
    vLLMs get the same. On a CPU both results are as they were.
    """
    chosen, info = settings.sampler, outline.info
    assert chosen.kind == "vllm"
    if info.device == "cpu":
        return settings, outline
    found = _share(settings, info, outline.model.config, cards)
    if found is None:
        found = VllmShare(chosen.gpu_memory or UNKNOWN_SHARE, info.max_model_len)
    if chosen.gpu_memory is None:
        log.warning("vLLM gets %.1f %% of the GPU's memory.", 100 * found.gpu_memory)
        sampler = chosen.model_copy(update={"gpu_memory": found.gpu_memory})
        settings = settings.model_copy(update={"sampler": sampler})
    info = dataclasses.replace(info, max_model_len=found.context)
    return settings, dataclasses.replace(outline, info=info)


def _share(settings: Settings, info: ModelInfo, config: Any, cards: Cards) -> VllmShare | None:
    chosen, learner = settings.sampler, settings.learner
    assert chosen.kind == "vllm"
    parts, copies = parallel_sizes(chosen.args)
    serving = parts * copies * chosen.replicas
    if len(cards) < serving or info.dtype not in WIDTH:
        log.warning("The driver's tool lists %d GPUs: their memory is unknown.", len(cards))
        return None
    placement: Placement = "in turns" if settings.take_turns else "together"
    if _first_card(settings.device) >= serving:
        placement = "separate"
    try:
        shape = Shape.of_config(config.to_dict())
    except (KeyError, TypeError) as error:
        log.warning("The model's config does not say its sizes: %r.", error)
        return None
    needs = MemoryNeeds(
        shape,
        info.dtype,
        settings.lora.rank,
        shards=learner.ranks if learner.kind == "peft" and learner.shard else 1,
        four_bits=bool(info.weights),
        offload=learner.offload_activations,
    )
    used = cards[:serving] if placement != "separate" else cards
    found = vllm_share(
        needs,
        placement,
        total=min(card["total"] for card in used),
        free=min(card["free"] for card in used),
        context=info.max_model_len,
        cards=parts,
        exact=settings.max_model_len is not None,
        given=chosen.gpu_memory,
    )
    if found is None:
        tokens = settings.max_model_len or LEAST_CONTEXT
        log.warning(
            "By the estimate, sampler and learner of %s do not fit into the GPU's memory %s with "
            "calls of %d tokens. `langchain-art doctor %s` says what each needs.",
            *(settings.model, placement, tokens, settings.model),
        )
    return found


def _first_card(device: str | None) -> int:
    """The number of the GPU on which the learner is, or its first rank."""
    number = (device or "").partition(":")[2]
    return int(number) if number.isdigit() else 0
