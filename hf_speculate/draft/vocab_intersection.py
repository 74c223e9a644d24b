"""Vocabulary intersection: the tokens that two tokenizers share, found once per pair."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_speculate.draft.vocab_mapping import NOT_ENCODED, VocabMapping, VocabTable
from hf_speculate.errors import UnsupportedModelError

# If less than this share of the smaller vocabulary is shared, hardly any word of a text is a single
# shared token, and the pair is most likely a mistake, such as a character tokenizer with a word
# tokenizer, or a different script. Above this share, the schedule stops drafting with pairs that
# gain nothing.
MIN_OVERLAP = 0.1

_WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's space
_BYTE_LEVEL_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
_NO_BYTE = 0xFFFF  # code of a character that stands for no byte
# Character of a byte-level vocabulary -> character whose code is the byte, for all 256 bytes.
_BYTES = dict.fromkeys(range(256), _NO_BYTE) | {
    ord(char): byte for byte, char in bytes_to_unicode().items()
}
_ROLES = ("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id")
_NUM_PROBES = 16

_Surface = bytes | str


class _Stamp(NamedTuple):
    """Fingerprint of a tokenizer object.

    It takes microseconds to compute and reveals whether the tokenizer has changed.
    """

    num_tokens: int
    roles: tuple[int | None, ...]  # the token ids by role, then the ids of all special tokens
    # tokens spread over the vocabulary, which differ if the tokenizer's model was replaced
    probes: tuple[str, ...]


@dataclass
class _Pair:
    """Vocabulary intersection of two tokenizer objects.

    It holds no references to the tokenizers.
    """

    stamps: tuple[_Stamp, _Stamp]
    probe_ids: tuple[list[int], list[int]]
    are_equal: bool
    # by the sizes of both models' tables: the mapping and the surfaces of the target's tokens
    tables: dict[tuple[int, int], tuple[VocabTable, "_Surfaces"]] = field(default_factory=dict)


_LOCK = threading.Lock()
_PAIRS: WeakKeyDictionary[
    PreTrainedTokenizerBase, WeakKeyDictionary[PreTrainedTokenizerBase, _Pair]
] = WeakKeyDictionary()


def are_equal(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> bool:
    """Return whether two tokenizers have the same ids for the same tokens.

    A pair of objects is compared once. It is compared again if tokens have been added, special
    tokens have been set, or one of the probed tokens has changed.
    """
    if target is draft:
        return True
    with _LOCK:
        return _pair(target, draft).are_equal


def intersect_vocabularies(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, num_target: int, num_draft: int
) -> VocabMapping:
    """Map tokens with the same text in both vocabularies, and encode all other tokens.

    Tokens are compared by their bytes and special tokens by their name. BOS, EOS and padding tokens
    are compared by their role. If the draft lacks a token, it reads the last token of its own
    encoding of that token's text. Replacing one token with one token keeps rows rectangular, and
    the next token depends most on the newest letters.

    Source:
        Token-level intersection: Timor et al. (arXiv:2502.05202), section 3.
    """
    with _LOCK:
        tables = _pair(target, draft).tables
        if (num_target, num_draft) not in tables:
            tables[num_target, num_draft] = _make_table(target, draft, num_target, num_draft)
        table, surfaces = tables[num_target, num_draft]
    return VocabMapping(table, partial(_last_tokens, target, draft, surfaces, num_draft))


def _pair(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> _Pair:
    pairs = _PAIRS.setdefault(target, WeakKeyDictionary())
    pair, both = pairs.get(draft), (target, draft)
    if pair is None or tuple(map(_stamp, both, pair.probe_ids)) != pair.stamps:
        probe_ids = _probe_ids(target), _probe_ids(draft)
        stamps = _stamp(target, probe_ids[0]), _stamp(draft, probe_ids[1])
        may_be_equal = stamps[0].num_tokens == stamps[1].num_tokens
        pair = _Pair(stamps, probe_ids, may_be_equal and target.get_vocab() == draft.get_vocab())
        pairs[draft] = pair
    return pair


def _probe_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    num_tokens = len(tokenizer)
    return sorted({num_tokens * probe // _NUM_PROBES for probe in range(_NUM_PROBES)})


def _stamp(tokenizer: PreTrainedTokenizerBase, probe_ids: list[int]) -> _Stamp:
    roles = *(getattr(tokenizer, role) for role in _ROLES), *tokenizer.all_special_ids
    return _Stamp(len(tokenizer), roles, tuple(tokenizer.convert_ids_to_tokens(probe_ids)))


@torch.inference_mode(False)  # later calls write the ids for tokens that the draft lacks
def _make_table(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, num_target: int, num_draft: int
) -> tuple[VocabTable, "_Surfaces"]:
    of_target = _Surfaces(target)
    target_surfaces = of_target.of_all(target.get_vocab(), num_target)
    draft_surfaces = _Surfaces(draft).of_all(draft.get_vocab(), num_draft)
    by_surface: dict[_Surface, int] = {}
    for draft_id, surface in draft_surfaces.items():
        by_surface.setdefault(surface, draft_id)
    shared: dict[int, int] = {}
    # Two target tokens with one draft token, such as a letter and its byte: the second one is fed
    # to the draft but never proposed.
    doubles: dict[int, int] = {}
    taken: set[int] = set()
    for target_id, surface in target_surfaces.items():
        if surface in by_surface:
            draft_id = by_surface[surface]
            (doubles if draft_id in taken else shared)[target_id] = draft_id
            taken.add(draft_id)
    num_smaller = max(min(len(target_surfaces), len(draft_surfaces)), 1)
    if len(shared) < MIN_OVERLAP * num_smaller or not shared:
        raise UnsupportedModelError(
            f"assistant_tokenizer must share at least {MIN_OVERLAP:.0%} of the smaller vocabulary "
            "with tokenizer, got "
            f"{len(shared)} of {num_smaller} tokens ({len(shared) / num_smaller:.1%}); "
            "use a draft whose tokenizer is nearer to the target's"
        )
    for role in ("eos_token_id", "bos_token_id", "pad_token_id"):
        target_id, draft_id = getattr(target, role), getattr(draft, role)
        are_ids = (
            None not in (target_id, draft_id) and target_id < num_target and draft_id < num_draft
        )
        if are_ids and target_id not in shared and draft_id not in taken:
            shared[target_id] = draft_id
            taken.add(draft_id)
    # The first of these that exists is fed for an id without text.
    stand_ins = (draft.unk_token_id, draft.pad_token_id, draft.eos_token_id)
    stand_in = next((int(id_) for id_ in stand_ins if id_ is not None and id_ < num_draft), 0)
    draft_ids = torch.full((num_target,), stand_in, device="cpu")
    draft_ids[torch.tensor(list(target_surfaces), device="cpu")] = NOT_ENCODED
    fed = doubles | shared
    draft_ids[torch.tensor(list(fed), device="cpu")] = torch.tensor(
        list(fed.values()), device="cpu"
    )
    is_shared = torch.zeros(num_target, dtype=torch.bool, device="cpu")
    is_shared[torch.tensor(list(shared), device="cpu")] = True
    return VocabTable(draft_ids, is_shared, stand_in=stand_in), of_target


class _Surfaces:
    """Surface of each token of a tokenizer.

    A surface is the bytes of the token's text, or the name of a special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        space_ids = tokenizer(" ", add_special_tokens=False)["input_ids"]
        self._mark = (tokenizer.convert_ids_to_tokens(space_ids) or [""])[0][:1]
        special = set(tokenizer.all_special_ids)
        # id -> whether the token is special, for special tokens and added tokens with literal text
        self._added = {id_: token.special for id_, token in tokenizer.added_tokens_decoder.items()}
        self._added |= dict.fromkeys(special, True)

    def of(self, token: str, token_id: int) -> _Surface:
        is_special = self._added.get(token_id)
        if is_special is not None:
            return token if is_special else token.encode()
        if self._mark == _WORD_MARK:
            is_byte = self._is_byte(token)
            return bytes.fromhex(token[3:5]) if is_byte else token.replace(_WORD_MARK, " ").encode()
        if self._mark == _BYTE_LEVEL_SPACE:
            try:
                return token.translate(_BYTES).encode("latin-1")
            except UnicodeEncodeError:  # a character stands for no byte
                return token.encode()
        return token.encode()

    def of_all(self, vocab: Mapping[str, int], num_ids: int) -> dict[int, _Surface]:
        """Return the surfaces of ids below `num_ids` by id, plain tokens before single bytes."""
        plain: dict[int, _Surface] = {}
        single_bytes: dict[int, _Surface] = {}
        has_bytes = self._mark == _WORD_MARK
        # Fast tokenizers return their vocabulary in no particular order.
        for token, token_id in sorted(vocab.items(), key=itemgetter(1)):
            if token_id < num_ids:
                is_byte = has_bytes and self._is_byte(token) and token_id not in self._added
                (single_bytes if is_byte else plain)[token_id] = self.of(token, token_id)
        return plain | single_bytes

    @staticmethod
    def _is_byte(token: str) -> bool:
        return len(token) == 6 and token.startswith("<0x")


def _last_tokens(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    of_target: _Surfaces,
    num_draft: int,
    target_ids: list[int],
) -> dict[int, int]:
    """Return the last token of the draft's encoding of each target token.

    Tokens without an encoding are left out.
    """
    tokens = zip(target.convert_ids_to_tokens(target_ids), target_ids, strict=True)
    surfaces = [of_target.of(token, target_id) for token, target_id in tokens]
    texts = [
        surface if isinstance(surface, str) else surface.decode(errors="replace")
        for surface in surfaces
    ]
    encoded = draft(texts, add_special_tokens=False)["input_ids"]
    rows = zip(target_ids, encoded, strict=True)
    return {target_id: ids[-1] for target_id, ids in rows if ids and ids[-1] < num_draft}
