"""What does not fit is rejected at the door, in words that say what would fit."""

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_speculate.triton_kernels import (
    ConfigError,
    KernelUnavailableError,
    NoiseKeys,
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


def greedy(**changes: Any) -> object:
    return verify_greedy(**{"target_logits": TARGET, "draft_token_ids": IDS} | changes)


def rejection(**changes: Any) -> object:
    return verify_rejection(**{"target_logits": TARGET, "draft_token_ids": IDS, "keys": KEYS} | changes)


def block(**changes: Any) -> object:
    return verify_block(**{"target_logits": TARGET, "draft_token_ids": IDS, "keys": KEYS} | changes)


def coupled(**changes: Any) -> object:
    return verify_coupled(**{"target_logits": TARGET, "draft_token_ids": IDS, "keys": KEYS} | changes)


def typical(**changes: Any) -> object:
    return verify_typical(**{"target_logits": TARGET, "draft_token_ids": IDS} | changes)


def draw(**changes: Any) -> object:
    return sample(**{"logits": TARGET[:, 0], "keys": KEYS, "stream": Stream.DRAFT} | changes)


@pytest.mark.parametrize(
    ("call", "changes", "words"),
    [
        (greedy, {"draft_token_ids": IDS[:, :1]}, "draft_token_ids must be [B, K] = [1, 2], got [1, 1]"),
        (greedy, {"target_logits": TARGET[0]}, "target_logits must be [B, K+1, V] with V >= 1, got [3, 4]"),
        (greedy, {"target_logits": TARGET[..., :0]}, "target_logits must be [B, K+1, V] with V >= 1, got [1, 3, 0]"),
        (greedy, {"target_logits": TARGET.int()}, "must be one of bfloat16, float16, float32, float64, got int32"),
        (greedy, {"draft_token_ids": IDS.float()}, "draft_token_ids must be one of int32, int64, got float32"),
        (greedy, {"draft_lens": torch.tensor(2)}, "draft_lens must be [B] = [1], got []"),
        (rejection, {"draft_logits": TARGET}, "draft_logits must be [B, K, V] = [1, 2, 4], got [1, 3, 4]"),
        (
            rejection,
            {"draft_logits": TARGET[:, :2], "draft_logsumexp": torch.zeros(2)},
            "draft_logsumexp must be [B, K] = [1, 2], got [2]",
        ),
        (rejection, {"temperature": torch.ones(2)}, "temperature must be [B] = [1], got [2]"),
        (rejection, {"row_cutoffs": torch.zeros(1, 2)}, "row_cutoffs must be [B, K+1] = [1, 3], got [1, 2]"),
        (rejection, {"keys": make_keys(2)}, "keys.seeds must be [B] = [1], got [2]"),
        (rejection, {"keys": NoiseKeys(*(key.int() for key in KEYS))}, "keys.seeds must be one of int64, got int32"),
        (block, {"draft_logits": TARGET}, "draft_logits must be [B, K, V] = [1, 2, 4], got [1, 3, 4]"),
        (block, {"draft_lens": torch.zeros(1)}, "draft_lens must be one of int32, int64, got float32"),
        (coupled, {"row_cutoffs": torch.zeros(1, 2)}, "row_cutoffs must be [B, K+1] = [1, 3], got [1, 2]"),
        (coupled, {"keys": make_keys(2)}, "keys.seeds must be [B] = [1], got [2]"),
        (draw, {"logits": TARGET}, "logits must be [B, V] with V >= 1, got [1, 3, 4]"),
        (draw, {"row_cutoffs": torch.zeros(2)}, "row_cutoffs must be [B] = [1], got [2]"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(call: Callable[..., object], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeError, match=re.escape(words)):
        call(**changes)


@pytest.mark.parametrize(
    ("call", "changes", "words"),
    [
        (rejection, {"temperature": -1.0}, "temperature must be finite and >= 0, got -1.0"),
        (rejection, {"temperature": float("nan")}, "temperature must be finite and >= 0, got nan"),
        (rejection, {"draft_logsumexp": torch.zeros(1, 2)}, "draft_logsumexp must come with draft_logits"),
        (block, {"draft_logsumexp": torch.zeros(1, 2)}, "draft_logsumexp must come with draft_logits"),
        (coupled, {"temperature": float("inf")}, "temperature must be finite and >= 0, got inf"),
        (typical, {"posterior_threshold": 1.0}, "posterior_threshold must be in (0, 1), got 1.0"),
        (typical, {"posterior_alpha": 0.0}, "posterior_alpha must be finite and > 0, got 0.0"),
        (typical, {"entropy_epsilon": -1e-5}, "entropy_epsilon must be finite and >= 0, got -1e-05"),
        (typical, {"correction": "best"}, 'correction must be one of "argmax", "sample", got \'best\''),
        (typical, {"correction": "sample"}, 'keys must be given with correction="sample", got None'),
    ],
)
def test_a_wrong_setting_is_named(call: Callable[..., object], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        call(**changes)


CALLS = [greedy, rejection, block, coupled, typical, draw]


@pytest.mark.parametrize("call", CALLS)
def test_every_operation_takes_the_backends_by_name(call: Callable[..., object]) -> None:
    for backend in ("auto", "torch"):
        call(backend=backend)
    with pytest.raises(ConfigError, match='backend must be one of "auto", "torch", "triton", got \'cuda\''):
        call(backend="cuda")


@pytest.mark.parametrize("call", CALLS)
def test_triton_by_name_is_refused_where_it_cannot_run(
    call: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelUnavailableError, match='got "triton"'):
        call(backend="triton")


@pytest.mark.parametrize(("version", "words"), [("3.5.1", "which is installed as 3.5"), (None, "is not installed")])
def test_a_missing_or_old_triton_is_named(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version is None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    with pytest.raises(KernelUnavailableError, match=re.escape(words)):
        greedy(backend="triton")
    assert operations("auto", torch.device("cuda")) is reference


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (greedy, "draft_token_ids"),
        (greedy, "draft_lens"),
        (rejection, "draft_logits"),
        (rejection, "draft_logsumexp"),
        (rejection, "temperature"),
        (coupled, "row_cutoffs"),
    ],
)
def test_a_tensor_on_another_device_is_named(call: Callable[..., object], name: str) -> None:
    fitting = {
        "draft_token_ids": IDS,
        "draft_lens": torch.ones(1, dtype=torch.int64),
        "draft_logits": TARGET[:, :2],
        "draft_logsumexp": torch.zeros(1, 2),
        "temperature": torch.ones(1),
        "row_cutoffs": torch.zeros(1, 3),
    }
    changes = {name: fitting[name].to("meta")}
    if name == "draft_logsumexp":
        changes["draft_logits"] = fitting["draft_logits"]
    with pytest.raises(ShapeError, match=re.escape(f"{name} must be on cpu, like the logits, got meta")):
        call(**changes)


def test_keys_on_another_device_are_named() -> None:
    keys = KEYS._replace(rounds=KEYS.rounds.to("meta"))
    with pytest.raises(ShapeError, match=re.escape("keys.rounds must be on cpu, like the logits, got meta")):
        draw(keys=keys)
