"""Compilation: functions of a model run compiled by `torch.compile`, or eagerly with a reason."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CompileConfig

from hf_speculate.models.runner import CompiledUnits

warn_once = cache(logging.getLogger(__name__).warning)


def settings_key(config: CompileConfig) -> Hashable:
    """Equal for configs that compile to the same function."""
    return config.backend, config.mode, config.dynamic, repr(sorted((config.options or {}).items()))


def _compiled(function: Callable[..., Any], config: CompileConfig) -> Callable[..., Any]:
    """`function`, compiled at its first call; graphs are always whole."""
    # dynamo counts recompilations by code object, whichever function that belongs to
    code, name = function.__code__.replace(), function.__name__
    own = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    backend: Any = config.backend
    options = dict(config.options) if config.options else None
    mode = None if options else config.mode
    return torch.compile(own, fullgraph=True, dynamic=config.dynamic, backend=backend, mode=mode, options=options)


class Runner(ABC):
    """Runs functions of a model over fixed buffers during one call: `Compilation`, or `Graphing`."""

    varies: bool = False
    """Whether sizes may be numbers that vary."""
    sampling_backend: str | None = None
    """Backend of the sampling kernel in compiled functions; None for the call's."""

    def __init__(self, model: nn.Module, units: CompiledUnits, on_failure: Callable[[str], None]):
        self.model = model
        self.units = units  # what was compiled for the model before, and what failed
        self.is_working = True  # whether it still runs anything; if not, forwards run eagerly
        self._on_failure = on_failure  # called with the reason once

    def bind(self, graphs: dict[Hashable, Any]) -> None:
        """Use what was captured over the buffers that come next."""
        return

    @abstractmethod
    def run(self, name: Hashable, function: Callable[..., Any], *args: Any) -> Any | None:
        """The result of a function of the model and `args`; None if it cannot be run.

        It returns a tensor, or nested tuples of tensors or None; what it writes to is undefined after a failure.
        Functions of one name are the same one.
        """

    @abstractmethod
    def repeat(
        self, name: Hashable, step: Callable[..., Any], num_steps: int, carry: Any, *args: Any
    ) -> list[Any] | None:
        """The results of `num_steps` steps that feed one another; None if they cannot be run.

        A step is a function of the model, `carry` and `args`; it returns its result and the next step's `carry`.
        """

    def fail(self, why: str, failure_key: Hashable | None) -> None:
        """Run nothing more in this call, nor in later ones under a failure's key."""
        reason = f"eager forwards of {type(self.model).__name__}, which cannot be {why}"
        if failure_key is not None:
            self.units.failures[failure_key] = reason
        self.give_up(reason)

    def give_up(self, reason: str, figures: str = "") -> None:
        """Run nothing more in this call; the log has each reason once, without its figures."""
        self.is_working = False
        warn_once(reason)
        self._on_failure(f"{reason}: {figures}" if figures else reason)


class Compilation(Runner):
    """The compiled forwards of one model; later calls try again only after torch's recompile limit, of new shapes."""

    sampling_backend = "torch"

    def __init__(
        self, model: nn.Module, config: CompileConfig, units: CompiledUnits, on_failure: Callable[[str], None]
    ):
        super().__init__(model, units, on_failure)
        self._config, self._key = config, settings_key(config)
        self.varies = config.dynamic is not False
        failure = units.failures.get(self._key)
        if failure is not None:
            self.give_up(failure)

    def run(self, name: Hashable, function: Callable[..., Any], *args: Any) -> Any | None:
        if not self.is_working:
            return None
        try:
            compiled = self.units.function((name, self._key), lambda: _compiled(function, self._config))
            is_graphed = next(self.model.parameters()).device.type == "cuda"
            if is_graphed:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                result = compiled(self.model, *args)
                return copies(result) if is_graphed else result  # the next replay overwrites it
        except _compile_errors() as error:
            self.fail(f"compiled: {_cause_of(error)}", None if _is_recompile_limit(error) else self._key)
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


def copies(tree: Any, kept: tuple[type, ...] = ()) -> Any:
    """Nested tuples with copies of their tensors, but for tuples of the types `kept`, which stay as they are."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if not isinstance(tree, tuple) or isinstance(tree, kept):
        return tree
    parts = [copies(part, kept) for part in tree]
    return tuple(parts) if type(tree) is tuple else type(tree)(*parts)


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
    """The exceptions that `torch.compile` raises; looked up late, as dynamo imports slowly."""
    import torch._dynamo.exc as dynamo_errors
    import torch._inductor.exc as inductor_errors

    limit = getattr(dynamo_errors, "FailOnRecompileLimitHit", dynamo_errors.TorchDynamoException)
    return (dynamo_errors.TorchDynamoException, limit, inductor_errors.CppCompileError, inductor_errors.OperatorIssue)
