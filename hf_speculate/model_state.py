"""Model state: keep values between calls with one model in a weakly held object."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")


class ModelState:
    """Values stored by key.

    The key is the class of the value. Each class has a typed accessor, for example
    `MemoryStore.of(model)`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._values: dict[Hashable | type, Any] = {}

    def get(self, key: Hashable | type, factory: Callable[[], T]) -> T:
        """Return the value for a key, which is made on first use.

        The value must not refer to the model; otherwise, neither is ever freed.
        """
        with self._lock:
            if key not in self._values:
                self._values[key] = factory()
            value: T = self._values[key]
            return value


_lock = threading.Lock()
_states: "WeakKeyDictionary[nn.Module | type[nn.Module], ModelState]" = WeakKeyDictionary()


def model_state(owner: nn.Module | type[nn.Module]) -> ModelState:
    """Return the state of a model or a model class; the state is freed with its owner."""
    with _lock:
        return _states.setdefault(owner, ModelState())
