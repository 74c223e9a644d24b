"""Test that models with layers replaced by kernels from the Hub or from Liger decode from graphs.

Stand-ins replace the kernels.
"""

from types import MethodType
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_speculate
from tests.cases import assert_equal_ids, new_pair
from tests.support.tiny import ragged_prompts

CALLS: list[int] = []  # calls of the replaced layers; a replay makes none


class NormKernel(nn.Module):
    """Stateless class, as a kernel repository provides for a layer."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        CALLS.append(hidden_states.shape[1])
        scale = hidden_states.pow(2).mean(-1, keepdim=True).add(self.variance_epsilon).rsqrt()
        return self.weight * (hidden_states * scale)


class Repository:
    """Repository like `kernels.LayerRepository` that loads nothing."""

    def load(self) -> type[nn.Module]:
        return NormKernel


def use_kernels(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace forwards as `use_kernels=True` does, with any version of kernels."""
    import kernels  # optional dependency

    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": Repository()}}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return NormKernel.forward(self, hidden_states)


def lce_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    skip_logits: bool | None = None,
    **options: Any,
) -> CausalLMOutputWithPast:
    """Take the arguments of the forward that Liger gives to causal models."""
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        **options,
    )
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
    return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


norm_forward.__module__ = "liger_kernel.transformers.rms_norm"
lce_forward.__module__ = "liger_kernel.transformers.model.llama"


def apply_liger(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace forwards of instances, like Liger's `apply_liger_kernel_to_llama(model=model)`."""
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = MethodType(norm_forward, module)
    model.forward = MethodType(lce_forward, model)


@pytest.mark.parametrize(
    "replace", [pytest.param(use_kernels, marks=pytest.mark.hub_kernels), apply_liger]
)
def test_replaced_layers_run_from_graphs_and_give_the_plain_text(
    backend: Any, replace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = new_pair("llama", 0.1)
    for model in (target, draft):
        replace(model, monkeypatch)
    CALLS.clear()
    inputs, stats = ragged_prompts(3, max_len=20), hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 16, "eos_token_id": [17, 3]}
    plain = target.generate(**inputs, **options)
    assert CALLS
    ours = {"assistant_model": draft, "speculation_graphs": "on", "num_assistant_tokens": 3}
    ids = target.generate(**inputs, **options, **ours, speculation_stats=stats)
    assert_equal_ids(plain, ids)
    assert (stats.graphed, stats.fallbacks) == (["target", "draft"], [])
    assert backend.num_replays > stats.num_batch_rounds
