"""Compilation: functions of a model run compiled by `torch.compile`, or eagerly with a reason."""

import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

LOGGER = logging.getLogger(__name__)


class CompiledUnits:
    """The functions compiled for one model, for all calls; they take the model as an argument, so it can be freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        self.failures: dict[Hashable, str] = {}  # why compiling with some settings failed, which is not tried again

    def function(self, key: Hashable, compile_it: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        with self._lock:
            if key not in self._functions:
                self._functions[key] = compile_it()
            return self._functions[key]


@dataclass(frozen=True)
class CompileSettings:
    """Arguments of `torch.compile`; graphs are always whole."""

    backend: str | Callable[..., Any] = "inductor"  # a name, or the function itself
    mode: str | None = None  # of the backend; None for its default
    # whether sizes are compiled as symbols; None compiles the sequence length and changed sizes as symbols
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None  # of the backend, in place of the mode

    @property
    def key(self) -> Hashable:
        """Equal for settings that compile to the same function."""
        return self.backend, self.mode, self.dynamic, repr(sorted((self.options or {}).items()))

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, compiled at its first call."""
        own = _with_own_code(function)
        options = dict(self.options) if self.options else None
        mode = None if options else self.mode
        return torch.compile(
            own, fullgraph=True, dynamic=self.dynamic, backend=self.backend, mode=mode, options=options
        )


@dataclass
class Compilation:
    """The compiled forwards of one model during one call."""

    model: nn.Module  # whose forwards are compiled
    settings: CompileSettings  # of `torch.compile`
    units: CompiledUnits  # what was compiled for the model before
    # called with the reason once, if something cannot be compiled; everything runs eagerly from then on. Later calls
    # try again only after torch's recompile limit, which holds back new shapes and no others
    on_failure: Callable[[str], None]
    is_working: bool = field(default=True, init=False)
    sampling_backend: str | None = field(default="torch", init=False)  # of what is compiled

    def __post_init__(self) -> None:
        failure = self.units.failures.get(self.settings.key)
        if failure is not None:
            self._give_up(failure)

    @property
    def varies(self) -> bool:
        return self.settings.dynamic is not False

    def bind(self, graphs: dict[Hashable, Any]) -> None:
        """Does nothing: compiled functions serve all buffers."""

    def run(self, name: Hashable, function: Callable[..., Any], *args: Any) -> Any | None:
        """See `Runner.run`; functions of the same name are compiled once for a model.

        They return a tensor, or nested tuples of tensors or None. What they write to is undefined after a failure.
        """
        if not self.is_working:
            return None
        try:
            key = (name, self.settings.key)
            compiled = self.units.function(key, lambda: self.settings.compile(function))
            is_graphed = next(self.model.parameters()).device.type == "cuda"
            if is_graphed:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                result = compiled(self.model, *args)
                return copies(result) if is_graphed else result
        except _compile_errors() as error:
            reason = f"eager forwards of {type(self.model).__name__}, which cannot be compiled: {_cause_of(error)}"
            LOGGER.warning(reason)
            if not _is_recompile_limit(error):
                self.units.failures[self.settings.key] = reason
            self._give_up(reason)
            return None

    def repeat(
        self, name: Hashable, step: Callable[..., Any], num_steps: int, carry: Any, *args: Any
    ) -> list[Any] | None:
        results = []
        for _ in range(num_steps):
            done = self.run(name, step, carry, *args)
            if done is None:
                return None
            result, carry = done
            results.append(result)
        return results

    def _give_up(self, reason: str) -> None:
        self.is_working = False
        self.on_failure(reason)


def copies(result: Any) -> Any:
    """Copies of a CUDA graph's output, which its next replay would overwrite."""
    if result is None or isinstance(result, Tensor):
        return None if result is None else result.clone()
    parts = [copies(part) for part in result]
    return tuple(parts) if type(result) is tuple else type(result)(*parts)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function: dynamo counts recompilations by code object, whichever function that belongs to."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _cause_of(error: Exception) -> str:
    """One line that says why something could not be compiled."""
    if _is_recompile_limit(error):
        return "torch.compile reached its recompile limit; raise torch._dynamo.config.recompile_limit"
    cause = getattr(error, "inner_exception", None) or error.__cause__
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    if not lines:
        return type(cause or error).__name__
    # graph breaks say it in their first line, a backend's error in the last line of the one that it wraps
    return lines[0] if cause is None else f"{type(cause).__name__}: {lines[-1]}"


def _is_recompile_limit(error: Exception) -> bool:
    return type(error).__name__ == "FailOnRecompileLimitHit"


def _compile_errors() -> tuple[type[Exception], ...]:
    """What `torch.compile` raises for what it cannot compile; looked up where needed, for dynamo imports slowly."""
    import torch._dynamo.exc as dynamo_errors
    import torch._inductor.exc as inductor_errors

    limit = getattr(dynamo_errors, "FailOnRecompileLimitHit", dynamo_errors.TorchDynamoException)
    return (dynamo_errors.TorchDynamoException, limit, inductor_errors.CppCompileError, inductor_errors.OperatorIssue)
