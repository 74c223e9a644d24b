"""Foretells what a pair may gain, from what its models read per token."""

from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from hf_speculate.config import DEFAULT_MAX_ASSISTANT_TOKENS

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")


class ModelSize(NamedTuple):
    """What a model's parameters weigh.

    `num_expert_bytes` are those of routed experts, of which a token reads `num_chosen` out of `num_experts`; without
    such experts they are 0, and the counts 1.
    """

    num_params: int
    num_bytes: int
    num_expert_bytes: int = 0
    num_experts: int = 1
    num_chosen: int = 1

    def num_read_bytes(self, num_tokens: int = 1) -> float:
        """Bytes that a forward over `num_tokens` tokens reads, were every token's experts chosen by chance alone."""
        share = 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_bytes - self.num_expert_bytes * (1 - share)


class Gain(NamedTuple):
    """The best that the cost model promises for one acceptance.

    `num_draft_tokens` is 0 and `speedup` 1.0 where no draft pays. `speedup` counts tokens per second against plain
    decoding.
    """

    acceptance: float
    num_draft_tokens: int
    speedup: float


def size_of(model: nn.Module, config: PreTrainedConfig, bytes_per_param: float | None = None) -> ModelSize:
    """Weigh a model; parameters on the meta device are enough.

    Args:
        model: its parameters are counted once each.
        config: its decoder's, which counts the experts.
        bytes_per_param: bytes that a parameter has when the model is loaded; None: those it has now.
    """
    num_params, num_bytes, num_expert_bytes = 0, 0.0, 0.0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * (parameter.element_size() if bytes_per_param is None else bytes_per_param)
        num_params += parameter.numel()
        num_bytes += size
        num_expert_bytes += size * ("experts" in name.split("."))
    num_experts, num_chosen = _first_field(config, _NUM_EXPERTS), _first_field(config, _NUM_CHOSEN)
    if not num_expert_bytes or num_experts < 2 or not 1 <= num_chosen <= num_experts:
        return ModelSize(num_params, round(num_bytes))
    return ModelSize(num_params, round(num_bytes), round(num_expert_bytes), num_experts, num_chosen)


def expected_speedup(acceptance: float, num_draft_tokens: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens per second against plain decoding, with nothing spent outside the models.

    With a = `acceptance`, K = `num_draft_tokens`, c = `draft_cost` and v = `verify_cost` that is
    (1 - a^(K+1)) / ((1 - a) (K c + v)).

    Args:
        acceptance: share of drafted tokens that are kept, the same at every position, in [0, 1].
        num_draft_tokens: K >= 0.
        draft_cost: of a draft step, in plain steps.
        verify_cost: of a forward over K+1 tokens, in plain steps.
    """
    num_tokens = sum(acceptance**position for position in range(num_draft_tokens + 1))
    return num_tokens / (num_draft_tokens * draft_cost + verify_cost)


def foretell_gains(target: ModelSize, draft: ModelSize) -> tuple[Gain, ...]:
    """The best K up to the adaptive schedule's most, and its gain, for each of `ACCEPTANCES`; one row, short texts.

    Args:
        target: the model that is sped up; more tokens read more of its experts.
        draft: proposes one token a step.
    """
    plain_bytes = target.num_read_bytes()
    draft_cost = draft.num_read_bytes() / plain_bytes
    gains = []
    for acceptance in ACCEPTANCES:
        rates = [
            expected_speedup(acceptance, num, draft_cost, target.num_read_bytes(num + 1) / plain_bytes)
            for num in range(DEFAULT_MAX_ASSISTANT_TOKENS + 1)
        ]
        best = rates.index(max(rates))
        gains.append(Gain(acceptance, best, rates[best]))
    return tuple(gains)


def _first_field(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """The first of `names` that the config holds as a number; 1 where none does."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 1)
