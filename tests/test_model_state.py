"""Test the state that a model keeps between calls."""

import gc
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from weakref import ref

from torch import nn

from hf_speculate.model_state import model_state


class Value:
    def __init__(self):
        sleep(0.01)  # makes the threads meet inside the factory


def test_value_is_made_once_per_model_and_key():
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    state = model_state(models[0])
    with ThreadPoolExecutor(4) as pool:
        (value,) = set(pool.map(lambda _: state.get(Value, Value), range(8)))
    assert model_state(models[0]).get(Value, Value) is value
    assert state.get("another key", Value) is not value
    second = model_state(models[1]).get(Value, Value)
    assert second is not value
    state, value = None, ref(value)
    del models[0]
    gc.collect()
    assert value() is None
    assert model_state(models[0]).get(Value, Value) is second
