"""What the tests of whole calls share: pairs with partial acceptance, and calls beside their plain twin."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_speculate
from tests.tiny import make_model, noisy_copy

DRAFT_NOISE = 0.05  # leaves an acceptance of about 0.5 to 0.9, so that rounds of all lengths occur
ACCEPTED_ALL, ACCEPTED_NONE = 0.0, 10.0  # noise that leaves the draft equal to the target, or foreign to it


# Every way to draft, every verifier and every cache, for `tests/generation/test_matrix.py`.
DRAFTERS: dict[str, dict[str, Any]] = {
    "model, sampling": {"draft_sampling": "sample"},
    "model, argmax": {"draft_sampling": "argmax"},
    "hybrid": {"prompt_lookup_num_tokens": 4},
    "copying": {"prompt_lookup_num_tokens": 4, "assistant_model": None},
}
VERIFIERS: dict[str, dict[str, Any]] = {
    "greedy": {"verifier": "greedy", "do_sample": False},
    "rejection": {"verifier": "rejection", "do_sample": True},
    "block": {"verifier": "block", "do_sample": True},
    "coupled": {"verifier": "coupled", "do_sample": True},
    "typical, argmax": {"verifier": "typical", "do_sample": False},
    "typical, sample": {"verifier": "typical", "do_sample": True},
}
CACHES = ("auto", "dynamic", "preallocated")


@cache
def pair(
    kind: str, noise: float = DRAFT_NOISE, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """An enabled target and its draft, float64 unless told. Shared between tests: change neither."""
    target = make_model(kind, seed=seed, dtype=dtype)
    draft = noisy_copy(target, noise, seed=seed + 1)
    return hf_speculate.enable(target), draft


def plain_and_ours(
    target: PreTrainedModel, draft: PreTrainedModel, inputs: dict[str, Tensor], **options: Any
) -> tuple[Any, Any]:
    """One call twice: plainly, and with the draft. `num_assistant_tokens` and our fields go to the second only.

    The number is 5 unless told: drafts of the target's size are never called by the adaptive schedule.
    """
    own: dict[str, Any] = {"num_assistant_tokens": 5}
    own |= {name: options.pop(name) for name in list(options) if name in ("num_assistant_tokens", "speculation_stats")}
    plain = target.generate(**inputs, **options)
    ours = target.generate(**inputs, assistant_model=draft, **own, **options)
    return plain, ours


def assert_equal_ids(plain: Tensor, ours: Tensor) -> None:
    """Both [B, T] int64, shape and ids equal."""
    assert plain.shape == ours.shape, f"{list(plain.shape)} against {list(ours.shape)}"
    assert torch.equal(plain, ours), f"rows {(plain != ours).any(1).nonzero().flatten().tolist()} differ"
