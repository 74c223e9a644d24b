"""Idle buffers serve one call at a time, of one shape, and go with their model."""

import pytest
import torch

from hf_speculate.cache.buffer_pool import BufferPool, BufferShape, PooledBuffers, max_pooled_bytes
from hf_speculate.types import KVState

SHAPE = (2, 1, 128, 4)  # [B, H, capacity, D]


def shape_of(batch_size=2, capacity=128, dtype=torch.float64):
    return BufferShape(batch_size, capacity, dtype, torch.device("cpu"))


def buffers(shape=SHAPE):
    return PooledBuffers([KVState(torch.ones(shape), torch.ones(shape))], {"graph": shape})


def test_buffers_come_back_at_their_addresses_and_empty_to_one_call_at_a_time():
    pool, made = BufferPool(), buffers()
    assert pool.take(shape_of(), 1) is None
    pool.give_back(shape_of(), made)
    taken = pool.take(shape_of(), 1)
    assert [one.data_ptr() for one in taken.tensors] == [one.data_ptr() for one in made.tensors]
    assert not any(tensor.any() for tensor in taken.tensors)
    assert taken.graphs is made.graphs
    assert pool.take(shape_of(), 1) is None  # in use
    pool.give_back(shape_of(), buffers((1, 1, 128, 4)))  # which rows have left
    assert pool.take(shape_of(), 1) is None


@pytest.mark.parametrize(("batch_size", "capacity"), [(1, 128), (2, 256)])
def test_other_shapes_are_other_entries(batch_size, capacity):
    pool = BufferPool()
    pool.give_back(shape_of(), buffers())
    assert pool.take(shape_of(batch_size, capacity), 1) is None
    with torch.inference_mode():  # tensors made outside may be written here, but not the other way round
        assert pool.take(shape_of(), 1) is None
    assert pool.take(shape_of(2, 128, torch.float32), 1) is None


def test_the_longest_unused_go_past_the_limit_of_bytes():
    one = buffers().num_bytes
    pool = BufferPool(max_bytes=3 * one)
    for capacity in (128, 64, 256):  # the third is twice as large
        pool.give_back(shape_of(2, capacity), buffers((2, 1, capacity, 4)))
    assert pool.take(shape_of(), 1) is None
    assert pool.take(shape_of(2, 64), 1) is not None
    assert pool.take(shape_of(2, 256), 1) is not None
    small = BufferPool(max_bytes=one - 1)
    small.give_back(shape_of(), buffers())
    assert small.take(shape_of(), 1) is None


def test_the_limit_grows_with_the_model():
    assert max_pooled_bytes(10 << 20) == 1 << 30
    assert max_pooled_bytes(16 << 30) == 4 << 30  # a call of an 8B model at B = 8 and 2,048 columns takes 2 GiB
