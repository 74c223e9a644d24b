"""Run the `generate()` method of enabled models and the function `generate`."""

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.generic import ModelOutput

from hf_speculate.compat import comes_from_model_config
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.source import SOURCES
from hf_speculate.engine.call import refilled_rows
from hf_speculate.engine.decoder import SpeculativeDecoder
from hf_speculate.engine.outputs import GenerateOutput
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.generation.config_sources import fields_in, fields_of, setting
from hf_speculate.generation.decode import SpeculativeDecoding
from hf_speculate.generation.defaults import Defaults, decodes_plainly, nested_calls
from hf_speculate.generation.mistyped import name_mistyped
from hf_speculate.generation.request import (
    OUR_FIELDS,
    RefusedDefaultError,
    bind,
    call_by_name,
    find_source_of,
    hide_settings,
    name_cache,
    read_request,
    samples,
    source_arguments,
    speculative_request,
    take_over_all,
)
from hf_speculate.generation.undrafted import (
    Undrafted,
    WithoutPrompt,
    add_tokenizer,
    seeded,
    undrafted_config,
)
from hf_speculate.models.language_model import device_of
from hf_speculate.models.text_decoder import unwrapped

LOGGER = logging.getLogger("hf_speculate")
Generate = Callable[..., GenerateOutput | Tensor]
_healing_tokenizer: ContextVar[Any] = ContextVar("hf_speculate_healing_tokenizer", default=None)


class SpeculativeGenerationMixin(GenerationMixin):
    """Mixin for speculative `generate()`.

    List the mixin before the model class. `generate()` takes the arguments of
    transformers' method, and the fields of `SpeculationConfig` as keywords or from a
    `GenerationConfig`. With a draft source, unsupported arguments raise an error. Without a draft
    source, the model uses plain decoding. With `do_sample=True` and `verifier="coupled"`, it then
    samples token by token, and the text is the same as with any assistant and the same seed.
    """

    draft_sources: ClassVar[Mapping[str, str]] = SOURCES
    """Argument of `generate()` -> factory of its draft source.

    Subclasses may add further arguments; see CONTRIBUTING.md.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours = SpeculativeGenerationMixin.generate
        # only if no class in between overrides `generate`
        if getattr(cls.generate, "__code__", None) is ours.__code__:
            cls.generate = described(ours, super().generate)  # type: ignore[method-assign]

    def generate(self, *args: Any, **kwargs: Any) -> GenerateOutput | Tensor:
        """Generate as transformers does, and set `.speculation` on output objects.

        Raises:
            SpeculateError: see `hf_speculate.generate`.
        """
        model: Any = self  # the mixin is used on models only
        with name_mistyped(kwargs):
            return _generate(model, _plain_generate(model), args, kwargs, {})

    @functools.wraps(PreTrainedModel.save_pretrained)
    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self
        Defaults.of(model).warn_left_out(
            "what save_pretrained() writes", "hf_speculate.save_settings() writes them"
        )
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def heal_tokens(self, input_ids: Any, tokenizer: Any = None) -> Any:
        """Heal tokens as transformers does, by default with the tokenizer of the current call.

        transformers does not pass the tokenizer on.
        """
        tokenizer = _healing_tokenizer.get() if tokenizer is None else tokenizer
        model: Any = self
        with _provide_tokenizer(None), nested_calls(model):  # heal_tokens calls `generate` itself
            return super().heal_tokens(input_ids, tokenizer)


def generate(
    model: PreTrainedModel,
    *args: Any,
    fields_from: str | Path | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> GenerateOutput | Tensor:
    """Decode once with speculation, without enabling the model.

    The function runs the class's `generate`, never one set on the instance. The
    `custom_generate/generate.py` of a Hub repository can therefore call it.

    Args:
        model: the target, possibly wrapped by PEFT.
        *args: as for `model.generate`.
        fields_from: a `generation_config.json`, or its content, with default values for the fields.
        **kwargs: as for `model.generate`, and the fields of `SpeculationConfig`.

    Returns:
        The output of `model.generate`.

    Raises:
        ConfigError: a field has an invalid value.
        UnsupportedGenerationError: speculative decoding does not support the arguments.
        UnsupportedModelError: speculative decoding does not support one of the models.
    """
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            "model must be a transformers model, or one in a PEFT wrapper, got "
            f"{type(model).__name__}; pass the model"
        )
    with name_mistyped(kwargs):
        return _generate(model, _plain_generate(model), args, kwargs, fields_in(fields_from))


def prepare(model: PreTrainedModel, first_row: int, **kwargs: Any) -> SpeculativeDecoder:
    """Prepare a call for continuous batching and return its decoder before the prefill."""
    decoders: list[SpeculativeDecoder] = []
    plain, clock = _plain_generate(model), _started_clock()
    call, _ = bind(plain, (), kwargs)
    # errors are raised to the caller, as for a draft source named by the call
    found = find_source_of(model, plain, call, {})._replace(is_default=False)
    request = speculative_request(model, plain, call, found, clock)
    _decode(model, SpeculativeDecoding(request, clock, refilled_rows(first_row), decoders.append))
    return decoders[-1]


@contextmanager
def _provide_tokenizer(tokenizer: Any) -> Iterator[None]:
    """Provide a call's tokenizer to `heal_tokens` while transformers prepares the call."""
    token = _healing_tokenizer.set(tokenizer)
    try:
        yield
    finally:
        _healing_tokenizer.reset(token)


def _plain_generate(model: PreTrainedModel) -> Any:
    if isinstance(model, SpeculativeGenerationMixin):
        return super(SpeculativeGenerationMixin, model).generate
    plain_class: Any = type(model)
    return plain_class.generate.__get__(model)


def _generate(
    model: PreTrainedModel,
    plain: Generate,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    saved: Mapping[str, Any],
) -> GenerateOutput | Tensor:
    clock = _started_clock()
    name_cache(model, kwargs)
    if decodes_plainly(model):
        return _decode_without_source(model, plain, args, kwargs, saved)
    decoding = None
    try:
        request = read_request(model, plain, args, kwargs, saved, clock)
        if isinstance(request, Undrafted):
            with seeded(request.config, device_of(model), samples=request.samples):
                plain_output = plain(*args, **kwargs)
            request.report(request.stats)
            return plain_output
        decoding = SpeculativeDecoding(request, clock)
        output = _decode(model, decoding)
    except RefusedDefaultError as refused:
        Defaults.of(model).warn_once(f"a call decodes plainly: {refused}")
        return _decode_without_source(
            model, plain, args, kwargs, saved, str(refused), has_prompt=decoding is not None
        )
    request.source.after_call(model, request.stats)
    request.report(request.stats)
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("%s", request.stats.summary())
    if isinstance(output, ModelOutput):
        output.speculation = request.stats
    return output


def _decode_without_source(
    model: PreTrainedModel,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    saved: Mapping[str, Any],
    refusal: str = "",
    has_prompt: bool = False,
) -> GenerateOutput | Tensor:
    """Run a call with plain decoding, as transformers does without a draft source.

    Args:
        model: the target.
        plain: the model's own `generate`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        saved: fields from a file.
        refusal: reason why the defaults of `enable` are not used, for the statistics.
        has_prompt: whether the call's streamer has already received the prompt.
    """
    call, positional_names = bind(plain, args, kwargs)
    sources = getattr(model, "draft_sources", SOURCES)
    undrafted = Undrafted.of(
        undrafted_config(model, call, saved), refusal, samples=samples(model, plain, call)
    )
    add_tokenizer(model, call, call)
    for name in OUR_FIELDS & call.keys():
        del call[name]
    call.pop("assistant_tokenizer", None)
    take_over_all(model, call, source_arguments(model, call, sources))
    hide_settings(model, call, sources)
    if has_prompt and call.get("streamer") is not None:
        call["streamer"] = WithoutPrompt(call["streamer"])
    with seeded(undrafted.config, device_of(model), samples=undrafted.samples):
        output: GenerateOutput | Tensor = call_by_name(plain, call, positional_names)
    undrafted.report(undrafted.stats)
    return output


def _started_clock() -> StageClock:
    """Start the clock for a call."""
    clock = StageClock()
    clock.enter(Stage.PREPARE)
    return clock


def _decode(model: PreTrainedModel, decoding: SpeculativeDecoding) -> GenerateOutput | Tensor:
    """Let transformers prepare a call and run the decoding function."""
    request = decoding.request
    if setting(model, request.arguments, "token_healing") and not isinstance(
        model, SpeculativeGenerationMixin
    ):
        raise UnsupportedGenerationError(
            "token_healing must be left out for a model that is not enabled, got True; call "
            "enable(model), or "
            "model.heal_tokens(input_ids, tokenizer) beforehand"
        )
    with decoding.clock, _provide_tokenizer(request.passed.get("tokenizer")):
        decoding.clock.enter(Stage.INPUTS)
        output: GenerateOutput | Tensor = request.run(decoding)
    if not decoding.num_runs:
        raise UnsupportedModelError(
            f"generate() of the model must decode by GenerationMixin's, got {type(model).__name__} "
            "with a loop of its "
            f"own; {request.source.hint}"
        )
    return output


def warn_of_lost_fields(model: PreTrainedModel) -> None:
    """Warn if saving and loading the model's generation config drops our fields."""
    config = model.generation_config
    names = sorted(fields_of(config))
    if names and comes_from_model_config(config):
        warnings.warn(
            "generation_config carries _from_model_config, so transformers will drop "
            f"{', '.join(names)} when it is "
            "saved and loaded; save a fresh GenerationConfig(**fields) instead",
            stacklevel=3,
        )


def described(generate: Any, plain: Callable[..., Any]) -> Any:
    """Copy `generate` with the signature and docstring of `plain`, extended by our fields."""
    code, scope, name = generate.__code__, generate.__globals__, generate.__name__
    function = FunctionType(code, scope, name, generate.__defaults__, generate.__closure__)
    function.__module__, function.__qualname__ = generate.__module__, generate.__qualname__
    function.__annotations__ = generate.__annotations__
    function.__signature__ = _signature(plain)  # type: ignore[attr-defined]
    text = inspect.getdoc(plain) or inspect.getdoc(GenerationMixin.generate) or ""
    ours = (inspect.getdoc(SpeculationConfig) or "").partition("Args:\n")[2].partition("\n\n")[0]
    heading = "Speculative decoding, by keyword or as fields of a `GenerationConfig`:"
    function.__doc__ = f"{text}\n\n{heading}\n{ours}\n"
    return function


def _signature(plain: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(plain)
    theirs = list(signature.parameters.values())
    ours = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in fields(SpeculationConfig)
        if field.name not in signature.parameters
    ]
    end = len(theirs) - (bool(theirs) and theirs[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*theirs[:end], *ours, *theirs[end:]])
