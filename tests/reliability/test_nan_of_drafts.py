"""NaN that the target computes for a drafted token which it then rejects leaves text, scores and caches those of plain.

`NAN_ID` is part of no text, but drafted again and again. Either its embedding is NaN, as where half precision
overflows, and attention spreads that over its row; or what a forward wrote for it is overwritten with NaN before the
rollback, as attention that skips masked columns would leave it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import hf_speculate
from hf_speculate.cache.layers import attention_layers, text_cache
from hf_speculate.cache.ragged_layer import RaggedLayer
from tests.cases import Unchanged, assert_equal_ids, pair
from tests.generation.test_caches import FLOAT32_TOLERANCE, assert_same_contents, cache_contents
from tests.generation.test_encoder_decoder import encoder_pair, inputs_of
from tests.recurrent_cases import assert_equal_caches
from tests.tiny import ragged_prompts
from tests.tiny_configs import RECURRENT_KINDS

NUM_NEW = 16
NAN_ID = 7
UNLIKELY = 1e6  # what is taken from a logit so that its token is never chosen; NaN stays NaN
PAD = 2
Spoil = Callable[[PreTrainedModel], Any]  # gives the handle of a hook
LENS = (3, 0, 3, 1)  # draft lengths; after a shorter draft, attention reads columns that a longer one has written
pytestmark = pytest.mark.parametrize("scripted", [LENS], indirect=True)


def embedding_is_nan(target: PreTrainedModel) -> Any:
    def spoil(module, args, output):
        return output.masked_fill((args[0] == NAN_ID)[..., None], torch.nan)

    return target.get_decoder().get_input_embeddings().register_forward_hook(spoil)


def written_states_are_nan(target: PreTrainedModel) -> Any:
    """Logits, keys and values of a forward, from the first `NAN_ID` of a row on."""

    def spoil(module, args, kwargs, output):
        is_nan = (queried(kwargs) == NAN_ID).cumsum(1).bool()  # [B, Q]
        output.logits[is_nan[:, -output.logits.shape[1] :]] = torch.nan
        cache: Any = next(value for value in kwargs.values() if isinstance(value, Cache))
        layers: list[Any] = attention_layers(text_cache(cache).layers) if is_nan.any() else []
        for layer in [one for one in layers if one.is_initialized]:
            num_columns, num_query = layer.keys.shape[2], is_nan.shape[1]
            for row, spoilt in enumerate(is_nan):
                is_ragged = isinstance(layer, RaggedLayer)
                end = layer.columns.lens[row] + num_query - layer.base if is_ragged else num_columns
                for states in (layer.keys, layer.values):
                    states[row, :, end - num_query : end][:, spoilt] = torch.nan

    return target.register_forward_hook(spoil, with_kwargs=True)


def queried(arguments: dict[str, Any]) -> Tensor:
    return arguments["decoder_input_ids"] if "decoder_input_ids" in arguments else arguments["input_ids"]


@contextmanager
def drafts_of_nan(target: PreTrainedModel, draft: PreTrainedModel, spoil: Spoil, every: int = 5) -> Iterator[None]:
    """The draft proposes `NAN_ID` after each id that `every` divides, and the target never emits it."""

    def forbid(module, args, output):
        output.logits[..., NAN_ID] -= UNLIKELY

    def propose(module, args, kwargs, output):
        ids, logits = queried(kwargs)[:, -output.logits.shape[1] :], output.logits.clone()
        logits[..., NAN_ID] += torch.where(ids % every == 0, UNLIKELY, -UNLIKELY)
        output.logits = logits
        return output

    with ExitStack() as stack:
        stack.enter_context(target.register_forward_hook(forbid))
        stack.enter_context(spoil(target))
        stack.enter_context(draft.register_forward_hook(propose, with_kwargs=True))
        yield


def call_of(kind: str, batch_size: int) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Tensor]]:
    is_pair = kind in ("t5", "bart")
    inputs = inputs_of(kind, batch_size) if is_pair else ragged_prompts(batch_size, seed=4, min_len=3, max_len=11)
    inputs["input_ids"][inputs["input_ids"] == NAN_ID] = NAN_ID + 1
    return *(encoder_pair(kind) if is_pair else pair(kind)), inputs


def assert_equal_outputs(plain: Any, ours: Any, kind: str) -> None:
    assert_equal_ids(plain.sequences, ours.sequences)
    caches = plain.past_key_values, ours.past_key_values
    if kind in RECURRENT_KINDS:
        assert_equal_caches(*caches, FLOAT32_TOLERANCE)
    else:
        assert_same_contents(*map(cache_contents, caches), FLOAT32_TOLERANCE)


STATES = {"output_hidden_states": True, "output_attentions": True, "output_scores": True, "output_logits": True}
COUPLED = {"do_sample": True, "verifier": "coupled", "seed": 3, "top_k": 9}
PREALLOCATED, DYNAMIC = {"speculation_cache": "preallocated"}, {"speculation_cache": "dynamic"}
# Kind, rows, options of the call, those of ours.
CALLS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    *(("llama", 4, {}, cache) for cache in (PREALLOCATED, DYNAMIC)),
    ("llama", 1, STATES, {}),
    ("llama", 3, COUPLED, {}),
    ("llama", 3, {"logits_processor": [Unchanged()]}, {}),
    ("llama", 3, {"remove_invalid_values": True}, {}),
    ("llama", 3, {"cache_implementation": "static"}, {}),
    *(("mistral_window", 4, {}, cache) for cache in (PREALLOCATED, DYNAMIC)),
    ("gemma2", 2, {}, {}),
    *((kind, 3, {}, {}) for kind in ("bloom", "gpt_oss", "deepseek_v3", "llama4", "gpt_neo", "t5", "bart")),
    *((kind, 3, {}, {}) for kind in ("falcon_h1", "mamba2", "lfm2", "qwen3_next")),
]


@pytest.mark.parametrize(("kind", "batch_size", "options", "own"), CALLS)
@pytest.mark.parametrize("spoil", [embedding_is_nan, written_states_are_nan])
def test_text_scores_and_caches_are_those_of_plain(spoil, kind, batch_size, options, own, scripted):
    target, draft, inputs = call_of(kind, batch_size)
    options = {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, "output_scores": True, **options}
    own = {"assistant_model": draft, "num_assistant_tokens": 3, **own}
    with drafts_of_nan(target, draft, spoil):
        plain, ours = target.generate(**inputs, **options), target.generate(**inputs, **options, **own)
        new = plain.sequences[:, -NUM_NEW:]
        options |= {"eos_token_id": [int(new[row, 2 + 4 * row]) for row in range(batch_size - 1)], "pad_token_id": PAD}
        ended, ours_ended = target.generate(**inputs, **options), target.generate(**inputs, **options, **own)
    assert NAN_ID not in new
    assert_equal_outputs(plain, ours, kind)
    assert_equal_outputs(ended, ours_ended, kind)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        torch.testing.assert_close(getattr(plain, name, None), getattr(ours, name, None), atol=FLOAT32_TOLERANCE, rtol=0)
    stats = ours.speculation
    spreads = kind != "mamba2" if spoil is embedding_is_nan else stats.cache == "preallocated" and not stats.lock_step
    assert (stats.num_rescored > 0) == (spreads and batch_size > (spoil is written_states_are_nan))
    assert stats.num_drafted > stats.num_accepted > 0
    assert stats.status == 0
