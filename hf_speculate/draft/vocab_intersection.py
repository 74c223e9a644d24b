"""Finds the tokens that two tokenizers share."""

import threading
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_speculate.draft.vocab_mapping import VocabMapping
from hf_speculate.errors import UnsupportedModelError

# Below this share of the smaller vocabulary hardly a word of a text is one shared token, and the pair is most likely a
# mistake: characters beside words, or another script. What lies above and still does not pay, the schedule drops.
MIN_OVERLAP = 0.1

_WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's space
_BYTE_LEVEL_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"

_Surfaces = dict[int, bytes | str]
_Sizes = tuple[int, int, int, int]

_LOCK = threading.Lock()
# A pair's table takes a second for 150,000 ids, so it serves later calls; tokens that are added make another one.
_TABLES: WeakKeyDictionary[
    PreTrainedTokenizerBase, WeakKeyDictionary[PreTrainedTokenizerBase, tuple[_Sizes, VocabMapping]]
] = WeakKeyDictionary()


def intersect_vocabularies(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, num_target: int, num_draft: int
) -> VocabMapping:
    """The tokens that stand for the same text in both vocabularies, and what the draft is fed for the others.

    Tokens are compared by their bytes, whichever way a tokenizer writes spaces and bytes; special tokens by their name,
    and the end of a text, its beginning and padding by their role. A token that the draft lacks is fed to it as the
    last token of its own tokenizer's encoding of that text: one for one, so that rows stay rectangular and roll back
    together, and the newest letters are the ones that the next token depends on most. Where there is no such encoding
    it is fed its unknown token. The target's distribution depends on neither.

    Source:
        Token-level intersection: Timor et al. (arXiv:2502.05202), section 3.
    """
    sizes = (len(target), len(draft), num_target, num_draft)
    with _LOCK:
        tables = _TABLES.setdefault(target, WeakKeyDictionary())
        held = tables.get(draft)
        if held is None or held[0] != sizes:
            held = sizes, _make_table(target, draft, num_target, num_draft)
            tables[draft] = held
    return held[1]


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
    for table in (_last_tokens(draft, lacking, num_draft), doubles, shared):
        places, ids = (
            torch.tensor(list(part), dtype=torch.int64, device="cpu") for part in (table.keys(), table.values())
        )
        draft_ids[places] = ids
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
    is_byte_level = mark == _BYTE_LEVEL_SPACE
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
        elif is_byte_level and of_character.keys() >= set(token):
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
