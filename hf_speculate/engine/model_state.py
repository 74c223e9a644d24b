"""Model state: the data of a model that outlive a `generate()` call, in one weakly held object."""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_speculate.cache.buffer_pool import BufferPool, max_pooled_bytes
from hf_speculate.draft.acceptance_tallies import AcceptanceTallies
from hf_speculate.draft.named import NamedDrafts
from hf_speculate.engine.step_weights import StepWeights, step_weights
from hf_speculate.models.compilation import CompiledUnits
from hf_speculate.models.wrapper_probe import HandedOn
from hf_speculate.schedule import HistoryStore


@dataclass(frozen=True)
class ModelState:
    """What calls with one model leave for later calls."""

    weights: StepWeights  # as they were in the first call
    units: CompiledUnits = field(default_factory=CompiledUnits)  # functions compiled for the model
    buffers: BufferPool = field(default_factory=BufferPool)  # idle KV buffers of the model
    # the adaptive schedule's estimates for this target, by draft source
    history: HistoryStore = field(default_factory=HistoryStore)
    # accepted tokens of this target's draft models and heads
    tallies: AcceptanceTallies = field(default_factory=AcceptanceTallies)
    self_tests: dict[Hashable, float] = field(default_factory=dict)  # differences to plain decoding, by situation
    # what the model's forward hands on to its text decoder, by class: a model may be enabled between calls
    handed_on: dict[type, HandedOn] = field(default_factory=dict)
    named_drafts: NamedDrafts = field(default_factory=NamedDrafts)  # heads and models that calls named by folder or id


_lock = threading.Lock()
_states: "WeakKeyDictionary[PreTrainedModel, ModelState]" = WeakKeyDictionary()


def model_state(model: PreTrainedModel) -> ModelState:
    """The state of a model; it is created on first use and goes with the model."""
    with _lock:
        if model not in _states:
            num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            _states[model] = ModelState(step_weights(model), buffers=BufferPool(max_pooled_bytes(num_bytes)))
        return _states[model]
