"""Vocabulary mapping: the draft's ids for the target's ids, and a draft model that uses them."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.transfers import send
from hf_speculate.types import Scored

# Embedding tables are padded to a multiple of between 64 and 1,024 rows for matrix kernels.
MAX_PADDING = 1024
NOT_ENCODED = -1


@dataclass(frozen=True)
class DraftVocabulary:
    """Mapping from a draft's logit columns to target ids."""

    size: int | None = None  # V of the target; None if the logits have V columns
    # [Vd] int64, target id of each column, increasing; None if column j is id j
    target_ids: Tensor | None = None
    # number of leading columns that have target ids; None for all columns
    num_columns: int | None = None

    def resized(self, size: int) -> "DraftVocabulary":
        """Return the mapping for a target with V = `size` ids; larger ids are not proposed."""
        ids = self.target_ids
        if ids is None:
            return replace(self, size=size, num_columns=size)
        if self.size is not None and size >= self.size:
            return replace(self, size=size)
        ids = ids[ids < size]
        return DraftVocabulary(size, ids, len(ids))

    def ids(self, columns: Tensor) -> Tensor:
        return columns if self.target_ids is None else self.target_ids[columns]

    def cut(self, logits: Tensor) -> Tensor:
        """Slice logits [..., Vd] to [..., Vd'], without columns whose ids the target lacks."""
        has_more = self.num_columns is not None and self.num_columns < logits.shape[-1]
        return logits[..., : self.num_columns] if has_more else logits

    def scattered(self, logits: Tensor) -> Tensor:
        """Scatter logits [..., Vd] to [..., V], with -inf at ids that the draft cannot propose."""
        if self.size is None:
            return logits
        if self.target_ids is None:  # a view or one operator
            lacking = self.size - logits.shape[-1]
            padded = functools.partial(
                torch.nn.functional.pad, logits, (0, lacking), value=-torch.inf
            )
            return logits[..., : self.size] if lacking <= 0 else padded()
        full = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        return full.index_copy_(-1, self.target_ids, self.cut(logits))


class DeviceTable(NamedTuple):
    """Tables of a vocabulary mapping on the draft's device."""

    draft_ids: Tensor  # [V] int64, by target id; exact for shared tokens
    # [N] int64, the draft's ids of the shared tokens; None if these are its first N ids
    columns: Tensor | None
    vocabulary: DraftVocabulary  # vocabulary of the logits [..., N] in these columns


@dataclass(frozen=True, eq=False)
class VocabTable:
    """Mapping between two vocabularies, shared by calls."""

    # [V] int64 on the host, by target id: the id fed to the draft, or `NOT_ENCODED`
    draft_ids: Tensor
    # [V] bool on the host, by target id: whether the draft may propose it; True for at least one id
    is_shared: Tensor
    # whether ids have the same meaning in both, and only the ends of the vocabularies differ
    is_padded: bool = False
    stand_in: int = 0  # the draft's id for tokens without text
    lock: Any = field(default_factory=threading.Lock, repr=False)
    _on_device: dict[torch.device, DeviceTable] = field(
        default_factory=dict, init=False, repr=False
    )

    def on(self, device: torch.device) -> DeviceTable:
        """Return the tables on a device; they are copied to each device once."""
        with self.lock:
            if device not in self._on_device:
                self._on_device[device] = self._copied(device)
            return self._on_device[device]

    @torch.inference_mode(False)  # the copy serves calls in other modes, too
    def _copied(self, device: torch.device) -> DeviceTable:
        ids, size = self.draft_ids, len(self.draft_ids)
        on_device = send(torch.where(ids < 0, self.stand_in, ids), device)
        if self.is_padded:
            return DeviceTable(on_device, None, DraftVocabulary(size))
        target_ids = self.is_shared.nonzero()[:, 0]
        return DeviceTable(
            on_device,
            send(ids[target_ids], device),
            DraftVocabulary(size, send(target_ids, device)),
        )


@dataclass(frozen=True)
class VocabMapping:
    """Vocabulary mapping for one call, from the target's ids to the draft's ids."""

    table: VocabTable
    # returns the draft's ids for target ids that the draft lacks, possibly not for all of them;
    # called when such ids first occur; None if the draft lacks no id
    encode: Callable[[list[int]], dict[int, int]] | None = None

    def encoded(self, target_ids: Tensor) -> Tensor:
        """Map the target's ids [...] int64 to the draft's, both on the host."""
        table, ids = self.table, self.table.draft_ids[target_ids]
        if self.encode is None or not bool((ids < 0).any()):
            return ids
        with table.lock:
            lacking = target_ids[table.draft_ids[target_ids] < 0].unique().tolist()
            draft_ids = self.encode(lacking)
            values = [draft_ids.get(target_id, table.stand_in) for target_id in lacking]
            table.draft_ids[torch.tensor(lacking, dtype=torch.int64, device="cpu")] = torch.tensor(
                values, dtype=torch.int64, device="cpu"
            )
            return table.draft_ids[target_ids]


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def padding_mapping(num_target: int, num_draft: int) -> VocabMapping:
    """Return the mapping for one tokenizer and two models whose tables differ in length."""
    # The target's last ids are padding and are never read.
    ids = torch.arange(num_target, device="cpu")
    return VocabMapping(VocabTable(ids.clamp_max(num_draft - 1), ids < num_draft, is_padded=True))


class TranslatedLanguageModel(LanguageModel):
    """Draft model that reads and scores the target's ids.

    It scores only the shared ids; the model itself is unchanged. The tokens of the text are read on
    the host, where ids that the draft lacks are encoded when they first occur. Drafted tokens are
    always shared tokens, and they stay on the device.
    """

    def __init__(self, mapping: VocabMapping, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._mapping, self._table = mapping, mapping.table.on(self.device)
        # whether the tokens of the text must be read on the host
        self.encodes = mapping.encode is not None

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The target ids of the logit columns."""
        return self._table.vocabulary

    def run(self, query_token_ids: Tensor, kv_cache: KVCache, **options: Any) -> Scored:
        """Score a query [B, Q] given in the target's ids.

        The logits are [B, Q', N] over the tokens in `vocabulary`.
        """
        if query_token_ids.device.type == "cpu":
            draft_ids = send(self._mapping.encoded(query_token_ids), self.device)
        else:
            draft_ids = self._table.draft_ids[query_token_ids]
        scored = super().run(draft_ids, kv_cache, **options)
        logits, columns = scored.logits, self._table.columns
        shared = (
            logits[..., : self.vocabulary.size]
            if columns is None
            else logits.index_select(-1, columns)
        )
        return scored._replace(logits=shared)
