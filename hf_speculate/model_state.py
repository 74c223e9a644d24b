"""Model state: what calls with one model leave for later calls, in one weakly held object that knows no owner of it."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")


class ModelState:
    """Values by key. Owners keep a typed accessor beside their class, which is the key: `MemoryStore.of(model)`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[Hashable | type, Any] = {}

    def get(self, key: Hashable | type, factory: Callable[[], T]) -> T:
        """The value of a key, made on first use; it must not refer to the model, or neither would ever be freed."""
        with self._lock:
            if key not in self._values:
                self._values[key] = factory()
            value: T = self._values[key]
            return value


_lock = threading.Lock()
_states: "WeakKeyDictionary[nn.Module | type[nn.Module], ModelState]" = WeakKeyDictionary()


def model_state(owner: nn.Module | type[nn.Module]) -> ModelState:
    """The state of a model, or of a class of models; it goes with its owner."""
    with _lock:
        return _states.setdefault(owner, ModelState())
