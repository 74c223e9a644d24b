"""Compare KV caches after random operations and rollbacks with caches never rolled back."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.cache.lookahead import Lookahead
from hf_speculate.cache.pooled_buffers import BufferShape, PooledBuffers
from hf_speculate.cache.preallocated import MaskSpec, PreallocatedKVCache
from hf_speculate.cache.ragged_layer import WINDOW_SLACK, RaggedLayer
from hf_speculate.cache.row_layout import RowLayout
from hf_speculate.errors import ShapeError
from hf_speculate.models.cache_kinds import CacheRequest, choose_kind, find_kind
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.options.compiled.buffer_pool import BufferPool, max_pooled_bytes
from hf_speculate.types import KVState
from tests.cases import each_value
from tests.random_calls import Case
from tests.random_search import run_case
from tests.support.tiny import SLIDING_WINDOW, TINY_FAMILIES, make_model, ragged_prompts

# float64 round-off of attention over masked columns; wrong states differ by at least 1e-2
STEP_TOLERANCE = 1e-9
SOFTMAX_FLOAT32 = {"gemma2", "bloom"}  # attention rounds to float32 for every dtype
FLOAT32_TOLERANCE = 1e-4


def states(batch_size: int, num: int, seed: int = 0, num_layers: int = 2) -> list[KVState]:
    make = torch.Generator().manual_seed(seed)
    shape = (batch_size, 2, num, 4)
    return [
        KVState(torch.randn(shape, generator=make), torch.randn(shape, generator=make))
        for _ in range(num_layers)
    ]


def preallocated(batch_size: int) -> PreallocatedKVCache:
    return PreallocatedKVCache(
        MaskSpec((None, None), {"full_attention": None}, torch.float32), batch_size
    )


MAKERS = [lambda batch_size: DynamicKVCache(DynamicCache(), batch_size), preallocated]


@pytest.mark.parametrize("make", MAKERS, ids=["dynamic", "preallocated"])
@pytest.mark.parametrize("seed", range(10))
def test_rows_keep_their_states_through_random_operations(make, seed):
    # layer, keys or values, head
    draw, cache, by_head = random.Random(seed), make(3), [torch.zeros(2, 2, 2, 0, 4)] * 3
    assert (cache.num_real_tokens, cache.get_kv_states()) == ([0] * 3, [])
    for number in range(12):
        lens = [row.shape[3] for row in by_head]
        match draw.choice(["update", "update", "crop", "crop rows", "rows"]):
            case "update":
                new = states(len(by_head), draw.randint(1, 5), seed=number)
                cache.update(new)
                both = torch.stack([torch.stack(layer) for layer in new])  # [L, 2, B, H, T, D]
                by_head = [
                    torch.cat([row, both[:, :, index]], dim=3) for index, row in enumerate(by_head)
                ]
            case "rows":
                row_indices = sorted(draw.sample(range(len(by_head)), max(2, len(by_head) - 1)))
                cache.rows(row_indices)
                by_head = [by_head[index] for index in row_indices]
            case family:
                drops = [draw.randint(0, min(lens))] * len(lens)
                if family == "crop rows":
                    drops = [draw.randint(0, length) for length in lens]
                cache.crop(
                    drops[0] if family == "crop" else draw.choice([drops, torch.tensor(drops)])
                )
                by_head = [
                    row[:, :, :, : row.shape[3] - drop]
                    for row, drop in zip(by_head, drops, strict=True)
                ]
        lens = [row.shape[3] for row in by_head]
        assert cache.num_real_tokens == lens
        for layer, state in enumerate(cache.get_kv_states() if max(lens) else []):
            for index, row in enumerate(by_head):
                for part, values in enumerate(state):
                    assert torch.equal(
                        values[index, :, values.shape[2] - lens[index] :], row[layer, part]
                    )
    for wrong in (-1, [max(lens) + 1] * len(lens), [0] * 9):
        with pytest.raises(ShapeError, match="num_tokens_crop"):
            cache.crop(wrong)


@pytest.mark.parametrize("make", MAKERS, ids=["dynamic", "preallocated"])
def test_clearing_removes_rejected_states_only(make):
    cache, kv_states, drops = make(3), states(3, 6), [4, 1, 0]
    for layer in kv_states:
        for part in layer:
            for row, drop in enumerate(drops):
                part[row, :, 6 - drop :] = torch.nan
    cache.update(kv_states)
    cache.crop(drops)
    # the dynamic cache has no such columns
    assert cache.holds_rejected == (cache.kind == "preallocated")
    cache.clear_rejected()
    assert not cache.holds_rejected
    for buffers, layer, actual in zip(
        cache.cache.layers, kv_states, cache.get_kv_states(), strict=True
    ):
        assert buffers.keys.isfinite().all() and buffers.values.isfinite().all()
        for row, drop in enumerate(drops):
            for part, kept in zip(layer, actual, strict=True):
                assert torch.equal(kept[row, :, drop - min(drops) :], part[row, :, : 6 - drop])


@each_value(choice=["dynamic", "preallocated"], family=TINY_FAMILIES)
def test_logits_after_ragged_rollbacks_equal_rows_decoded_alone(family, choice):
    """Feed four tokens and drop a different number per row in several rounds, past the window."""
    model, passed, device = (
        make_model(family),
        DynamicCache(config=make_model(family).config),
        torch.device("cpu"),
    )
    prompts = ragged_prompts(3, seed=1, min_len=4, max_len=2 * SLIDING_WINDOW)
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    language_model = LanguageModel(model)
    request = CacheRequest(model, passed, mask, device, "dynamic" if family == "bloom" else choice)
    cache = find_kind(choose_kind(request)[0]).make(request, 3)
    language_model.forward(ids, cache, logits_to_keep=1)
    cache.begin_recording()
    make = torch.Generator().manual_seed(5)
    texts = [ids[row][mask[row].bool()].tolist() for row in range(3)]
    for drops in ([3, 0, 2], [1, 1, 3], [0, 3, 3], [2, 0, 0], [3, 3, 3], [0, 2, 1]):
        query = torch.randint(1, 64, (3, 4), generator=make)
        logits = language_model.forward(query, cache)
        for row in range(3):
            alone = DynamicKVCache(DynamicCache(config=model.config), 1)
            text = torch.tensor([texts[row] + query[row].tolist()])
            expected = language_model.forward(text, alone)[0, -4:]
            tolerance = FLOAT32_TOLERANCE if family in SOFTMAX_FLOAT32 else STEP_TOLERANCE
            assert torch.allclose(logits[row], expected, atol=tolerance, rtol=0)
        cache.crop(drops)
        for row, drop in enumerate(drops):
            texts[row] += query[row].tolist()[: 4 - drop]
        assert cache.num_real_tokens == [len(text) for text in texts]
        num_pads = (mask == 0).sum(1).tolist()
        assert cache.num_columns == max(
            num + len(text) for num, text in zip(num_pads, texts, strict=True)
        )
    shortest = num_pads.index(max(num_pads))
    cache.rows([shortest])
    assert cache.num_columns == len(texts[shortest])  # the padding was needed for longer prompts


def test_rows_selected_before_the_first_forward_keep_their_masks():
    cache = DynamicKVCache(DynamicCache(), 3, torch.tensor([[0, 0, 1], [0, 0, 1], [1, 1, 1]]))
    cache.rows([0, 1])
    assert cache.mask(4).tolist() == [[0, 0, 1, 1]] * 2


def test_rows_join_in_places_of_rows_that_left():
    cache, joining = preallocated(4), preallocated(1)
    first_states, its = states(4, 9), states(1, 5, seed=1)
    for layer in first_states:
        layer.values[1] = torch.nan
    cache.update(first_states)
    joining.update(its)
    cache.rows([0, 2, 3])
    addresses = [layer.keys.data_ptr() for layer in cache.cache.layers]
    cache.rows([0, 2])
    cache.join(joining)
    assert [layer.keys.data_ptr() for layer in cache.cache.layers] == addresses
    assert cache.num_real_tokens == [9, 9, 5]
    for layer, before, new, buffers in zip(
        cache.get_kv_states(), first_states, its, cache.cache.layers, strict=True
    ):
        assert torch.equal(layer.keys[:2], before.keys[[0, 3]])
        assert torch.equal(layer.values[2, :, -5:], new.values[0])
        assert buffers.values.isfinite().all()


CHAT = Case(
    "gemma3n", max_new_tokens=2 * SLIDING_WINDOW, num_turns=2, passed="with config", cache="dynamic"
)
CHATS = [CHAT, replace(CHAT, family="gemma4", cache="preallocated")]  # layers that share states
CHATS += [replace(CHATS[1], num_turns=1, passed="no", batch_size=3, padding="left", cache="static")]
THREE = replace(CHAT, batch_size=3, num_turns=3, padding="left", ends=(3, 7))
CHATS += [replace(THREE, family=family, cache="auto") for family in ("llama", "gpt2")]
CHATS += [
    replace(THREE, family="mistral_window", cache=cache) for cache in ("dynamic", "preallocated")
]


@pytest.mark.parametrize("case", CHATS, ids=str)
def test_chat_turns_equal_plain_in_text_scores_and_cache(case):
    result = run_case(case)
    assert result.outcome == "equal", result


def test_row_joins_one_with_a_moved_window():
    written = [
        torch.randn(1, 1, num, 4) for num in (WINDOW_SLACK + SLIDING_WINDOW + 3, SLIDING_WINDOW + 1)
    ]
    layers = [RaggedLayer(Lookahead(RowLayout([0])), SLIDING_WINDOW) for _ in written]
    for layer, tokens in zip(layers, written, strict=True):
        layer.lookahead.begin(tokens.shape[2])
        layer.update(tokens, tokens)
        layer.lookahead.advance(tokens.shape[2])
    assert [layer.base for layer in layers] == [3, 0]
    layers[0].join(layers[1])
    for row, (tokens, first) in enumerate(zip(written, (3, 0), strict=True)):
        columns = slice(first - layers[0].base, tokens.shape[2] - layers[0].base)
        for buffer in layers[0].buffers:
            assert torch.equal(buffer[row, :, columns], tokens[0, :, first:])


SHAPE = (2, 1, 128, 4)  # [B, H, capacity, D]


def shape_of(batch_size=2, capacity=128, dtype=torch.float64):
    return BufferShape(batch_size, capacity, dtype, torch.device("cpu"))


def buffers(shape=SHAPE):
    return PooledBuffers([KVState(torch.ones(shape), torch.ones(shape))], {"graph": shape})


def test_pooled_buffers_are_reused_by_one_call_at_a_time():
    pool, pooled = BufferPool(), buffers()
    assert pool.take(shape_of(), 1) is None
    pool.give_back(shape_of(), pooled)
    taken = pool.take(shape_of(), 1)
    assert [buffer.data_ptr() for buffer in taken.tensors] == [
        buffer.data_ptr() for buffer in pooled.tensors
    ]
    assert not any(tensor.any() for tensor in taken.tensors)
    assert taken.graphs is pooled.graphs
    assert pool.take(shape_of(), 1) is None  # in use
    # after rows have left, the buffers are smaller
    pool.give_back(shape_of(), buffers((1, 1, 128, 4)))
    assert pool.take(shape_of(), 1) is None


@pytest.mark.parametrize(("batch_size", "capacity"), [(1, 128), (2, 256)])
def test_pool_separates_shapes(batch_size, capacity):
    pool = BufferPool()
    pool.give_back(shape_of(), buffers())
    assert pool.take(shape_of(batch_size, capacity), 1) is None
    with torch.inference_mode():  # tensors created outside can be written here, but not vice versa
        assert pool.take(shape_of(), 1) is None
    assert pool.take(shape_of(2, 128, torch.float32), 1) is None


def test_pool_over_its_limit_drops_least_recently_used():
    num_bytes = buffers().num_bytes
    pool = BufferPool(max_bytes=3 * num_bytes)
    for capacity in (128, 64, 256):  # the third is twice as large
        pool.give_back(shape_of(2, capacity), buffers((2, 1, capacity, 4)))
    assert pool.take(shape_of(), 1) is None
    assert pool.take(shape_of(2, 64), 1) is not None
    assert pool.take(shape_of(2, 256), 1) is not None
    small = BufferPool(max_bytes=num_bytes - 1)
    small.give_back(shape_of(), buffers())
    assert small.take(shape_of(), 1) is None


class Packed(torch.Tensor):
    """Weight [N] bfloat16, stored as uint8 [N / 2]."""

    @staticmethod
    def __new__(cls, data):
        return cls._make_wrapper_subclass(
            cls, (2 * len(data),), dtype=torch.bfloat16, device=data.device
        )

    def __init__(self, data):
        self.data_ = data

    def __tensor_flatten__(self):
        return ["data_"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0]  # `Parameter` detaches the tensor


def test_pool_limit_grows_with_bytes_of_stored_weights():
    def limit_of(weight):
        return max_pooled_bytes(
            torch.nn.ParameterList([torch.nn.Parameter(weight, requires_grad=False)])
        )

    assert limit_of(torch.empty(10 << 20, dtype=torch.uint8, device="meta")) == 1 << 30
    # a call with an 8B model, B = 8 and 2,048 columns takes 2 GiB
    assert limit_of(torch.empty(8 << 30, dtype=torch.bfloat16, device="meta")) == 4 << 30
    assert limit_of(Packed(torch.empty(6 << 30, dtype=torch.uint8, device="meta"))) == 3 << 29
