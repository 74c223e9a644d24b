"""Model state: what outlives a `generate()` call, in one object per model that is held weakly."""

import threading
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_speculate.schedule import HistoryStore


@dataclass(frozen=True)
class ModelState:
    """What calls of one target model leave for later calls of it.

    Args:
        history: acceptance and cost estimates of the adaptive schedule, by draft model.
    """

    history: HistoryStore = field(default_factory=HistoryStore)


_lock = threading.Lock()
_states: "WeakKeyDictionary[PreTrainedModel, ModelState]" = WeakKeyDictionary()


def model_state(model: PreTrainedModel) -> ModelState:
    """The state of a model; it is created on first use and goes with the model."""
    with _lock:
        if model not in _states:
            _states[model] = ModelState()
        return _states[model]
