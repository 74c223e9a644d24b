"""Draft by prompt lookup in the prompt and in outputs of earlier calls (suffix store)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_speculate.draft.prompt_lookup import PromptLookup
from hf_speculate.options.sources.suffix_store import SuffixStore


class StoredLookup(PromptLookup):
    """Prompt lookup with a suffix store.

    It also searches the store, and adds the call's outputs to it.
    """

    def __init__(self, store: SuffixStore):
        self.store = store

    def keep_row(self, token_ids: Sequence[int], prompt_ids: Callable[[], Sequence[int]]) -> None:
        self.store.add_output(prompt_ids(), token_ids)


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> StoredLookup:
    """Return the draft source for `prompt_lookup_num_tokens` with a `suffix_store`."""
    return StoredLookup(values["suffix_store"])
