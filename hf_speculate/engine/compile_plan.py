"""Decides what one call runs compiled."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from transformers import CompileConfig, GenerationConfig, PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.compat import compile_config_of
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.compiled import MAX_UNROLLED_STEPS
from hf_speculate.engine.distributed import num_shards
from hf_speculate.models.compilation import LOGGER, Compilation, CompileSettings
from hf_speculate.models.compiled import UNREAD_COLUMNS, CompiledLanguageModel
from hf_speculate.models.extra_inputs import Context
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.stats import SpeculationStats

# Fixed buffers are a multiple of this long, so that calls of about one length have buffers of one length.
CAPACITY_UNIT = 128


class Static(NamedTuple):
    """A call's wish for buffers that never grow, and for compiled forwards over them."""

    target: CompileSettings | None  # None: eagerly
    draft: CompileSettings | None
    obstacle: str  # what stays eager though it was to be compiled, with the reason; empty where nothing does
    min_columns: int  # that buffers are made for


def compile_settings(config: CompileConfig) -> CompileSettings:
    """Our form of the settings that transformers takes."""
    return CompileSettings(config.backend, config.mode, config.dynamic, config.options)


def static_of(
    model: PreTrainedModel, assistant: PreTrainedModel | None, config: GenerationConfig, is_static: bool
) -> Static | None:
    """What a call asks of fixed buffers; what plain `generate` would not compile is not compiled.

    Args:
        model: the target.
        assistant: the draft model, or None.
        config: the prepared generation config.
        is_static: whether a static cache was asked for.
    """
    if not is_static and config.compile_config is None:
        return None
    wanted = [compile_config_of(one, config) for one in (model, model if assistant is None else assistant)]
    target, draft = (None if one is None else compile_settings(one) for one in wanted)
    obstacle = ""
    if config.compile_config is not None and target is None:
        obstacle = (
            f"eager forwards, for plain generate() would not compile either with this compile_config on {model.device}"
        )
    if config.output_hidden_states or config.output_attentions:
        obstacle = "eager forwards, for hidden states or attentions are returned" if target or obstacle else ""
        target = draft = None
    if target is not None and num_shards(model) > 1:
        target, obstacle = None, "eager forwards of the target, which is split over processes"
    if draft is not None and assistant is not None and num_shards(assistant) > 1:
        draft, obstacle = None, "eager forwards of the draft, which is split over processes"
    return Static(target, draft, obstacle, getattr(config, "max_cache_len", None) or 0)


def with_eager_draft(static: Static | None, reason: str) -> Static | None:
    """The same wish, but for compiled forwards of the draft.

    Args:
        static: what a call asks of fixed buffers.
        reason: why its draft is not compiled; empty where it may be.
    """
    if static is None or static.draft is None or not reason:
        return static
    return static._replace(draft=None, obstacle=f"eager forwards of the draft, for {reason}")


def draft_lens(config: SpeculationConfig) -> tuple[int, ...]:
    """The draft lengths K that are compiled, ascending; others are rounded up.

    A constant K is the only one, which its last round is rounded up to as well. Where K varies, as it always does with
    copies, powers of two and the largest leave at most half of a draft without use.
    """
    num = config.max_draft_tokens
    if config.schedule == "constant" and config.prompt_lookup_num_tokens is None:
        return (num,)
    return (*(1 << power for power in range(1, 8) if 1 << power < num), num)


@dataclass
class Compiler:
    """Makes the language models of a call.

    Args:
        static: what the call asks for; None: nothing.
        lens: the draft lengths that are compiled.
        stats: told what runs compiled, and what does not.
        is_synced: whether other processes take part in every forward: what gathers weights or adds up parts knows no
            inference mode.
    """

    static: Static | None
    lens: tuple[int, ...]
    stats: SpeculationStats
    is_synced: bool = False

    def __post_init__(self) -> None:
        if self.static is not None and self.static.obstacle:
            self._give_up(self.static.obstacle)

    def capacity(self, max_columns: int) -> int | None:
        """Columns of fixed buffers for rows of `max_columns` and what a round writes behind them; None: they grow."""
        if self.static is None:
            return None
        num_columns = max(max_columns, self.static.min_columns) + max(self.lens, default=0) + 1 + UNREAD_COLUMNS
        return -(-num_columns // CAPACITY_UNIT) * CAPACITY_UNIT

    @property
    def is_compiling(self) -> bool:
        """Whether a model is to run compiled; buffers then stay for later calls."""
        return self.static is not None and not (self.static.target is None and self.static.draft is None)

    def target(
        self,
        model: PreTrainedModel,
        max_position: int | None,
        kv_cache: KVCache,
        context: Context,
        *,
        keeps_states: bool,
    ) -> LanguageModel:
        """The target, compiled where that was asked for and can be.

        Args:
            model: the target.
            max_position: upper bound of position ids.
            kv_cache: its cache.
            context: see `LanguageModel`.
            keeps_states: see `LanguageModel`.
        """
        settings = None if self.static is None else self.static.target
        compilation = self._compilation("target", model, settings, kv_cache, context)
        if compilation is None:
            return LanguageModel(model, max_position, keeps_states or self.is_synced, context)
        # Where K varies, plain steps are rounds of their own; after a constant K the last one is rounded up.
        plain = (0,) if len(self.lens) != 1 else ()
        query_lens = tuple(num + 1 for num in (*plain, *self.lens))
        return CompiledLanguageModel(model, max_position, compilation, query_lens, context)

    def draft(
        self,
        model: PreTrainedModel,
        max_position: int | None,
        kv_cache: KVCache | None,
        context: Context,
        *,
        is_unrolled: bool,
    ) -> LanguageModel:
        """The draft model, compiled where that was asked for and can be.

        Args:
            model: the draft model.
            max_position: upper bound of position ids.
            kv_cache: its cache.
            context: see `LanguageModel`.
            is_unrolled: whether its steps may be compiled as one unit, and not one by one.
        """
        settings = None if self.static is None else self.static.draft
        compilation = self._compilation("draft", model, settings, kv_cache, context)
        if compilation is None:
            return LanguageModel(model, max_position, self.is_synced, context, is_draft=True)
        all_unrolled = is_unrolled and max(self.lens) <= MAX_UNROLLED_STEPS
        return CompiledLanguageModel(model, max_position, compilation, () if all_unrolled else (1, 2))

    def _compilation(
        self,
        part: str,
        model: PreTrainedModel,
        settings: CompileSettings | None,
        kv_cache: KVCache | None,
        context: Context,
    ) -> Compilation | None:
        if settings is None or kv_cache is None:
            return None
        if kv_cache.kind != "preallocated":
            self._give_up(f"eager forwards of the {part} {type(model).__name__}, whose states are not preallocated")
            return None
        if not context.is_empty:
            self._give_up(f"eager forwards of the {part} {type(model).__name__}, which reads more than its text")
            return None
        if part not in self.stats.compiled:
            self.stats.compiled.append(part)

        def forget(reason: str) -> None:
            self.stats.compiled.remove(part)
            self.stats.add_fallback(f"{part}: {reason}")

        return Compilation(model, settings, forget)

    def run_target_eagerly(self, reason: str) -> None:
        """Note why the target runs eagerly though it was to be compiled; its forwards see to it that it does."""
        if "target" in self.stats.compiled:
            self.stats.compiled.remove("target")
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self.stats.add_fallback(reason)
        _warn_once(reason)


@cache
def _warn_once(text: str) -> None:
    LOGGER.warning(text)
