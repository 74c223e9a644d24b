"""Compiled units and graph backends: the core's side of compiled and captured forwards."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from hf_speculate.model_state import model_state

# Device type -> class for capturing graphs.
GRAPH_BACKENDS = {"cuda": "hf_speculate.options.compiled.graphs:CudaGraphs"}


class CompiledUnits:
    """Functions compiled for one model.

    All calls share the functions, which take the model as an argument so that it can be freed. A
    copy or a pickle is empty, so its model is compiled again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        # reasons for failed compilations by settings; these are not tried again
        self.failures: dict[Hashable, str] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "CompiledUnits":
        """Return the compiled functions of a model."""
        return model_state(model).get(cls, cls)

    def __reduce__(self) -> tuple[type["CompiledUnits"], tuple[()]]:
        return CompiledUnits, ()

    def function(
        self, key: Hashable, compile_it: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any]:
        with self._lock:
            if key not in self._functions:
                self._functions[key] = compile_it()
            return self._functions[key]
