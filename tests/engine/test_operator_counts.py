"""What a call dispatches beside its models' forwards does not grow."""

from functools import cache
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import pair
from tests.tiny import ragged_prompts

NUM_NEW = (12, 36)
# Operators of the rounds that the longer call has more, in models with attention layers alone: measured before
# recurrent layers were served, which must cost such models nothing.
MOST_MORE = {("dynamic", 1): 1116, ("dynamic", 3): 1969, ("preallocated", 1): 1183, ("preallocated", 3): 1530}


class OperatorCount(TorchDispatchMode):
    """Counts operators outside the forwards of some models."""

    def __init__(self, *models: Any):
        super().__init__()
        self.num_operators = 0
        self.is_within = False
        self.models = models

    def __enter__(self) -> "OperatorCount":
        self.handles = [model.register_forward_pre_hook(self.enter) for model in self.models]
        self.handles += [model.register_forward_hook(self.leave) for model in self.models]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def enter(self, *_: Any) -> None:
        self.is_within = True

    def leave(self, *_: Any) -> None:
        self.is_within = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_operators += not self.is_within
        return function(*args, **(kwargs or {}))


@cache
def count(cache_kind: str, batch_size: int, num_new: int) -> int:
    target, draft = pair("llama")
    options = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "speculation_cache": cache_kind}
    with OperatorCount(target, draft) as counted:
        target.generate(
            **ragged_prompts(batch_size, seed=batch_size), max_new_tokens=num_new, assistant_model=draft, **options
        )
    return counted.num_operators


@pytest.mark.parametrize(("cache_kind", "batch_size"), MOST_MORE)
def test_rounds_of_attention_layers_alone_dispatch_no_more_operators(cache_kind, batch_size):
    fewer, more = (count(cache_kind, batch_size, num_new) for num_new in NUM_NEW)
    assert 0 < more - fewer <= MOST_MORE[cache_kind, batch_size]
