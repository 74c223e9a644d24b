"""Fused logits warpers: a draft's temperature, top-k, top-p and min-p in one operation."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_speculate.kernels import warp_logits
from hf_speculate.processors.registry import OwnProcessor, Reads

# The argument of `warp_logits` for each type of warper; warpers are applied in this order.
_ARGUMENTS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


class FusedWarpers(LogitsProcessor, OwnProcessor):
    """One call of `warp_logits` in place of up to four warpers."""

    reads = Reads.NOTHING
    takes_half = True  # scores may be in half precision
    joins_draw = True  # a draw may apply `arguments` itself

    def __init__(self, arguments: dict[str, Any], backend: str = "auto"):
        self.arguments = arguments
        self.backend = backend

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return [N, V] float32 from scores [N, V] of any floating dtype; the ids are not read."""
        return warp_logits(scores, **self.arguments, backend=self.backend)


def fuse_warpers(processors: Iterable[Any], backend: str = "auto") -> list[Any]:
    """Replace each run of warpers in a draft's processors with one `FusedWarpers`.

    Rounding may differ.
    """
    fused: list[Any] = []
    order = list(_ARGUMENTS.values())
    for processor in processors:
        name = _ARGUMENTS.get(type(processor)) if _is_usual(processor) else None
        if name is None:
            fused.append(processor)
            continue
        run = fused[-1].arguments if fused and isinstance(fused[-1], FusedWarpers) else None
        if run is None or order.index(name) <= order.index(list(run)[-1]):
            run = {}
            fused.append(FusedWarpers(run, backend))
        run[name] = getattr(processor, name)
    return fused


def _is_usual(processor: Any) -> bool:
    keeps_single = (
        getattr(processor, "min_tokens_to_keep", 1) == 1 or type(processor) is TopKLogitsWarper
    )
    return keeps_single and getattr(processor, "filter_value", -torch.inf) == -torch.inf
