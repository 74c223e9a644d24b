"""Provide pairs of models with partial acceptance, and compare calls with plain decoding."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor, PreTrainedModel

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.types import DraftOut, NoiseKeys, Verdict
from tests.support.tiny import make_model, noisy_copy

DRAFT_NOISE = 0.05  # gives an acceptance rate of about 0.5 to 0.9, so rounds of all lengths occur
ACCEPTED_ALL, ACCEPTED_NONE = 0.0, 10.0  # noise for an identical and for an unrelated draft
Pair = tuple[tuple[str, str], tuple[str, str]]  # (axis, value) twice


class Unchanged(LogitsProcessor):
    """Custom processor that changes nothing.

    It is not registered as row-wise, so rows move in lock step.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class Streamed:
    """Streamer that records its tokens."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.has_ended = False

    @property
    def ids(self) -> list[int]:
        return [token_id for value in self.values for token_id in value]

    def put(self, value: Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


class AttentionCalls(TorchFunctionMode):
    """Context that records calls of `scaled_dot_product_attention`.

    It keeps the query and the keys of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Tensor] = []  # [B, H, Q, D] each
        self.keys: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.queries.append(args[0])
            self.keys.append(args[1])
        return func(*args, **(kwargs or {}))


class KeepsAll:
    """Wrong verifier that accepts every drafted token."""

    def verify(self, target_logits: Tensor, draft: DraftOut, keys: NoiseKeys) -> Verdict:
        accepted = torch.ones_like(draft.token_ids, dtype=torch.bool)
        return hf_speculate.keep_prefix(target_logits, draft, accepted, target_logits.argmax(-1))


# Options of a call for every drafter, verifier and cache.
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

# Options of a call by axis. The rows of `tests/pairs.json` contain every pair of values, and
# `generation/test_matrix.py` decodes each row. To add a feature, add a value here and run `python
# -m tests.pairs`.
AXES: dict[str, tuple[str, ...]] = {
    "family": (
        "llama",
        "qwen2",
        "mistral_window",
        "gemma2",
        "gpt2",
        "bloom",
        "phi3",
        "gpt_oss",
        "deepseek_v3",
        "falcon_h1",
        "mamba2",
        "t5",
    ),
    "drafter": (
        "model",
        "argmax",
        "other model",
        "lookup",
        "model and lookup",
        "early exit",
        "generator",
        "store",
        "state",
        "uno",
    ),
    "verifier": ("greedy", "rejection", "block", "coupled", "typical, argmax", "typical, sample"),
    "batch": ("1", "2", "3", "8"),
    "padding": ("none", "left", "right", "holes"),
    "cache": ("auto", "dynamic", "preallocated", "static"),
    "processors": ("none", "pure", "warpers", "custom", "grammar"),
    "stops": ("length", "eos", "two eos", "criterion"),
    "outputs": ("ids", "scores", "states", "passed cache"),
}
_RECURRENT, _READS_ENCODER = "it has recurrent layers", "it attends to an encoder"
MAMBA_CACHE: Pair = (("family", "mamba2"), ("outputs", "passed cache"))
# Unsupported pairs and the reasons.
EXCLUDED: dict[Pair, str] = {
    **{
        (("family", family), ("drafter", "early exit")): "its layers cannot be left out"
        for family in ("gpt2", "bloom", "t5")
    },
    **{
        (("family", family), ("drafter", "uno")): "its layers are none of the adapter's"
        for family in ("gpt2", "bloom", "falcon_h1", "mamba2", "t5")
    },
    (("family", "bloom"), ("cache", "preallocated")): "it takes no position_ids",
    (("family", "falcon_h1"), ("cache", "preallocated")): _RECURRENT,
    (("family", "mamba2"), ("cache", "preallocated")): _RECURRENT,
    (("family", "t5"), ("cache", "preallocated")): _READS_ENCODER,
    MAMBA_CACHE: "it takes its cache under another name",
    **{
        (("drafter", "generator"), ("batch", size)): "a generator drafts for one row"
        for size in ("2", "3", "8")
    },
    **{
        (("batch", size), ("outputs", "states")): "hidden states are those of one row"
        for size in ("2", "3", "8")
    },
    **{
        (("padding", side), ("cache", "preallocated")): "buffers hold no masked tokens"
        for side in ("right", "holes")
    },
    (("cache", "static"), ("outputs", "passed cache")): "transformers takes one or the other",
}

# pairs that newer versions of transformers support
SERVED_NOW = {MAMBA_CACHE} if CACHE_NAME == "cache" else set()


def each_value(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every value of every axis, but not with every combination.

    The values take turns. The rows of `AXES` combine options that affect each other; a test of a
    single mechanism needs no product.
    """
    values = [list(axis) for axis in axes.values()]
    rows = [
        tuple(axis[number % len(axis)] for axis in values)
        for number in range(max(map(len, values)))
    ]
    return pytest.mark.parametrize(tuple(axes), rows)


@cache
def pair(
    family: str, noise: float = DRAFT_NOISE, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the models of `new_pair`. Tests share them: change neither."""
    return new_pair(family, noise, seed, dtype=dtype)


def new_pair(
    family: str = "llama", noise: float = DRAFT_NOISE, seed: int = 0, **options: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Make an enabled target and its draft, in float64 by default."""
    target = hf_speculate.enable(make_model(family, seed=seed, **options))
    return target, noisy_copy(target, noise, seed=seed + 1)


def plain_and_ours(
    target: PreTrainedModel, draft: PreTrainedModel, inputs: dict[str, Tensor], **options: Any
) -> tuple[Any, Any]:
    """Run a call without a draft, then with the draft and all fields for drafting.

    `num_assistant_tokens` is 5 by default, because the adaptive schedule never calls drafts of the
    target's size.
    """
    draft_options: dict[str, Any] = {"num_assistant_tokens": 5}
    draft_options |= {
        name: options.pop(name)
        for name in list(options)
        if name in ("num_assistant_tokens", "speculation_stats")
    }
    plain = target.generate(**inputs, **options)
    ours = target.generate(**inputs, assistant_model=draft, **draft_options, **options)
    return plain, ours


OWN_FIELDS = (
    "candidate_generator",
    "drafter",
    "use_mtp",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "suffix_store",
    "draft_state",
    "speculation_cache",
    "speculation_callback",
)


def assert_decodes_as_plain(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    inputs: Mapping[str, Any],
    **options: Any,
) -> hf_speculate.SpeculationStats:
    """Assert that a call with `draft` gives the ids of plain decoding, and return its statistics.

    Plain decoding does not get `OWN_FIELDS`. As in `plain_and_ours`, 5 tokens are drafted by
    default.
    """
    stats = hf_speculate.SpeculationStats()
    own = {"num_assistant_tokens": 5, "speculation_stats": stats, "assistant_model": draft}
    own |= {name: options.pop(name) for name in OWN_FIELDS if name in options}
    texts = [target.generate(**inputs, **options, **more) for more in ({}, own)]
    assert_equal_ids(*(text if isinstance(text, Tensor) else text.sequences for text in texts))
    return stats


def assert_equal_ids(plain: Tensor, ours: Tensor) -> None:
    """Assert that two tensors [B, T] int64 have the same shape and ids."""
    assert plain.shape == ours.shape, f"{list(plain.shape)} against {list(ours.shape)}"
    assert torch.equal(plain, ours), (
        f"rows {(plain != ours).any(1).nonzero().flatten().tolist()} differ"
    )
