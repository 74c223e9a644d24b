"""Vocabulary mapping: which ids of a draft stand for which of the target, and a draft model that reads the latter."""

import threading
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_speculate.cache.base import KVCache
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.types import Scored

MAX_PADDING = 1024  # embedding tables are padded to multiples of 64 to 1,024 rows, for matrix kernels
# Below this share of the smaller vocabulary hardly a word of a text is one shared token, and the pair is most likely a
# mistake: characters beside words, or another script. What lies above and still does not pay, the schedule drops.
MIN_OVERLAP = 0.1

_WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's space
_BYTE_LEVEL_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"

_Surfaces = dict[int, bytes | str]


@dataclass(frozen=True)
class VocabMapping:
    """Which of a draft's ids stand for which of the target's."""

    draft_ids: Tensor  # [V] int64, by target id, what the draft is fed for it; every entry is an id of the draft
    is_shared: Tensor  # [V] bool, by target id, whether the draft may propose it; at least one is
    is_padded: bool = False  # whether ids mean the same on both sides, so that only the ends of the vocabularies differ

    def to(self, device: torch.device) -> "VocabMapping":
        return replace(self, draft_ids=self.draft_ids.to(device), is_shared=self.is_shared.to(device))

    def target_logits(self, logits: Tensor) -> Tensor:
        """The draft's logits [..., V'] in the target's ids [..., V]; what the draft cannot propose is -inf."""
        if self.is_padded:
            return _resized(logits, len(self.is_shared))
        return logits.index_select(-1, self.draft_ids).masked_fill(~self.is_shared, -torch.inf)


def padding_mapping(num_target: int, num_draft: int) -> VocabMapping:
    """The mapping of one tokenizer and two models whose tables end at different lengths."""
    ids = torch.arange(num_target, device="cpu")  # those of the target alone lie in the padding and are never read
    return VocabMapping(ids.clamp_max(num_draft - 1), ids < num_draft, is_padded=True)


_LOCK = threading.Lock()
# A pair's table takes a second for 150,000 ids, so it serves later calls; tokens that are added make another one.
_TABLES: WeakKeyDictionary[
    PreTrainedTokenizerBase, WeakKeyDictionary[PreTrainedTokenizerBase, tuple[tuple[int, int, int, int], VocabMapping]]
] = WeakKeyDictionary()


def intersect_vocabularies(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, num_target: int, num_draft: int
) -> VocabMapping:
    """The tokens that stand for the same text in both vocabularies, and what the draft is fed for the others.

    Tokens are compared by their bytes; special tokens by their name, and the end of a text, its beginning and padding
    by their role. A token that the draft lacks is fed to it as the last token of its own encoding of that text: one for
    one, so that rows stay rectangular, and the next token depends most on the newest letters.

    Source:
        Token-level intersection: Timor et al. (arXiv:2502.05202), section 3.
    """
    sizes = (len(target), len(draft), num_target, num_draft)
    with _LOCK:
        tables = _TABLES.setdefault(target, WeakKeyDictionary())
        if draft not in tables or tables[draft][0] != sizes:
            tables[draft] = sizes, _make_table(target, draft, num_target, num_draft)
        return tables[draft][1]


def _make_table(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, num_target: int, num_draft: int
) -> VocabMapping:
    target_surfaces, draft_surfaces = _surfaces(target, num_target), _surfaces(draft, num_draft)
    by_surface: dict[bytes | str, int] = {}
    for draft_id, surface in draft_surfaces.items():
        by_surface.setdefault(surface, draft_id)
    shared: dict[int, int] = {}
    doubles: dict[int, int] = {}  # a letter and the byte that spells it: the second is only fed
    taken: set[int] = set()
    for target_id, surface in target_surfaces.items():
        if surface in by_surface:
            draft_id = by_surface[surface]
            (doubles if draft_id in taken else shared)[target_id] = draft_id
            taken.add(draft_id)
    num_smaller = max(min(len(target_surfaces), len(draft_surfaces)), 1)
    if len(shared) < MIN_OVERLAP * num_smaller or not shared:
        raise UnsupportedModelError(
            f"assistant_tokenizer must share at least {MIN_OVERLAP:.0%} of the smaller vocabulary with tokenizer, got "
            f"{len(shared)} of {num_smaller} tokens ({len(shared) / num_smaller:.1%}); "
            "use a draft whose tokenizer is nearer to the target's"
        )
    for role in ("eos_token_id", "bos_token_id", "pad_token_id"):
        target_id, draft_id = getattr(target, role), getattr(draft, role)
        are_ids = None not in (target_id, draft_id) and target_id < num_target and draft_id < num_draft
        if are_ids and target_id not in shared and draft_id not in taken:
            shared[target_id] = draft_id
            taken.add(draft_id)
    stand_ins = (draft.unk_token_id, draft.pad_token_id, draft.eos_token_id)  # fed for an id without a text
    stand_in = next((int(id_) for id_ in stand_ins if id_ is not None and id_ < num_draft), 0)
    draft_ids = torch.full((num_target,), stand_in, device="cpu")
    lacking = {id_: surface for id_, surface in target_surfaces.items() if id_ not in shared and id_ not in doubles}
    fed = _last_tokens(draft, lacking, num_draft) | doubles | shared
    draft_ids[torch.tensor(list(fed), device="cpu")] = torch.tensor(list(fed.values()), device="cpu")
    is_shared = torch.zeros(num_target, dtype=torch.bool, device="cpu")
    is_shared[torch.tensor(list(shared), device="cpu")] = True
    return VocabMapping(draft_ids, is_shared)


def _surfaces(tokenizer: PreTrainedTokenizerBase, num_ids: int) -> _Surfaces:
    """What each id stands for: the bytes of its text, or a special token's name; plain tokens before single bytes."""
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids)
    space_ids = tokenizer(" ", add_special_tokens=False)["input_ids"]
    mark = (tokenizer.convert_ids_to_tokens(space_ids) or [""])[0][:1]
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}
    plain: _Surfaces = {}
    single_bytes: _Surfaces = {}
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= num_ids:
            continue
        if token_id in special or (token_id in added and added[token_id].special):
            plain[token_id] = token
        elif token_id in added:  # its text as it stands
            plain[token_id] = token.encode()
        elif mark == _WORD_MARK and len(token) == 6 and token.startswith("<0x"):
            single_bytes[token_id] = bytes.fromhex(token[3:5])
        elif mark == _WORD_MARK:
            plain[token_id] = token.replace(_WORD_MARK, " ").encode()
        elif mark == _BYTE_LEVEL_SPACE and of_character.keys() >= set(token):
            plain[token_id] = bytes(of_character[character] for character in token)
        else:
            plain[token_id] = token.encode()
    return plain | single_bytes


def _last_tokens(draft: PreTrainedTokenizerBase, lacking: _Surfaces, num_draft: int) -> dict[int, int]:
    """The last token of the draft's own encoding of each text, by target id; what it cannot encode is left out."""
    texts = [surface if isinstance(surface, str) else surface.decode(errors="replace") for surface in lacking.values()]
    if not texts:
        return {}
    encoded = draft(texts, add_special_tokens=False)["input_ids"]
    return {target_id: ids[-1] for target_id, ids in zip(lacking, encoded, strict=True) if ids and ids[-1] < num_draft}


class TranslatedLanguageModel(LanguageModel):
    """A draft model that reads and scores the target's ids; the model itself stays as it is."""

    def __init__(self, vocabulary: VocabMapping, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.vocabulary = vocabulary.to(self.device)

    def run(self, query_token_ids: Tensor, kv_cache: KVCache, **options: Any) -> Scored:
        """Query [B, Q] and logits [B, Q', V] are in the target's ids."""
        scored = super().run(self.vocabulary.draft_ids[query_token_ids], kv_cache, **options)
        return scored._replace(logits=self.vocabulary.target_logits(scored.logits))


@dataclass(frozen=True)
class DraftVocabulary:
    """Maps the columns of a draft's logits to ids of the target."""

    size: int | None = None  # V, of the target; None if logits have as many columns
    target_ids: Tensor | None = None  # [Vd] int64, those of the columns, increasing; None if column j is id j
    num_columns: int | None = None  # the first ones, which stand for ids of the target; None for all

    def resized(self, size: int) -> "DraftVocabulary":
        """The same for a target of V = `size` ids: those that it lacks are not proposed."""
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
        """[..., Vd'] of logits [..., Vd], without the columns of ids that the target lacks."""
        has_more = self.num_columns is not None and self.num_columns < logits.shape[-1]
        return logits[..., : self.num_columns] if has_more else logits

    def scattered(self, logits: Tensor) -> Tensor:
        """[..., V] from logits [..., Vd]: -inf at every id that the head cannot propose."""
        if self.size is None:
            return logits
        if self.target_ids is None:
            return _resized(logits, self.size)
        full = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        return full.index_copy_(-1, self.target_ids, self.cut(logits))


def _resized(logits: Tensor, size: int) -> Tensor:
    """[..., size] from logits of the first ids: a view or one operator."""
    lacking = size - logits.shape[-1]
    return logits[..., :size] if lacking <= 0 else torch.nn.functional.pad(logits, (0, lacking), value=-torch.inf)
