"""Estimate an upper bound on a pair's speed-up from the bytes read per token."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_speculate.config import DEFAULT_MAX_ASSISTANT_TOKENS
from hf_speculate.models.kv_size import kv_values_per_token
from hf_speculate.models.language_model import input_table
from hf_speculate.models.module_walk import weight_bytes

ACCEPTANCE_PROBABILITIES = (0.6, 0.7, 0.8, 0.9)
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")


class ModelSize(NamedTuple):
    """The size of a model and its cache."""

    num_params: int
    num_bytes: int
    num_lookup_bytes: int = 0  # bytes of an untied input embedding, of which a token reads one row
    num_expert_bytes: int = 0  # bytes of routed experts
    num_experts: int = 1
    num_chosen: int = 1  # number of experts per token
    kv_bytes_per_token: int = 0

    def num_read_bytes(self, num_tokens: int = 1) -> float:
        """Estimate the bytes read by a forward over `num_tokens` tokens.

        Each token's experts are assumed to be chosen independently.
        """
        share = 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_bytes - self.num_lookup_bytes - self.num_expert_bytes * (1 - share)


@dataclass(frozen=True)
class Gain:
    """The best draft length for one verified acceptance rate."""

    acceptance_probability: float  #: accepted over verified drafted tokens
    num_draft_tokens: int  #: 0 if no draft length is faster than plain decoding
    speedup: float  #: speed-up over plain decoding; 1.0 without drafts


def size_of(
    model: PreTrainedModel, bytes_per_param: float | None = None, bytes_per_value: float = 2.0
) -> ModelSize:
    """Count a model's parameters and bytes; it may be on the meta device.

    Args:
        model: any model with a text config.
        bytes_per_param: size of each parameter in bytes.
            None counts each parameter in its own dtype.
        bytes_per_value: size of each value in the KV cache in bytes.
    """
    config, lookup = model.config.get_text_config(decoder=True), _lookup_table(model)
    num_params, num_bytes, num_lookup_bytes, num_expert_bytes = 0, 0.0, 0.0, 0.0
    for name, parameter in model.named_parameters():
        size = (
            weight_bytes(parameter)
            if bytes_per_param is None
            else parameter.numel() * bytes_per_param
        )
        num_params += parameter.numel()
        num_bytes += size
        num_lookup_bytes += size * (parameter is lookup)
        num_expert_bytes += size * ("experts" in name.split("."))
    num_experts, num_chosen = _first_field(config, _NUM_EXPERTS), _first_field(config, _NUM_CHOSEN)
    if not num_expert_bytes or num_experts < 2 or not 1 <= num_chosen <= num_experts:
        num_expert_bytes, num_experts, num_chosen = 0, 1, 1
    kv_bytes = round(kv_values_per_token(config) * bytes_per_value)
    return ModelSize(
        num_params=num_params,
        num_bytes=round(num_bytes),
        num_lookup_bytes=round(num_lookup_bytes),
        num_expert_bytes=round(num_expert_bytes),
        num_experts=num_experts,
        num_chosen=num_chosen,
        kv_bytes_per_token=kv_bytes,
    )


def expected_speedup(
    acceptance_probability: float,
    num_draft_tokens: int,
    draft_cost: float,
    verify_cost: float = 1.0,
) -> float:
    """Return the speed-up over plain decoding, (1 + a + ... + a^K) / (K c + v).

    This assumes that all time is spent in the models.

    Args:
        acceptance_probability: verified acceptance rate a, in [0, 1].
        num_draft_tokens: draft length K.
        draft_cost: time c of a draft step, in target steps.
        verify_cost: time v of the target's forward over K + 1 tokens, in target steps.
    """
    num_tokens = sum(acceptance_probability**position for position in range(num_draft_tokens + 1))
    return num_tokens / (num_draft_tokens * draft_cost + verify_cost)


def estimate_gains(target: ModelSize, draft: ModelSize) -> tuple[Gain, ...]:
    """Find the best draft length for each of `ACCEPTANCE_PROBABILITIES`.

    The estimate holds for one row and a short context.
    """
    plain_bytes = target.num_read_bytes()
    draft_cost = draft.num_read_bytes() / plain_bytes
    draft_lens = range(DEFAULT_MAX_ASSISTANT_TOKENS + 1)
    verify_costs = [target.num_read_bytes(draft_len + 1) / plain_bytes for draft_len in draft_lens]

    def best(probability: float) -> Gain:
        speedups = [
            expected_speedup(probability, draft_len, draft_cost, verify_cost)
            for draft_len, verify_cost in enumerate(verify_costs)
        ]
        return Gain(probability, speedups.index(max(speedups)), max(speedups))

    return tuple(map(best, ACCEPTANCE_PROBABILITIES))


def _lookup_table(model: PreTrainedModel) -> nn.Parameter | None:
    table, head = input_table(model), model.get_output_embeddings()
    weight: nn.Parameter | None = getattr(table, "weight", None)
    return None if head is None or weight is getattr(head, "weight", None) else weight


def _first_field(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 1)
