"""Run functions of a model compiled by `torch.compile`, or eagerly with a reason."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CompileConfig

from hf_speculate.cache.preallocated import PreallocatedKVCache
from hf_speculate.models.runner import CompiledUnits

warn_once = cache(logging.getLogger(__name__).warning)


def settings_key(config: CompileConfig) -> Hashable:
    """Return a key, equal for configs with the same compiled function."""
    return config.backend, config.mode, config.dynamic, repr(sorted((config.options or {}).items()))


def compiled(function: Callable[..., Any], config: CompileConfig) -> Callable[..., Any]:
    """Wrap a copy of `function` by `torch.compile`, without graph breaks."""
    # Dynamo counts recompilations by code object, even across functions.
    code, name = function.__code__.replace(), function.__name__
    function_copy = FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    backend: Any = config.backend
    options = dict(config.options) if config.options else None
    mode = None if options else config.mode
    return torch.compile(
        function_copy,
        fullgraph=True,
        dynamic=config.dynamic,
        backend=backend,
        mode=mode,
        options=options,
    )


class Steps(NamedTuple):
    """Consecutive steps of a model."""

    # of the model, `carry` and `args`: the step's result and the next step's `carry`
    step: Callable[..., tuple[Any, Any]]
    finish: Callable[..., Any]  # of the list of results and `args`: the result of all steps


class Runner(ABC):
    """Runner of a model's functions over fixed buffers.

    It serves one call. Subclasses: `Compilation` and `Graphing`.
    """

    varies: bool = False
    """Whether sizes may be dynamic."""
    sampling_backend: str | None = None
    """Backend of the sampling kernel in compiled functions; None for the call's."""
    verifies: bool = False
    """Whether a function may score and verify a round."""

    def __init__(self, model: nn.Module, units: CompiledUnits, on_failure: Callable[[str], None]):
        self.model = model
        self.units = units  # functions compiled for the model before, and failures
        self.is_working = True  # if False, forwards run eagerly
        self._on_failure = on_failure  # called with the reason once

    def bind(self, kv_cache: PreallocatedKVCache) -> None:
        """Use the graphs captured over a cache's buffers; a no-op without graphs."""
        return

    @abstractmethod
    def run(self, name: Hashable, function: Callable[..., Any], *args: Any) -> Any | None:
        """Run a function of the model and `args`, and return its result.

        None if it cannot run. The result is a tensor, or nested tuples of tensors or None. After a
        failure, the tensors written by the function are undefined. Equal names mean equal
        functions.
        """

    @abstractmethod
    def repeat(
        self, name: Hashable, steps: Steps, num_steps: int, carry: Any, *args: Any
    ) -> tuple[Any, Any] | None:
        """Run `num_steps` consecutive steps; return their result and the `carry` after them.

        None if they cannot run. Graphs overwrite both with the next function that they replay.
        """

    def fail(self, why: str, failure_key: Hashable | None) -> None:
        """Stop running in this call, and with a failure key also in later calls."""
        reason = self.instead(f"which cannot be {why}")
        if failure_key is not None:
            self.units.failures[failure_key] = reason
        self.give_up(reason)

    def instead(self, why: str) -> str:
        """Say what runs in place of this runner, and why."""
        return f"eager forwards of {type(self.model).__name__}, {why}"

    def give_up(self, reason: str, figures: str = "") -> None:
        """Stop running in this call; log each reason once, without its figures."""
        self.is_working = False
        warn_once(reason)
        self._on_failure(f"{reason}: {figures}" if figures else reason)


class Compilation(Runner):
    """Compiled forwards of one model.

    After a failure, later calls run eagerly. Only after torch's recompile limit do they try again.
    """

    sampling_backend = "torch"

    def __init__(
        self,
        model: nn.Module,
        config: CompileConfig,
        units: CompiledUnits,
        on_failure: Callable[[str], None],
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
            compiled_function = self.units.function(
                (name, self._key), lambda: compiled(function, self._config)
            )
            is_graphed = next(self.model.parameters()).device.type == "cuda"
            if is_graphed:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                result = compiled_function(self.model, *args)
                # the next replay overwrites the result
                return copies(result) if is_graphed else result
        except _compile_errors() as error:
            self.fail(
                f"compiled: {cause_of(error)}", None if is_recompile_limit(error) else self._key
            )
            return None

    def repeat(
        self, name: Hashable, steps: Steps, num_steps: int, carry: Any, *args: Any
    ) -> tuple[Any, Any] | None:
        results = []
        for _ in range(num_steps):  # compiling them as one would take as many times as long
            step_output = self.run(name, steps.step, carry, *args)
            if step_output is None:
                return None
            result, carry = step_output
            results.append(result)
        return steps.finish(results, *args), carry


def copies(
    tree: Any,
    kept: tuple[type, ...] = (),
    is_kept: Callable[[Tensor], bool] = lambda tensor: False,
) -> Any:
    """Copy the tensors in nested tuples, except in tuples of the types `kept` and by `is_kept`."""
    if isinstance(tree, Tensor):
        return tree if is_kept(tree) else tree.clone()
    if not isinstance(tree, tuple) or isinstance(tree, kept):
        return tree
    children = [copies(child, kept, is_kept) for child in tree]
    return tuple(children) if type(tree) is tuple else type(tree)(*children)


def cause_of(error: Exception) -> str:
    """Return the cause of a compile error in one line."""
    if is_recompile_limit(error):
        return (
            "torch.compile reached its recompile limit; raise torch._dynamo.config.recompile_limit"
        )
    cause = getattr(error, "inner_exception", None) or error.__cause__
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    if not lines:
        return type(cause or error).__name__
    # Graph breaks name the cause in their first line, backends in the last line of the wrapped
    # error.
    return lines[0] if cause is None else f"{type(cause).__name__}: {lines[-1]}"


def is_recompile_limit(error: Exception) -> bool:
    """Return whether torch has compiled a function as often as it is allowed to."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def _compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of `torch.compile`; imported late because dynamo imports slowly."""
    import torch._dynamo.exc as dynamo_errors
    import torch._inductor.exc as inductor_errors

    limit = getattr(dynamo_errors, "FailOnRecompileLimitHit", dynamo_errors.TorchDynamoException)
    return (
        dynamo_errors.TorchDynamoException,
        limit,
        inductor_errors.CppCompileError,
        inductor_errors.OperatorIssue,
    )
