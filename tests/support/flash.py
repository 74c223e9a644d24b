"""Flash attention on the CPU: what transformers calls for `attn_implementation="flash_..."`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from hf_speculate.compat import set_attention_name

NAMES = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2")


class FlashCall(NamedTuple):
    """One call of flash attention."""

    name: str  # the attention in the layer's config
    num_query: int
    num_keys: int


@contextmanager
def flash_attention() -> Iterator[list[FlashCall]]:
    """Let the names in `NAMES` compute attention on the CPU, and yield the list of calls."""
    calls: list[FlashCall] = []

    def attend(
        query: Tensor,  # [B, Q, g*H, D]
        key: Tensor,  # [B, T, H, D]
        value: Tensor,  # [B, T, H, D]
        attention_mask: Tensor | None,  # [B, T]
        *,
        is_causal: bool,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        attn_implementation: str,
        **kwargs: object,
    ) -> Tensor:
        assert attn_implementation in NAMES
        num_query, num_keys = query.shape[1], key.shape[1]
        calls.append(FlashCall(attn_implementation, num_query, num_keys))
        seen = torch.ones(num_query, num_keys, dtype=torch.bool)
        if is_causal:  # the last query sees the last key
            seen = seen.tril(num_keys - num_query)
        if sliding_window is not None:
            seen = seen.triu(num_keys - num_query - sliding_window + 1)
        if attention_mask is not None:
            assert attention_mask.shape == (query.shape[0], num_keys)
            seen = seen & attention_mask[:, None, None].bool()
        states = (states.transpose(1, 2) for states in (query, key, value))
        output = scaled_dot_product_attention(
            *states, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        return output.nan_to_num().transpose(1, 2)  # zero where the query is padding

    hub_kernel = NAMES[-1]
    AttentionInterface.register(hub_kernel, flash_attention_forward)
    AttentionMaskInterface.register(hub_kernel, flash_attention_mask)
    with patch("transformers.integrations.flash_attention._flash_attention_forward", attend):
        yield calls


def set_flash(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Set the attention as a user on a GPU does; transformers refuses these names on the CPU."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            set_attention_name(module.config, name)
    return model
