"""Validate shapes, dtypes and devices; the values of tensors are never read."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._inputs import Proposal, Warp
from .errors import ConfigError, ShapeError
from .types import NoiseKeys

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ID_DTYPES = (torch.int32, torch.int64)


def check_shape(name: str, tensor: Tensor, legend: str, shape: Sequence[int]) -> None:
    """Raise unless `tensor` has `shape`; `legend` names the dimensions in the message."""
    if tuple(tensor.shape) != tuple(shape):
        raise ShapeError(f"{name} must be [{legend}] = {list(shape)}, got {list(tensor.shape)}")


def check_dtype(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless `tensor` has one of `dtypes`."""
    if tensor.dtype not in dtypes:
        choices = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ShapeError(
            f"{name} must be one of {choices}, got {str(tensor.dtype).removeprefix('torch.')}"
        )


def check_device(name: str, tensor: Tensor, other: Tensor, other_name: str = "the logits") -> None:
    """Raise unless both tensors are on the same device."""
    if tensor.device != other.device:
        raise ShapeError(
            f"{name} must be on {other.device}, like {other_name}, got {tensor.device}"
        )


def check_logits(name: str, logits: Tensor, legend: str) -> None:
    """Raise unless `logits` has the dimensions in `legend`, V >= 1 and a float dtype."""
    num_dims = legend.count(",") + 1
    if (
        logits.dim() != num_dims
        or logits.shape[-1] == 0
        or (num_dims == 3 and logits.shape[1] == 0)
    ):
        raise ShapeError(f"{name} must be [{legend}] with V >= 1, got {list(logits.shape)}")
    check_dtype(name, logits, FLOAT_DTYPES)


def check_round(target_logits: Tensor, draft_token_ids: Tensor, draft_lens: Tensor | None) -> None:
    """Raise unless the inputs shared by all verifiers have matching shapes, dtypes and devices."""
    check_logits("target_logits", target_logits, "B, K+1, V")
    num_rows, num_positions, _ = target_logits.shape
    check_shape("draft_token_ids", draft_token_ids, "B, K", (num_rows, num_positions - 1))
    check_dtype("draft_token_ids", draft_token_ids, ID_DTYPES)
    check_device("draft_token_ids", draft_token_ids, target_logits)
    if draft_lens is not None:
        check_shape("draft_lens", draft_lens, "B", (num_rows,))
        check_dtype("draft_lens", draft_lens, ID_DTYPES)
        check_device("draft_lens", draft_lens, target_logits)


def check_proposal(
    target_logits: Tensor, draft_logits: Tensor | None, draft_logsumexp: Tensor | None
) -> Proposal | None:
    """Validate the draft distribution and return it; None means a point mass."""
    num_rows, num_positions, vocab_size = target_logits.shape
    if draft_logits is not None:
        check_shape(
            "draft_logits", draft_logits, "B, K, V", (num_rows, num_positions - 1, vocab_size)
        )
        check_dtype("draft_logits", draft_logits, FLOAT_DTYPES)
        check_device("draft_logits", draft_logits, target_logits)
    elif draft_logsumexp is not None:
        raise ConfigError(
            "draft_logsumexp must come with draft_logits, got draft_logits=None; leave both out "
            "for a point mass"
        )
    if draft_logsumexp is not None:
        check_shape("draft_logsumexp", draft_logsumexp, "B, K", (num_rows, num_positions - 1))
        check_dtype("draft_logsumexp", draft_logsumexp, (torch.float32,))
        check_device("draft_logsumexp", draft_logsumexp, target_logits)
    return None if draft_logits is None else Proposal(draft_logits, draft_logsumexp)


def check_warp(logits: Tensor, legend: str, warp: Warp) -> Warp:
    """Return `warp` unchanged; raise unless its values, shapes and dtypes are valid."""
    temperature, row_cutoffs = warp
    shape = logits.shape[:-1]
    if isinstance(temperature, Tensor):
        check_shape("temperature", temperature, "B", shape[:1])
        check_dtype("temperature", temperature, FLOAT_DTYPES)
        check_device("temperature", temperature, logits)
    else:
        check_temperature(temperature)
    if row_cutoffs is not None:
        check_shape("row_cutoffs", row_cutoffs, legend, shape)
        check_dtype("row_cutoffs", row_cutoffs, FLOAT_DTYPES)
        check_device("row_cutoffs", row_cutoffs, logits)
    return warp


def check_temperature(temperature: float) -> None:
    """Raise unless a temperature is finite and >= 0."""
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise ConfigError(f"temperature must be finite and >= 0, got {temperature}; 0 means argmax")


def check_keys(keys: NoiseKeys, logits: Tensor) -> None:
    """Raise unless every key is [B] int64 on the device of the logits."""
    for name, key in zip(keys._fields, keys, strict=True):
        check_shape(f"keys.{name}", key, "B", logits.shape[:1])
        check_dtype(f"keys.{name}", key, (torch.int64,))
        check_device(f"keys.{name}", key, logits)
