"""Model state: what outlives a `generate()` call, in one object per model that is held weakly."""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_speculate.cache.buffer_pool import BufferStore, max_pooled_bytes
from hf_speculate.draft.assistant import AcceptanceTallies
from hf_speculate.draft.heads.load import HeadStore
from hf_speculate.models.compilation import CompiledUnits
from hf_speculate.schedule import HistoryStore


@dataclass(frozen=True)
class ModelState:
    """What calls with one model leave for later calls.

    Args:
        units: functions compiled for the model.
        buffers: idle KV buffers of the model.
        history: the adaptive schedule's estimates for this target, by draft model.
        tallies: accepted tokens of this target's draft models.
        self_tests: differences to plain decoding, by situation.
        heads: draft heads that calls named by folder or id.
    """

    units: CompiledUnits = field(default_factory=CompiledUnits)
    buffers: BufferStore = field(default_factory=BufferStore)
    history: HistoryStore = field(default_factory=HistoryStore)
    tallies: AcceptanceTallies = field(default_factory=AcceptanceTallies)
    self_tests: dict[Hashable, float] = field(default_factory=dict)
    heads: HeadStore = field(default_factory=HeadStore)


_lock = threading.Lock()
_states: "WeakKeyDictionary[PreTrainedModel, ModelState]" = WeakKeyDictionary()


def model_state(model: PreTrainedModel) -> ModelState:
    """The state of a model; it is created on first use and goes with the model."""
    with _lock:
        if model not in _states:
            num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            _states[model] = ModelState(buffers=BufferStore(max_pooled_bytes(num_bytes)))
        return _states[model]
