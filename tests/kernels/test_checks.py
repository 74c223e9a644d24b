"""Test that invalid arguments are named before anything runs."""

import importlib.util
import re
from typing import Any

import pytest
import torch

from hf_speculate import kernels
from hf_speculate.kernels import (
    ConfigError,
    Draws,
    KernelUnavailableError,
    ShapeError,
    Stream,
    reference,
)
from hf_speculate.kernels.backends import operations
from tests.kernels.distributions import make_keys

FLAT, IDS, KEYS, SUMS = (
    torch.full((1, 3, 4), 0.25),
    torch.zeros(1, 2, dtype=torch.int64),
    make_keys(1),
    torch.ones(1, 2),
)
DRAFT, ROW = FLAT[:, :2], FLAT[:, 0]


def draw_twice(
    first: torch.Tensor, second: torch.Tensor, keys: Any = KEYS, backend: str = "auto"
) -> None:
    round_ = Draws(keys, Stream.DRAFT, 2, backend=backend)
    round_.draw(first)
    round_.draw(second)


def accept(
    rule: tuple[float, float] = (0.09, 0.3),
    strict: bool = True,
    backend: str = "auto",
    **round_: Any,
) -> None:
    kernels.TypicalAcceptanceSampler(*rule, strict, backend=backend)(**round_)


# Functions and valid arguments, by name.
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "verify_greedy": (None, {"target_logits": FLAT, "draft_token_ids": IDS}),
    "verify_rejection": (None, {"target_logits": FLAT, "draft_token_ids": IDS, "keys": KEYS}),
    "verify_block": (
        None,
        {"target_logits": FLAT, "draft_token_ids": IDS, "keys": KEYS, "draft_logits": DRAFT},
    ),
    "verify_coupled": (None, {"target_logits": FLAT, "draft_token_ids": IDS, "keys": KEYS}),
    "verify_typical": (None, {"target_logits": FLAT, "draft_token_ids": IDS}),
    "sample": (None, {"logits": ROW, "keys": KEYS, "stream": Stream.DRAFT}),
    "draws": (draw_twice, {"first": ROW, "second": ROW}),
    "warp_logits": (None, {"logits": ROW}),
    "chain_speculative_sampling": (
        None,
        {"draft_probs": DRAFT, "draft_token_ids": IDS, "target_probs": FLAT},
    ),
    "greedy_match": (None, {"target_dists": FLAT[0], "candidate_tokens": IDS[0]}),
    "speculative_sampling": (
        None,
        {"target_dists": FLAT[0], "proposal_dists": DRAFT[0], "candidate_tokens": IDS[0]},
    ),
    "sampler": (
        accept,
        {
            "target_with_bonus_probs": FLAT,
            "draft_probs": None,
            "draft_token_ids": IDS,
            "bonus_token_ids": IDS[:, 0],
        },
    ),
}


def call(name: str, **changes: Any) -> None:
    function, arguments = CALLS[name]
    (function or getattr(kernels, name))(**arguments | changes)


# One invalid argument, and how the message starts.
MISFITS = [
    ("verify_greedy", "draft_token_ids", IDS[:, :1], "must be [B, K] = [1, 2], got [1, 1]"),
    ("verify_greedy", "target_logits", FLAT[..., :0], "must be [B, K+1, V]"),
    ("verify_greedy", "target_logits", FLAT.int(), "must be one of bfloat16"),
    ("verify_greedy", "draft_token_ids", IDS.float(), "must be one of"),
    ("verify_greedy", "draft_lens", torch.tensor(2), "must be [B]"),
    ("verify_rejection", "draft_logits", DRAFT.to("meta"), "must be on cpu"),
    ("verify_rejection", "draft_logsumexp", SUMS, "must"),
    ("verify_rejection", "temperature", torch.ones(2), "must be [B]"),
    ("verify_rejection", "keys", make_keys(2), ".seeds must be [B]"),
    ("verify_block", "draft_logits", FLAT, "must be [B, K, V]"),
    ("verify_block", "draft_logsumexp", SUMS[0], "must be [B, K]"),
    ("verify_block", "draft_lens", torch.zeros(1), "must be one of"),
    ("verify_coupled", "row_cutoffs", torch.zeros(1, 3, device="meta"), "must be on cpu"),
    *(
        ("verify_coupled", "temperature", value, "must")
        for value in (-1.0, float("nan"), float("inf"))
    ),
    *(("verify_typical", "posterior_threshold", value, "must") for value in (0.0, 1.0)),
    ("verify_typical", "posterior_alpha", 0.0, "must"),
    ("verify_typical", "entropy_epsilon", -1e-5, "must"),
    ("verify_typical", "correction", "best", "must"),
    ("sample", "row_cutoffs", torch.zeros(2), "must be [B]"),
    ("sample", "keys", KEYS._replace(rounds=KEYS.rounds.int()), ".rounds must be one of int64"),
    ("draws", "keys", make_keys(2), ".seeds must be"),
    ("warp_logits", "logits", FLAT, "must be [B, V]"),
    *(("warp_logits", "temperature", value, "must be") for value in (0.0, -1.0)),
    ("warp_logits", "top_k", 0, "must be"),
    *(("warp_logits", "top_p", value, "must be") for value in (0.0, 1.5)),
    *(("warp_logits", "min_p", value, "must be") for value in (-0.1, 1.1)),
    ("chain_speculative_sampling", "draft_probs", FLAT, "must be"),
    ("chain_speculative_sampling", "draft_token_ids", IDS[:, :1], "must be"),
    ("chain_speculative_sampling", "target_probs", FLAT[0], "must be"),
    ("chain_speculative_sampling", "seed", torch.arange(2), "must be"),
    ("chain_speculative_sampling", "offset", torch.tensor(2), "must be"),
    (
        "chain_speculative_sampling",
        "maybe_output_accepted_token_num",
        torch.zeros(2).int(),
        "must be",
    ),
    (
        "chain_speculative_sampling",
        "maybe_output_emitted_draft_token_num",
        torch.zeros(1),
        "must be",
    ),
    ("greedy_match", "candidate_tokens", IDS[0, :1], "must be"),
    ("speculative_sampling", "proposal_dists", FLAT[0], "must be"),
    ("sampler", "target_with_bonus_probs", FLAT[0], "must be"),
    ("sampler", "draft_token_ids", IDS.float(), "must be"),
    ("sampler", "draft_token_ids", IDS - 4, "must be"),
    ("sampler", "draft_token_ids", IDS.to("meta"), "must be on cpu"),
    ("sampler", "bonus_token_ids", IDS, "must be"),
    ("sampler", "bonus_token_ids", IDS[:, 0] + 4, "must be"),
    ("sampler", "draft_probs", FLAT, "must be"),
]


@pytest.mark.parametrize(("name", "argument", "value", "words"), MISFITS)
def test_invalid_argument_is_named(name: str, argument: str, value: Any, words: str) -> None:
    with pytest.raises(
        (ShapeError, ConfigError),
        match=re.escape(f"{argument}{'' if words[0] == '.' else ' '}{words}"),
    ):
        call(name, **{argument: value})


def test_mismatched_arguments_are_named() -> None:
    for name, words, changes in [
        ("verify_typical", "keys must", {"correction": "sample"}),
        ("draws", "logits must be", {"second": torch.zeros(1, 3)}),
        ("sampler", "posterior_threshold must be", {"rule": (0.0, 0.3)}),
    ]:
        with pytest.raises((ShapeError, ConfigError), match=words):
            call(name, **changes)


@pytest.mark.parametrize("name", CALLS)
def test_operations_take_backends_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("auto", "torch"):
        call(name, backend=backend)
    with pytest.raises(
        ConfigError, match='backend must be one of "auto", "torch", "triton", got \'cuda\''
    ):
        call(name, backend="cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelUnavailableError, match='got "triton"'):
        call(name, backend="triton")


@pytest.mark.parametrize(
    ("version", "words"), [("3.5.1", "which is installed as 3.5"), (None, "is not installed")]
)
def test_missing_or_old_triton_is_named(
    version: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    with pytest.raises(KernelUnavailableError, match=re.escape(words)):
        call("verify_greedy", backend="triton")
    assert operations("auto", torch.device("cuda")) is reference
