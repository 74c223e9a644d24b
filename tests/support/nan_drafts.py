"""Draft a token that causes NaN in the target: in its embedding or in the states of a forward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_speculate.cache.layers import attention_layers, text_cache
from hf_speculate.cache.ragged_layer import RaggedLayer

NAN_ID = 7
# A logit reduced by this is never chosen. It stays finite in half precision, and NaN stays NaN.
UNLIKELY = 1e4
Spoil = Callable[[PreTrainedModel], Any]  # returns the handle of a hook


def embedding_is_nan(target: PreTrainedModel) -> Any:
    def spoil(module: Any, args: Any, output: Tensor) -> Tensor:
        return output.masked_fill((args[0] == NAN_ID)[..., None], torch.nan)

    return target.get_decoder().get_input_embeddings().register_forward_hook(spoil)


def written_states_are_nan(target: PreTrainedModel) -> Any:
    """Make a forward's logits, keys and values NaN, in each row from its first `NAN_ID` on."""

    def spoil(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        is_nan = (_queried(kwargs) == NAN_ID).cumsum(1).bool()  # [B, Q]
        output.logits[is_nan[:, -output.logits.shape[1] :]] = torch.nan
        cache: Any = next(value for value in kwargs.values() if isinstance(value, Cache))
        layers: list[Any] = attention_layers(text_cache(cache).layers) if is_nan.any() else []
        for layer in layers:
            num_columns, num_query = layer.keys.shape[2], is_nan.shape[1]
            for row, is_spoilt in enumerate(is_nan):
                is_ragged = isinstance(layer, RaggedLayer)
                end = layer.layout.lens[row] + num_query - layer.base if is_ragged else num_columns
                for states in (layer.keys, layer.values):
                    states[row, :, end - num_query : end][:, is_spoilt] = torch.nan

    return target.register_forward_hook(spoil, with_kwargs=True)


@contextmanager
def drafts_of_nan(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    spoil: Spoil,
    every: int = 5,
    likely: float = UNLIKELY,
) -> Iterator[None]:
    """Let the draft propose `NAN_ID` after each id divisible by `every`; the target never emits it.

    A sampled draft proposes `NAN_ID` with odds of exp(`likely`).
    """

    def forbid(module: Any, args: Any, output: Any) -> None:
        output.logits[..., NAN_ID] -= UNLIKELY

    def propose(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        ids, logits = _queried(kwargs)[:, -output.logits.shape[1] :], output.logits.clone()
        logits[..., NAN_ID] = logits.logsumexp(-1) + torch.where(
            ids % every == 0, likely, -UNLIKELY
        )
        output.logits = logits
        return output

    with ExitStack() as stack:
        stack.enter_context(target.register_forward_hook(forbid))
        stack.enter_context(spoil(target))
        if draft is not None:
            stack.enter_context(draft.register_forward_hook(propose, with_kwargs=True))
        yield


def without_nan(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs with another token in place of `NAN_ID`."""
    ids = inputs["input_ids"]
    return inputs | {"input_ids": ids.masked_fill(ids == NAN_ID, NAN_ID + 1)}


def _queried(arguments: dict[str, Any]) -> Tensor:
    ids: Tensor = arguments[
        "decoder_input_ids" if "decoder_input_ids" in arguments else "input_ids"
    ]
    return ids
