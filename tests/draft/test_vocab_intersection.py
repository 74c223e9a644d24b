"""Which tokens two tokenizers share, and what is fed for the others."""

import gc
import weakref

from hf_speculate.draft.vocab_mapping import intersect_vocabularies
from tests.tiny_tokenizers import WORD_MARK, byte_level_tokenizer, letters_tokenizer, metaspace_tokenizer

LETTERS = "abcdefghinrst"


def table(target, draft, num_target=None, num_draft=None):
    return intersect_vocabularies(target, draft, num_target or len(target), num_draft or len(draft))


def pairs_of(target, draft) -> dict[str, str]:
    """The shared tokens, as each writes them."""
    found = table(target, draft)
    ids = found.is_shared.nonzero()[:, 0].tolist(), found.draft_ids[found.is_shared].tolist()
    return dict(zip(target.convert_ids_to_tokens(ids[0]), draft.convert_ids_to_tokens(ids[1]), strict=True))


def test_spaces_and_bytes_are_the_same_however_they_are_written():
    target = byte_level_tokenizer([" the", "ing", "é"])
    draft = metaspace_tokenizer([" the", " rain", "ing"], LETTERS + "é")
    pairs = pairs_of(target, draft)
    expected = {"Ġthe": f"{WORD_MARK}the", "Ġ": WORD_MARK, "ing": "ing"}
    expected |= {"Ã©": "é", "Ċ": "<0x0A>", "a": "a"}  # two bytes and a letter, what only bytes spell, not <0x61>
    assert expected.items() <= pairs.items()
    assert pairs_of(draft, target) == {theirs: ours for ours, theirs in pairs.items()}


def test_special_tokens_pair_by_name_then_by_role():
    target = byte_level_tokenizer([], eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    draft = metaspace_tokenizer([], LETTERS, eos_token="<|end|>", pad_token="<pad>", bos_token="</s>")
    by_name = {"<pad>": "<pad>", "</s>": "</s>"}  # the second has another role
    assert by_name.items() <= pairs_of(target, draft).items()
    target = byte_level_tokenizer([], eos_token="</s>", pad_token="<pad>")
    draft = metaspace_tokenizer([], LETTERS, eos_token="<|end|>", pad_token="[PAD]")
    assert {"</s>": "<|end|>", "<pad>": "[PAD]"}.items() <= pairs_of(target, draft).items()


def test_a_special_token_is_not_the_text_of_its_name():
    target = letters_tokenizer(["a", "b", "#"], eos_token="#")
    draft = letters_tokenizer(["#", "a", "b"])
    assert pairs_of(target, draft) == {"a": "a", "b": "b"}


def test_a_lacking_token_is_fed_as_the_end_of_its_text():
    target = byte_level_tokenizer(["string", " the"])
    draft = metaspace_tokenizer(["ring"], LETTERS + "g", pad_token="<pad>")
    found = table(target, draft)
    word = target.convert_tokens_to_ids("string")
    assert not found.is_shared[word]
    assert draft.convert_ids_to_tokens(int(found.draft_ids[word])) == "ring"
    assert draft.convert_ids_to_tokens(int(found.draft_ids[target.convert_tokens_to_ids("Ġthe")])) == "e"


def test_what_has_no_text_is_fed_as_the_unknown_token():
    target = letters_tokenizer("abcd")
    draft = letters_tokenizer(["a", "b", "c", "?"], unk_token="?")
    found = table(target, draft, num_target=9)  # five ids are padding
    assert found.draft_ids[4:].tolist() == [3] * 5
    assert not found.is_shared[4:].any()


def test_ids_past_a_model_are_not_used():
    target, draft = letters_tokenizer("abcd"), letters_tokenizer("dcba")
    found = table(target, draft, num_target=3, num_draft=2)
    assert found.is_shared.tolist() == [False, False, True]
    assert found.draft_ids.max() < 2


def test_a_pair_is_compared_once_until_a_token_is_added_and_no_tokenizer_is_kept():
    target, draft = letters_tokenizer("abcd"), letters_tokenizer("dcba")
    first = table(target, draft)
    assert table(target, draft) is first
    target.add_tokens(["da"])
    assert len(table(target, draft).is_shared) == 5
    references = [weakref.ref(target), weakref.ref(draft)]
    del target, draft
    gc.collect()
    assert [reference() for reference in references] == [None, None]
