"""Draft sources: each has its own file and is found through one table."""

import copy
import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import GenerationConfig, PreTrainedModel

from hf_speculate.config import FIELD_NAMES, SpeculationConfig
from hf_speculate.draft.base import Drafter, DrafterSetup
from hf_speculate.draft.vocab_mapping import VocabMapping
from hf_speculate.errors import ConfigError, UnsupportedGenerationError
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import DraftNames

if TYPE_CHECKING:
    from hf_speculate.engine.runners import Runners

# Argument of `generate()`, or combined arguments -> the function that makes their source, which is
# imported when a call has the argument. Without a name after a colon, the function is
# `make_source`. Its arguments are the target and the values in a call.
SOURCES = {
    "assistant_model": "hf_speculate.draft.assistant_model",
    "assistant_early_exit": "hf_speculate.options.sources.early_exit",
    "candidate_generator": "hf_speculate.options.candidates.source",
    "drafter": "hf_speculate.draft.custom",
    "prompt_lookup_num_tokens": "hf_speculate.draft.prompt_lookup",
    "use_mtp": "hf_speculate.options.heads.source:make_mtp_source",
    "assistant_model and prompt_lookup_num_tokens": "hf_speculate.options.sources.hybrid",
    "assistant_early_exit and prompt_lookup_num_tokens": "hf_speculate.options.sources.hybrid",
}
# Kind of an argument's value -> the function that makes its source or finds it in files.
VARIANTS = {
    "a draft head": "hf_speculate.options.heads.source",
    "a name": "hf_speculate.options.heads.named:find_head",
    "suffix_store": "hf_speculate.options.sources.stored_lookup",
    "forced text": "hf_speculate.options.sources.forced_text",
    "a Uno adapter": "hf_speculate.options.uno.source",
    "pictures": "hf_speculate.options.pictures.draft_inputs:read_media",
    # `model_type` of transformers models that draft for only one target.
    "gemma4_assistant": "hf_speculate.options.gemma4.source",
    "gemma4_unified_assistant": "hf_speculate.options.gemma4.source",
}
# Sources whose KV cache a `DraftState` keeps.
_WITH_MODEL = ("assistant_model", "assistant_early_exit")


class HistoryKey(NamedTuple):
    """Key of a draft source's history. Calls with equal keys share their measurements."""

    draft: object | None  # the draft model, held weakly; None if no object outlives the call
    name: Hashable  # the type of the source, and what distinguishes it from others of this type


class DraftSource:
    """Draft source of a call.

    The methods are called in the order in which they are defined. A returned source replaces this
    one.
    """

    argument = ""  # argument of `generate()` that selects the source, named in errors
    hint = ""  # how to decode without the source, used as the next step in errors
    description = "none"  # description for `stats.plan`, and name of the drafted tokens
    model: PreTrainedModel | None = None  # the draft model; None without one
    generation_config: GenerationConfig | None = None  # fills in fields that the call leaves open
    # maps the target's ids to the draft model's ids; None if they are the same
    vocabulary: VocabMapping | None = None
    eager_reason = ""  # why the draft model is never compiled; empty if it may be
    drafts = True  # whether the source drafts tokens at all
    is_token_by_token = False  # whether the target reads one token at a time, as in plain decoding
    drafts_at_once = False  # whether one step drafts all tokens of a round
    # whether a round may have any number of tokens even with a constant draft length
    varies_len = False
    is_single_row = False  # whether the source supports only one row
    reads_embeds = True  # whether the source supports prompts given as embeddings
    reads_keys = False  # whether the source reads the noise keys even if it does not sample
    reads_prepared = False  # whether the source reads `DrafterSetup.for_generators`
    takes_turns = True  # whether another source may draft in its place in some rounds
    # argument that cannot be combined with synced_gpus; empty if there is none
    unsynced = ""
    hidden_layers: Sequence[int] | None = None  # see `Drafter.hidden_layers`; known after `begin`
    is_compiled = False  # whether it drafts with its own compiled units; known after `begin`
    # whether a source without a model samples with kernels on the target's device
    samples_with_kernels = False
    # whether it can draft from device graphs of its own; known after `begin`
    can_capture = False
    # why the states come from the output of an eager forward; empty if they are captured
    reads_outputs = ""

    @property
    def names(self) -> DraftNames:
        """Names for tokens drafted with a model and for free proposals."""
        return DraftNames(self.description, self.description)

    def settings(self, config: SpeculationConfig) -> SpeculationConfig:
        """Return the settings of a call with this source; raise an error if they do not fit it."""
        return config

    def resolve(self, target: PreTrainedModel, arguments: Mapping[str, Any]) -> "DraftSource":
        """Bind the source to the target, after both models have been checked."""
        return self

    def without_model(self) -> "DraftSource":
        """Return the source to use if the draft model cannot draft or gains nothing."""
        return self

    def begin(self, setup: DrafterSetup) -> "DraftSource":
        """Begin one run of `generate()` before its caches and forwards are planned."""
        return self

    def samples(self, config: SpeculationConfig, do_sample: bool) -> bool:
        """Return whether drafts are sampled; otherwise, they are point masses."""
        return do_sample and config.draft_sampling == "sample"

    def history_key(self) -> HistoryKey:
        """Return the key under which calls with this source share measurements."""
        return HistoryKey(self.model, ("none", False))

    def step_bytes(self, target: PreTrainedModel) -> int | None:
        """Return the weight bytes that a draft step reads, for a source without a model.

        The result is None if the number is unknown.
        """
        return 0

    def make_drafter(
        self, setup: DrafterSetup, runners: "Runners", meet: Callable[[], None] | None = None
    ) -> Drafter:
        """Make the drafter for a planned run.

        Args:
            setup: the setup passed to `begin`.
            runners: decides how the draft model's forwards run: eagerly, compiled or from graphs.
            meet: function that synced ranks call before each forward of a draft model. None without
                synced ranks.
        """
        raise NotImplementedError

    def keep(self, token_ids: Sequence[int]) -> None:
        """Store the new tokens of a row; called for every row unless the call fails."""

    def keep_row(self, token_ids: Sequence[int], prompt_ids: Callable[[], Sequence[int]]) -> None:
        """Store the new tokens of a row, given a function that returns its prompt tokens.

        The method is called for every row unless the call fails.
        """
        self.keep(token_ids)

    def after_call(self, target: PreTrainedModel, stats: SpeculationStats) -> None:
        """Finish a call; called unless the call fails."""


class FactorySource(DraftSource):
    """Draft source whose drafter is made before the plan, because the plan depends on it."""

    reads_keys = True
    drafter: Drafter

    def start(self, setup: DrafterSetup) -> Drafter:
        """Make the drafter for one run; see `begin`."""
        raise NotImplementedError

    def begin(self, setup: DrafterSetup) -> "DraftSource":
        begun = copy.copy(self)
        begun.drafter = self.start(setup)
        begun.hidden_layers, begun.is_compiled = (
            begun.drafter.hidden_layers,
            begun.drafter.is_compiled,
        )
        return begun

    def make_drafter(
        self, setup: DrafterSetup, runners: "Runners", meet: Callable[[], None] | None = None
    ) -> Drafter:
        return self.drafter


def find_source(
    target: PreTrainedModel,
    values: Mapping[str, Any],  # values of the draft arguments in `sources`
    read_settings: Callable[[GenerationConfig | None], SpeculationConfig],
    sources: Mapping[str, str] = SOURCES,
) -> tuple[DraftSource | None, SpeculationConfig]:
    """Return the draft source and the settings of a call.

    The source is None if the call names none. The source's generation config completes the
    settings.

    Raises:
        ConfigError: a `DraftState` is given without a draft model.
        UnsupportedGenerationError: the call names several sources.
    """
    first = next((name for name in sources if is_set(values.get(name))), "")
    source = make_source(first, target, values, sources) if first else None
    config = read_settings(None if source is None else source.generation_config)
    values = source_values(values, config)
    key = source_key(values, sources)
    if key != first:
        source = make_source(key, target, values, sources)
    return source, config


def source_values(values: Mapping[str, Any], config: SpeculationConfig) -> dict[str, Any]:
    """Return the arguments of a call by name, including settings."""
    return {**values, **{name: getattr(config, name) for name in FIELD_NAMES}}


def source_key(values: Mapping[str, Any], sources: Mapping[str, str] = SOURCES) -> str:
    """Return the key in `sources` for a call's arguments; empty if they name no source.

    The function raises the same errors as `find_source`.
    """
    if values.get("draft_state") is not None and all(
        values.get(name) is None for name in _WITH_MODEL
    ):
        raise ConfigError(
            "draft_state must come with assistant_model or assistant_early_exit, got neither; "
            "leave draft_state out"
        )
    names = [name for name in sources if is_set(values.get(name))]
    key = " and ".join(names)
    if len(names) > 1 and key not in sources:
        surplus = "one of them" if len(names) == 2 else "all but one"
        raise UnsupportedGenerationError(f"pass one draft source, got {key}; omit {surplus}")
    return key


def make_source(
    key: str,
    target: PreTrainedModel,
    values: Mapping[str, Any],
    sources: Mapping[str, str] = SOURCES,
) -> Any:
    """Make the source for a key in `sources`; None if transformers decodes the call."""
    return load_entry(sources[key])(target, values)


def load_entry(entry: str) -> Any:
    """Import the function named by a table entry."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name or "make_source")


def hint_of(argument: str) -> str:
    """Return the hint for an error, which says how to decode without an argument."""
    return f"leave {argument} out to decode without speculation"


def qualified_name(factory: object) -> str:
    """Return the qualified name of a function or class.

    An object is named by its class, a partial function by its function.
    """
    while isinstance(factory, partial):
        factory = factory.func
    named = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}.{named.__qualname__}"


def is_set(value: Any) -> bool:
    """Return whether an argument names a draft source; False disables one."""
    return value is not None and value is not False
