"""Fused logits warpers: temperature, top-k, top-p and min-p of a draft in one operation."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_speculate.triton_kernels import warp_logits

# By type, the argument of `warp_logits` that stands for a warper; they are applied in this order.
_ARGUMENTS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_ORDER = list(_ARGUMENTS)


class FusedWarpers(LogitsProcessor):
    """Replaces up to four warpers by one `warp_logits`."""

    takes_half = True  # scores may come in half precision

    def __init__(self, arguments: dict[str, Any], backend: str = "auto"):
        self.arguments = arguments
        self.backend = backend

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """[N, V] float32 from scores [N, V] of any floating dtype; the ids are not read."""
        return warp_logits(scores, **self.arguments, backend=self.backend)


def fuse_warpers(processors: Iterable[Any], backend: str = "auto") -> list[Any]:
    """The processors of a draft, with one `FusedWarpers`, which may round differently, for each run of warpers."""
    fused: list[Any] = []
    run: list[Any] = []
    for processor in processors:
        if run and not (_is_known(processor) and _rank(processor) > _rank(run[-1])):
            fused, run = [*fused, _joined(run, backend)], []
        if _is_known(processor):
            run.append(processor)
        else:
            fused.append(processor)
    return [*fused, _joined(run, backend)] if run else fused


def _is_known(processor: Any) -> bool:
    keeps_one = getattr(processor, "min_tokens_to_keep", 1) == 1 or type(processor) is TopKLogitsWarper
    drops = getattr(processor, "filter_value", -torch.inf) == -torch.inf
    return type(processor) in _ARGUMENTS and keeps_one and drops


def _rank(processor: Any) -> int:
    return _ORDER.index(type(processor))


def _joined(run: list[Any], backend: str) -> FusedWarpers:
    names = [_ARGUMENTS[type(one)] for one in run]
    return FusedWarpers({name: getattr(one, name) for name, one in zip(names, run, strict=True)}, backend)
