"""A Uno adapter: a LoRA with which the target drafts for itself."""

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from transformers import PreTrainedModel

from hf_speculate.draft.base import DrafterSetup
from hf_speculate.draft.named import is_of_hub, is_same_checkpoint
from hf_speculate.engine.ranks import tensor_parallel_size
from hf_speculate.errors import ConfigError, UnsupportedModelError, warn_user
from hf_speculate.field_checks import is_int
from hf_speculate.model_state import model_state
from hf_speculate.models.language_model import device_of, dtype_of, vocab_size_of
from hf_speculate.models.recurrent_layers import recurrent_cache
from hf_speculate.options.uno.drafter import UnoDrafter
from hf_speculate.options.uno.low_rank import LowRankLayers
from hf_speculate.options.uno.weights import AdapterWeights, file_stamps, read_files, read_peft

_NUM_KEPT = 4  # adapters of a target that need no living object


@dataclass(frozen=True, eq=False)
class _Loaded:
    """An adapter over its target."""

    layers: LowRankLayers
    form: Hashable  # dtype and device of the target
    stamps: Hashable  # state of the weights when they were read
    weights: AdapterWeights | None  # PEFT weights, kept so that no others get their addresses


class _LoadedAdapters:
    """Adapters of one target, by source: those of living objects, and the last ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_source: WeakValueDictionary[Hashable, _Loaded] = WeakValueDictionary()
        self._last: dict[Hashable, _Loaded] = {}  # the newest one at the end

    def keep(self, key: Hashable, loaded: _Loaded) -> None:
        self._last.pop(key, None)
        self.by_source[key] = self._last[key] = loaded
        if len(self._last) > _NUM_KEPT:
            del self._last[next(iter(self._last))]


class UnoAdapter:
    """A Uno adapter of the target.

    Pass this object to `generate()` as `assistant_model`. A folder or an id alone is not enough,
    since the files of a Uno adapter look like those of any other LoRA. The first call with a target
    loads the weights, and objects with one source share them. The target and its own adapters are
    not modified.

    Args:
        source: folder or Hub id of the adapter, or the name of an inactive adapter in a PEFT
            target. Changed files in a folder are read again, and so are changed weights of a PEFT
            target, except for writes through `.data`.
        mask_token_id: id of the mask token in training. The ids of noise tokens are at least 1 and
            below it. None for `mask_token_id` in the target's config, or if there is none, for the
            whole vocabulary.
        revision: branch, tag or commit on the Hub. None for the main branch.

    Raises:
        ConfigError: `mask_token_id` is not an integer >= 2.
    """

    draft_source = "a Uno adapter"  # name of its kind of draft source

    def __init__(
        self, source: str | Path, mask_token_id: int | None = None, revision: str | None = None
    ):
        if mask_token_id is not None and (not is_int(mask_token_id) or mask_token_id < 2):
            raise ConfigError(
                f"mask_token_id must be an integer of at least 2, got {mask_token_id!r}; leave it "
                "out for that of the target's config"
            )
        self.source, self.revision = str(source), revision
        self.mask_token_id = mask_token_id
        self._loaded: WeakKeyDictionary[PreTrainedModel, _Loaded] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """The last part of the folder's path or of the repository's id."""
        return self.source.rstrip("/").rpartition("/")[2]

    def __call__(self, setup: DrafterSetup) -> UnoDrafter:
        """Make the drafter of one call."""
        return UnoDrafter(self.layers_for(setup.target), self.noise_end(setup.target), setup)

    def layers_for(self, target: PreTrainedModel) -> LowRankLayers:
        """Return the adapter's layers for a target; load them on first use.

        Raises:
            ConfigError: the files cannot be loaded.
            UnsupportedModelError: the adapter is not a plain LoRA, or does not fit the target.
        """
        _check_target(target)
        form, peft = (dtype_of(target), device_of(target)), read_peft(target, self.source)
        stamps = file_stamps(self.source) if peft is None else peft.stamps
        key = self.source, self.revision, peft is None
        adapters = model_state(target).get(_LoadedAdapters, _LoadedAdapters)
        with adapters.lock:
            loaded = adapters.by_source.get(key)
            # Without stamps, the source is a Hub id, or its folder is gone.
            if loaded is None or loaded.form != form or (stamps and stamps != loaded.stamps):
                weights = peft or read_files(self.source, self.revision)
                layers = LowRankLayers(weights, target, self.name)
                if peft is None:
                    self._warn_of_base(weights.config.base_name, str(target.name_or_path))
                loaded = _Loaded(layers, form, stamps, peft)
            adapters.keep(key, loaded)
            self._loaded[target] = loaded
        return loaded.layers

    def noise_end(self, target: PreTrainedModel) -> int:
        """Return the id after the largest id of noise tokens."""
        mask_id: Any = self.mask_token_id
        if mask_id is None:
            mask_id = getattr(target.config.get_text_config(decoder=True), "mask_token_id", None)
        size = vocab_size_of(target)
        return min(mask_id, size) if is_int(mask_id) and mask_id > 1 else size

    def _warn_of_base(self, base_name: str, target_name: str) -> None:
        names = base_name, target_name
        if all(map(is_of_hub, names)) and not is_same_checkpoint(*names):
            warn_user(
                f"{self.name} is an adapter of {base_name}, and the target is {target_name}; "
                "drafts of another checkpoint than its own are rarely accepted"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "UnoAdapter":
        """Return the object itself, since `generate` copies a `GenerationConfig` in every call."""
        return self

    def __repr__(self) -> str:
        return f"UnoAdapter({self.source!r}, mask_token_id={self.mask_token_id})"


def _check_target(target: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if a target cannot draft for itself."""
    problems = []
    if target.config.is_encoder_decoder:
        problems.append("it has an encoder")
    if recurrent_cache(target) is not None:
        problems.append("noise would stay in its recurrent states")
    if tensor_parallel_size(target) > 1:
        problems.append("its linear layers are split over processes")
    if problems:
        raise UnsupportedModelError(
            "the target of a Uno adapter must be a decoder with attention layers only, whole in "
            f"every process, got {type(target).__name__}: {'; '.join(problems)}; use another draft"
        )
