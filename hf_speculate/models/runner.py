"""Compiled units and graph backends: what the core knows of forwards that do not run eagerly."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from hf_speculate.model_state import model_state

# Type of device -> the class that captures graphs on it.
GRAPH_BACKENDS = {"cuda": "hf_speculate.options.compiled.graphs:CudaGraphs"}


class CompiledUnits:
    """The functions compiled for one model, for all calls; they take the model as an argument, so it can be freed.

    A copy and a pickle are empty: their model is compiled anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        self.failures: dict[Hashable, str] = {}  # why compiling with some settings failed, which is not tried again

    @classmethod
    def of(cls, model: nn.Module) -> "CompiledUnits":
        """The functions of a model."""
        return model_state(model).get(cls, cls)

    def __reduce__(self) -> tuple[type["CompiledUnits"], tuple[()]]:
        return CompiledUnits, ()

    def function(self, key: Hashable, compile_it: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        with self._lock:
            if key not in self._functions:
                self._functions[key] = compile_it()
            return self._functions[key]
