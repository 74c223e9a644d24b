"""Arguments that do not fit are named before anything runs."""

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hf_speculate.triton_kernels import (
    ConfigError,
    KernelUnavailableError,
    ShapeError,
    Stream,
    reference,
    sample,
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_rejection,
    verify_typical,
)
from hf_speculate.triton_kernels.backends import operations
from tests.triton_kernels.distributions import make_keys

TARGET = torch.zeros(1, 3, 4)
IDS = torch.zeros(1, 2, dtype=torch.int64)
KEYS = make_keys(1)
SUMS = torch.zeros(1, 2)
CALLS: dict[str, Callable[..., object]] = {
    "greedy": partial(verify_greedy, target_logits=TARGET, draft_token_ids=IDS),
    "rejection": partial(verify_rejection, target_logits=TARGET, draft_token_ids=IDS, keys=KEYS),
    "block": partial(verify_block, target_logits=TARGET, draft_token_ids=IDS, keys=KEYS, draft_logits=TARGET[:, :2]),
    "coupled": partial(verify_coupled, target_logits=TARGET, draft_token_ids=IDS, keys=KEYS),
    "typical": partial(verify_typical, target_logits=TARGET, draft_token_ids=IDS),
    "sample": partial(sample, logits=TARGET[:, 0], keys=KEYS, stream=Stream.DRAFT),
}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("greedy", {"draft_token_ids": IDS[:, :1]}, "draft_token_ids must be [B, K] = [1, 2], got [1, 1]"),
        ("greedy", {"target_logits": TARGET[..., :0]}, "target_logits must be [B, K+1, V]"),
        ("greedy", {"target_logits": TARGET.int()}, "must be one of bfloat16"),
        ("greedy", {"draft_token_ids": IDS.float()}, "draft_token_ids must be one of"),
        ("greedy", {"draft_lens": torch.tensor(2)}, "draft_lens must be [B]"),
        ("rejection", {"draft_logits": TARGET[:, :2], "draft_logsumexp": SUMS[0]}, "draft_logsumexp must be [B, K]"),
        ("rejection", {"draft_logits": TARGET[:, :2].to("meta")}, "draft_logits must be on cpu"),
        ("rejection", {"temperature": torch.ones(2)}, "temperature must be [B]"),
        ("rejection", {"keys": make_keys(2)}, "keys.seeds must be [B]"),
        ("block", {"draft_logits": TARGET}, "draft_logits must be [B, K, V]"),
        ("block", {"draft_lens": torch.zeros(1)}, "draft_lens must be one of"),
        ("coupled", {"row_cutoffs": torch.zeros(1, 3, device="meta")}, "row_cutoffs must be on cpu"),
        ("sample", {"row_cutoffs": torch.zeros(2)}, "row_cutoffs must be [B]"),
        ("sample", {"keys": KEYS._replace(rounds=KEYS.rounds.int())}, "keys.rounds must be one of int64"),
        *(("typical", {"posterior_threshold": value}, "posterior_threshold must") for value in (0.0, 1.0)),
        ("typical", {"posterior_alpha": 0.0}, "posterior_alpha must"),
        ("typical", {"entropy_epsilon": -1e-5}, "entropy_epsilon must"),
        ("typical", {"correction": "best"}, "correction must"),
        ("typical", {"correction": "sample"}, "keys must"),
        ("rejection", {"draft_logsumexp": SUMS}, "draft_logsumexp must"),
        *(("coupled", {"temperature": value}, "temperature must") for value in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ShapeError, ConfigError), match=re.escape(words)):
        CALLS[name](**changes)


@pytest.mark.parametrize("name", CALLS)
def test_every_operation_takes_the_backends_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("auto", "torch"):
        CALLS[name](backend=backend)
    with pytest.raises(ConfigError, match='backend must be one of "auto", "torch", "triton", got \'cuda\''):
        CALLS[name](backend="cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelUnavailableError, match='got "triton"'):
        CALLS[name](backend="triton")


@pytest.mark.parametrize(("version", "words"), [("3.5.1", "which is installed as 3.5"), (None, "is not installed")])
def test_a_missing_or_old_triton_is_named(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version is None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    with pytest.raises(KernelUnavailableError, match=re.escape(words)):
        CALLS["greedy"](backend="triton")
    assert operations("auto", torch.device("cuda")) is reference
