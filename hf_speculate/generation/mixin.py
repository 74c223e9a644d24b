"""`generate()` of an enabled model, and the function `generate`."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils.generic import ModelOutput

from hf_speculate.compat import check_private_names, comes_from_model_config
from hf_speculate.config import FIELD_NAMES, SpeculationConfig
from hf_speculate.draft.no_drafts import CONTINUOUS, COUPLED_ALONE
from hf_speculate.draft.source import SOURCES, DraftSource, find_source
from hf_speculate.engine.builder import Prepared
from hf_speculate.engine.outputs import GenerateOutput
from hf_speculate.engine.row_lists import refilled_rows
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.generation.arguments import (
    BoundCall,
    bind,
    check_row_lists,
    hide_settings,
    intercept_stop_strings,
    name_cache,
    samples,
    source_arguments,
    take_cache,
    take_over_all,
    take_static_cache,
)
from hf_speculate.generation.config_sources import fields_in, fields_of, read_config, setting
from hf_speculate.generation.decoding_method import SpeculativeDecoding
from hf_speculate.generation.mistyped import name_mistyped
from hf_speculate.generation.signature import described
from hf_speculate.generation.validate_call import check_call
from hf_speculate.generation.validate_models import check_models, check_weights
from hf_speculate.models.text_decoder import unwrapped
from hf_speculate.verify.base import check_verifier

LOGGER = logging.getLogger("hf_speculate")
Generate = Callable[..., GenerateOutput | Tensor]
_healing_tokenizer: ContextVar[Any] = ContextVar("hf_speculate_healing_tokenizer", default=None)
# arguments of ours alone: transformers has the others, too
_OUR_FIELDS = {name for name in FIELD_NAMES if not hasattr(GenerationConfig(), name)}


class SpeculativeGenerationMixin(GenerationMixin):
    """Gives a model class speculative `generate()`; put it before the model in a class's bases.

    `generate()` takes the arguments of transformers', and the fields of `SpeculationConfig` as keywords or from a
    `GenerationConfig`; with a source of drafts, what cannot be decoded speculatively raises an error. Without a source
    it decodes plainly; with `do_sample=True` and `verifier="coupled"` it then draws, token by token, the text that
    every assistant gives with the same seed.
    """

    draft_sources: ClassVar[Mapping[str, str]] = SOURCES
    """Argument of `generate()` -> where its draft source is made; a subclass may add its own, see CONTRIBUTING.md."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours = SpeculativeGenerationMixin.generate
        if getattr(cls.generate, "__code__", None) is ours.__code__:  # no class in between has one of its own
            cls.generate = described(ours, super().generate)  # type: ignore[method-assign]

    def generate(self, *args: Any, **kwargs: Any) -> GenerateOutput | Tensor:
        """See `transformers.GenerationMixin.generate`; returns the same, with `.speculation` on output objects.

        Raises:
            SpeculateError: see `hf_speculate.generate`.
        """
        model: Any = self  # wherever the mixin is used
        with name_mistyped(kwargs):
            return _generate(model, _plain_generate(model), args, kwargs, {})

    def heal_tokens(self, input_ids: Any, tokenizer: Any = None) -> Any:
        """See transformers; without a tokenizer, that of the current call, which transformers does not hand on."""
        tokenizer = _healing_tokenizer.get() if tokenizer is None else tokenizer
        with _provide_tokenizer(None):  # heal_tokens calls `generate` itself
            return super().heal_tokens(input_ids, tokenizer)


def generate(
    model: PreTrainedModel, *args: Any, fields_from: str | Path | Mapping[str, Any] | None = None, **kwargs: Any
) -> GenerateOutput | Tensor:
    """Decode once with speculation, without enabling the model.

    The model class's own `generate` runs underneath, never one that was put on the instance, so that a Hub
    repository's `custom_generate/generate.py` can call this.

    Args:
        model: the target, which PEFT may wrap.
        *args: as `model.generate`.
        fields_from: a `generation_config.json`, or its content; its fields count where the call leaves them open.
        **kwargs: as `model.generate`, and the fields of `SpeculationConfig`.

    Returns:
        What `model.generate` returns.

    Raises:
        ConfigError: a field has a wrong value.
        UnsupportedGenerationError: a combination of arguments cannot be decoded speculatively.
        UnsupportedModelError: a model cannot take part.
    """
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model must be a transformers model, or one in a PEFT wrapper, got {type(model).__name__}; pass the model"
        )
    with name_mistyped(kwargs):
        return _generate(model, _plain_generate(model), args, kwargs, fields_in(fields_from))


def prepare(model: PreTrainedModel, first_row: int, **kwargs: Any) -> Prepared:
    """Prepare a call up to its decoder, which has not read the prompts; its rows may join those of others."""
    calls: list[Prepared] = []
    bound, clock = bind(_plain_generate(model), (), kwargs), _started_clock()
    source, config, declined = _find_source(model, bound, {})
    decoding = _make_decoding(model, bound.call, source or CONTINUOUS, config, declined, clock)
    _run(model, bound, replace(decoding, row_lists=refilled_rows(first_row), on_prepared=calls.append))
    return calls[-1]


@contextmanager
def _provide_tokenizer(tokenizer: Any) -> Iterator[None]:
    """Make the tokenizer of a call available to `heal_tokens` while transformers prepares the call."""
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
    model: PreTrainedModel, plain: Generate, args: tuple[Any, ...], kwargs: dict[str, Any], saved: Mapping[str, Any]
) -> GenerateOutput | Tensor:
    clock = _started_clock()
    name_cache(model, kwargs)
    bound = bind(plain, args, kwargs)
    if isinstance(bound.call.get("custom_generate"), str):
        return plain(*args, **kwargs)  # the repository's function comes back through `generate` above
    source, config, declined = _find_source(model, bound, saved)
    if source is None:
        check_verifier(config.resolve(do_sample=False))
        if config.speculation_stats is not None:
            config.speculation_stats.reset()
            config.speculation_stats.has_draft_source = False
        return plain(*args, **{name: value for name, value in kwargs.items() if name not in _OUR_FIELDS})
    check_row_lists(model, bound, config)
    decoding = _make_decoding(model, bound.call, source, config, declined, clock)
    output = _run(model, bound, decoding)
    stats = decoding.stats
    decoding.source.after_call(model, stats)
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("%s", stats.summary())
    if isinstance(output, ModelOutput):
        output.speculation = stats
    return output


def _started_clock() -> StageClock:
    """A clock of a call that begins now."""
    clock = StageClock()
    clock.enter(Stage.PREPARE)
    return clock


def _find_source(
    model: PreTrainedModel, bound: BoundCall, saved: Mapping[str, Any]
) -> tuple[DraftSource | None, SpeculationConfig, list[str]]:
    """Take out of a call what drafts, the settings, and the arguments that do without a source here.

    The source is None if transformers decodes the call.
    """
    call, sources = bound.call, getattr(model, "draft_sources", SOURCES)
    keywords = {name: call.pop(name) for name in FIELD_NAMES if name in call}
    stronger = [keywords, fields_of(call.get("generation_config")), saved, fields_of(model.generation_config)]
    values = source_arguments(model, call, sources)
    source, config = find_source(model, values, lambda weakest: read_config([*stronger, fields_of(weakest)]), sources)
    if source is not None:
        take_over_all(model, call, values)
        return source, source.settings(config), []
    declined = [name for name, value in values.items() if value]
    draws_coupled = config.verifier == "coupled" and samples(model, bound)
    return (COUPLED_ALONE if draws_coupled else None), config, declined


def _make_decoding(
    model: PreTrainedModel,
    call: dict[str, Any],  # the arguments by name, of which our own are taken out
    source: DraftSource,
    config: SpeculationConfig,
    declined: list[str],  # see `_find_source`
    clock: StageClock,
) -> SpeculativeDecoding:
    """Check a call with a source, and make the function that decodes it."""
    check_call(model, call, config, source, declined)
    check_private_names(model)
    models = [model] if source.model is None else [model, source.model]
    check_models(models, source)
    check_weights(models, source)
    clock.enter(Stage.PREPARE if source.model is None else Stage.VOCABULARY)
    source = source.resolve(model, call)
    clock.enter(Stage.PREPARE)
    intercept_stop_strings(model, call)
    hide_settings(model, call, getattr(model, "draft_sources", SOURCES))
    take_cache(model, call)
    is_static = take_static_cache(model, call)
    passed = {name: value for name, value in call.items() if value is not None}
    return SpeculativeDecoding(source, config, passed, is_static, clock)


def _run(model: PreTrainedModel, bound: BoundCall, decoding: SpeculativeDecoding) -> GenerateOutput | Tensor:
    call = bound.call
    if setting(model, call, "token_healing") and not isinstance(model, SpeculativeGenerationMixin):
        raise UnsupportedGenerationError(
            "token_healing must be left out for a model that is not enabled, got True; call enable(model), or "
            "model.heal_tokens(input_ids, tokenizer) beforehand"
        )
    with decoding.clock, _provide_tokenizer(call.get("tokenizer")):
        call["custom_generate"] = decoding
        decoding.clock.enter(Stage.INPUTS)
        output: GenerateOutput | Tensor = bound.run()
    if not decoding.num_runs:
        raise UnsupportedModelError(
            f"generate() of the model must decode by GenerationMixin's, got {type(model).__name__} with a loop of its "
            f"own; {decoding.source.hint}"
        )
    return output


def warn_of_lost_fields(model: PreTrainedModel) -> None:
    """Warn if transformers will lose our fields when the model's generation config is next loaded."""
    config = model.generation_config
    names = sorted(fields_of(config))
    if names and comes_from_model_config(config):
        warnings.warn(
            f"generation_config carries _from_model_config, so transformers will drop {', '.join(names)} when it is "
            "saved and loaded; save a fresh GenerationConfig(**fields) instead",
            stacklevel=3,
        )
