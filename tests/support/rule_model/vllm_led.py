"""Inside of vLLM, in its own environment: the next token is the one that the call was told."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class Led(AdapterLogitsProcessor):
    """Leads the calls whose ``vllm_xargs`` have ``led``: a list of token ids."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        told = (params.extra_args or {}).get("led")
        if told is None:
            return None

        def lead(said: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = told[len(said)]
            if logits[token] == float("-inf"):
                raise RuntimeError(f"the rule breaks the grammar at token {len(said)} of {told}")
            return torch.full_like(logits, float("-inf")).index_fill_(
                0, torch.tensor([token], device=logits.device), 0.0
            )

        return lead
