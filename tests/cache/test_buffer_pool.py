"""Idle buffers serve one call at a time, of one shape, and go with their model."""

import gc
import threading
import weakref

import pytest
import torch

from hf_speculate.cache import buffer_pool
from hf_speculate.cache.buffer_pool import BufferPool, LayerBuffers
from tests.tiny import make_model

SHAPE = (2, 1, 128, 4)  # [B, H, capacity, D]


@pytest.fixture
def model():
    return make_model("llama", num_hidden_layers=1)


def buffers(shape=SHAPE):
    return [LayerBuffers(torch.ones(shape), torch.ones(shape))]


def addresses(layers):
    return [part.data_ptr() for layer in layers for part in layer]


def test_buffers_come_back_at_their_addresses_and_empty(model):
    pool, made = BufferPool(model, 2, 128), buffers()
    assert pool.take(1) is None
    pool.give_back(made)
    taken = pool.take(1)
    assert addresses(taken) == addresses(made)
    assert not any(part.any() for layer in taken for part in layer)


def test_what_a_call_uses_is_in_no_pool(model):
    pool = BufferPool(model, 2, 128)
    pool.give_back(buffers())
    assert pool.take(1) is not None
    assert pool.take(1) is None


def test_two_threads_never_get_the_same(model):
    pool, taken = BufferPool(model, 2, 128), []
    pool.give_back(buffers())
    start = threading.Barrier(4)

    def take():
        start.wait()
        taken.append(pool.take(1))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one is not None for one in taken) == 1


@pytest.mark.parametrize(("batch_size", "capacity"), [(1, 128), (2, 256)])
def test_other_shapes_are_other_entries(model, batch_size, capacity):
    BufferPool(model, 2, 128).give_back(buffers())
    assert BufferPool(model, batch_size, capacity).take(1) is None
    assert BufferPool(make_model("llama", num_hidden_layers=1), 2, 128).take(1) is None
    with torch.inference_mode():  # tensors made outside may be written here, but not the other way round
        assert BufferPool(model, 2, 128).take(1) is None
    model.to(torch.float32)
    assert BufferPool(model, 2, 128).take(1) is None


def test_buffers_that_rows_have_left_are_not_kept(model):
    pool = BufferPool(model, 2, 128)
    pool.give_back(buffers((1, 1, 128, 4)))
    assert pool.take(1) is None


def test_the_longest_unused_go_where_there_are_too_many_bytes(model, monkeypatch):
    one = buffers()[0].num_bytes
    monkeypatch.setattr(buffer_pool, "MAX_POOLED_BYTES", 3 * one)  # the third is twice as large
    for capacity in (128, 64, 256):
        BufferPool(model, 2, capacity).give_back(buffers((2, 1, capacity, 4)))
    assert BufferPool(model, 2, 128).take(1) is None
    assert BufferPool(model, 2, 64).take(1) is not None
    assert BufferPool(model, 2, 256).take(1) is not None
    monkeypatch.setattr(buffer_pool, "MAX_POOLED_BYTES", one - 1)
    BufferPool(model, 2, 128).give_back(buffers())
    assert BufferPool(model, 2, 128).take(1) is None


def test_buffers_go_with_the_model():
    model, made = make_model("llama", num_hidden_layers=1), buffers()
    BufferPool(model, 2, 128).give_back(made)
    held = weakref.ref(made[0].keys)
    del model, made
    gc.collect()
    assert held() is None
