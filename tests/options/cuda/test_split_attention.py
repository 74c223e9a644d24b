"""Test the attention kernel for few queries, which a GPU uses after a successful trial."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_speculate.cache.masks import marked_as_spans, shows_spans
from hf_speculate.compat import set_attention_name
from hf_speculate.kernels import attention
from hf_speculate.options.cuda import attention_backends, split_attention
from hf_speculate.options.cuda.split_attention import Build, Contender, examine
from tests.cases import assert_equal_ids, each_value, new_pair
from tests.support.fake_cuda import DEVICE, FakeCuda
from tests.support.flash import flash_attention
from tests.support.tiny import ragged_prompts

pytest.importorskip("triton", reason="needs Triton")

K = 3


class AllUsed(dict[Build, str]):
    """Trials that were all won."""

    def get(self, *args: Any) -> str:
        return ""


class Clock:
    """Clock for calls that take given times."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(*args: Any) -> Tensor:
            self.now += seconds
            return attend(*args)

        return timed


@each_value(
    family=["llama", "mistral_window", "mistral_window"],
    batch_size=[2, 1, 1],
    attention=["sdpa", "sdpa", "flash_attention_2"],
)
def test_verification_through_the_kernel_gives_plain_ids(
    family: str, batch_size: int, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = new_pair(family, 0.1, dtype=torch.float16)
    inputs = ragged_prompts(batch_size, seed=3)
    expected = target.generate(**inputs, max_new_tokens=10)
    tried = set[int]()  # numbers of tokens in forwards that may run a trial
    monkeypatch.setattr(
        split_attention, "run_trial", lambda query, *others: tried.add(query.shape[2])
    )
    options = {"num_assistant_tokens": K, "verifier_backend": "torch", "speculation_graphs": "off"}
    options["num_assistant_tokens_schedule"] = "constant"
    monkeypatch.setattr(split_attention, "reasons_against", AllUsed())
    monkeypatch.setattr(split_attention, "MIN_EAGER_KEYS", 0)
    with FakeCuda() as gpu, flash_attention():
        for model in (target, draft):
            set_attention_name(model.to("cuda:0").config, attention)
        gpu.watch(target, "target")
        inputs = {name: value.to("cuda:0") for name, value in inputs.items()}
        ids = target.generate(**inputs, assistant_model=draft, max_new_tokens=10, **options).to(
            "cpu"
        )
        launches = gpu.log.launches["target"]
    assert_equal_ids(expected, ids)
    assert inputs["input_ids"].shape[1] in tried
    num_spans, num_attend, num_merge = (
        launches[f"triton {name}_kernel"] for name in ("key_spans", "attend", "merge")
    )
    assert num_attend == num_merge == target.config.num_hidden_layers * num_spans
    # Neither the prompt nor a single token at the end needs a mask from the library.
    assert num_spans == launches["embedding"] - 2


def changed(**changes: Any) -> dict[str, Any]:
    """Return arguments for `serves`, with some changes."""
    query, key = (
        torch.zeros(1, 4, 6, 16, dtype=torch.bfloat16),
        torch.zeros(1, 2, 40, 16, dtype=torch.bfloat16),
    )
    states = {"query": query, "key": key, "value": key}
    states = {name: changes.get(name, torch.clone)(tensor) for name, tensor in states.items()}
    return {**states, "scaling": None, "is_captured": changes.get("is_captured", True)}


@pytest.mark.parametrize(
    ("arguments", "is_served"),
    [
        (changed(), True),
        (changed(is_captured=False), False),  # 40 keys
        (
            changed(
                is_captured=False,
                **dict.fromkeys(("key", "value"), lambda key: key.repeat(1, 1, 103, 1)),
            ),
            True,
        ),
        (changed(query=lambda query: query.repeat(1, 1, 6, 1)), False),  # 36 tokens
        (changed(query=lambda query: query.clone().requires_grad_()), False),
        (changed(value=lambda value: value[..., :8]), False),
        (changed(key=lambda key: key.half()), False),
        (changed(key=lambda key: key.transpose(2, 3).contiguous().transpose(2, 3)), False),
    ],
)
def test_unsupported_attention_is_left_to_torch(
    arguments: dict[str, Any], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_attention, "reasons_against", AllUsed())
    assert split_attention.serves(**arguments) == is_served


def test_mask_changed_by_a_model_is_not_read_as_spans() -> None:
    with FakeCuda():
        mask = marked_as_spans(torch.zeros(1, 1, 2, 8, device=DEVICE))
        assert shows_spans(mask)
        assert not shows_spans(mask[..., :4]) and not shows_spans(mask + 1)


BUILD = Build(DEVICE, torch.bfloat16, groups=2, num_heads=1, width=16)


def in_torch(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scaling: float | None
) -> Tensor:
    return attention.attend(query, key, value, spans.int(), scaling=scaling, backend="torch")


def reads_behind(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scaling: float | None
) -> Tensor:
    return in_torch(query, key, value, spans + torch.arange(2, device=DEVICE), scaling)


def misses_first(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scaling: float | None
) -> Tensor:
    return in_torch(query, key, value, spans + 64 * torch.arange(2, device=DEVICE).flip(0), scaling)


@pytest.mark.parametrize(
    ("attend", "seconds", "reason"),
    [
        (in_torch, 1e-6, ""),
        (in_torch, 3e-6, "3 us against 2 us"),
        (reads_behind, 1e-6, "results differ by nan with 1 query tokens"),
        (misses_first, 1e-6, "results differ by"),
    ],
)
def test_trial_finds_wrong_and_slow_kernels(
    attend: Callable[..., Tensor], seconds: float, reason: str
) -> None:
    clock = Clock()
    efficient = Contender(
        partial(attention_backends.additive_mask, groups=2, dtype=BUILD.dtype),
        clock.takes(2e-6, attention_backends._attend_folded),
    )
    ours = Contender(partial(attention.key_spans, backend="torch"), clock.takes(seconds, attend))
    with FakeCuda():
        found = examine(BUILD, ours, efficient, clock)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.fixture
def _no_verdicts() -> Iterator[None]:
    before = dict(split_attention.reasons_against)
    split_attention.reasons_against.clear()
    yield
    split_attention.reasons_against.clear()
    split_attention.reasons_against.update(before)


@pytest.mark.usefixtures("_no_verdicts")
def test_missing_compiler_leaves_kernels_out() -> None:
    target, _ = new_pair("llama", dtype=torch.bfloat16)
    with FakeCuda() as gpu:
        target.to("cuda:0")
        inputs = {name: value.to("cuda:0") for name, value in ragged_prompts(2).items()}
        options = {"prompt_lookup_num_tokens": K, "max_new_tokens": 4, "speculation_graphs": "off"}
        target.generate(**inputs, **options, verifier_backend="torch")
        assert set(split_attention.reasons_against.values()) == {
            "Triton does not compile kernels here"
        }
        assert not gpu.log.launches[""]["triton attend_kernel"]


@pytest.mark.gpu
@pytest.mark.usefixtures("_no_verdicts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_trial_on_a_device_accepts_the_kernel(dtype: torch.dtype, width: int) -> None:
    query = torch.zeros(1, 32, 5, width, dtype=dtype, device="cuda:0")
    attention_backends.find_devices()
    key = query[:, :8]
    attention_backends.prepare(query, key, key)
    (reason,) = split_attention.reasons_against.values()
    assert not reason or " us against " in reason, reason
