"""Test drafts with another vocabulary, and the tokens that two tokenizers share."""

import copy
import gc
import time
import warnings
import weakref
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import (
    AssistedCandidateGeneratorDifferentTokenizers,
)

import hf_speculate
from hf_speculate.draft.vocab_intersection import are_equal, intersect_vocabularies
from hf_speculate.errors import UnsupportedModelError
from tests.cases import VERIFIERS, assert_decodes_as_plain, each_value
from tests.compatibility_rows import CHARACTERS
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value
from tests.support.tiny import make_model, make_small_model, noisy_copy, ragged_prompts
from tests.support.tiny_tokenizers import (
    WORD_MARK,
    byte_level_tokenizer,
    letters_tokenizer,
    metaspace_tokenizer,
)

NUM_DRAWS = 20_000  # drawn in one call
OURS = letters_tokenizer(CHARACTERS)


@pytest.fixture(scope="module")
def target():
    return hf_speculate.enable(make_model("llama"))


@pytest.fixture(scope="module")
def foreign(target):
    """Return a draft that has seven of eight letters in another order, and its tokenizer.

    The draft also has letters that the target lacks.
    """
    # target ids, indexed by draft id
    order = [index for index in range(63, -1, -1) if index % 8 != 5]
    tokens = [*(CHARACTERS[index] for index in order), *"?!;:-+"]
    draft = noisy_copy(make_model("llama", vocab_size=len(tokens)), 0.0)
    near = noisy_copy(target, 0.03)
    draft.model.load_state_dict(
        {**near.model.state_dict(), "embed_tokens.weight": draft.model.embed_tokens.weight}
    )
    draft.model.embed_tokens.weight[: len(order)] = near.model.embed_tokens.weight[order]
    draft.lm_head.weight[: len(order)] = near.lm_head.weight[order]
    return draft, letters_tokenizer(tokens)


def padded_draft(target, size: int):
    """Return a good draft of another size whose extra ids are the most probable ones."""
    draft, both = noisy_copy(target, 0.03), min(size, target.config.vocab_size)
    tables = [table.weight[:both].clone() for table in (draft.model.embed_tokens, draft.lm_head)]
    draft.resize_token_embeddings(size, mean_resizing=False)
    draft.lm_head.weight.normal_(std=30.0)
    for table, weight in zip((draft.model.embed_tokens, draft.lm_head), tables, strict=True):
        table.weight[:both] = weight
    return draft


@each_value(verifier=VERIFIERS, size=[72, 62])
def test_fault_d_padded_vocabulary_samples(target, size, verifier):
    """Sample with a draft of another size; transformers raises an AttributeError."""
    stats, inputs = hf_speculate.SpeculationStats(), ragged_prompts(3, seed=4)
    options = {
        "tokenizer": OURS,
        "assistant_tokenizer": OURS,
        "assistant_model": padded_draft(target, size),
    }
    options |= {**VERIFIERS[verifier], "max_new_tokens": 16, "num_assistant_tokens": 3}
    ours = target.generate(**inputs, **options, seed=[1, 2, 3], speculation_stats=stats)
    assert ours.max() < 64
    assert not stats.status  # the draft proposed no invalid id
    assert stats.num_accepted > 0
    alone = target.generate(
        **{name: value[1:2] for name, value in inputs.items()}, **options, seed=2
    )
    assert torch.equal(ours[1], alone[0])


@pytest.mark.parametrize(
    ("letters", "verifier"),
    [("abcdefgh???", "block"), ("hgfexyzda", "rejection"), ("hgfexyzda", "coupled")],
)
def test_draws_follow_the_target_distribution(letters, verifier):
    """Sample with a vocabulary padded to another size, and with a tokenizer of other letters."""
    target = hf_speculate.enable(make_small_model(8, seed=0, dtype=torch.float32))
    draft = make_small_model(len(letters), seed=1, sharpness=1.5, dtype=torch.float32)
    theirs = letters if len(set(letters)) == 9 else "abcdefgh"
    tokenizers = {
        "tokenizer": letters_tokenizer("abcdefgh"),
        "assistant_tokenizer": letters_tokenizer(theirs),
    }
    options = {
        "max_new_tokens": 3,
        "num_assistant_tokens": 2,
        "verifier": verifier,
        "top_k": 5,
        **tokenizers,
    }
    counts = draw(target, draft, NUM_DRAWS, **options)
    assert p_value(counts, joint_distribution(target, 3, top_k=5)) > SIGNIFICANCE


@each_value(batch_size=[1, 4], options=[{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}])
def test_greedy_text_with_another_tokenizer_equals_plain(target, foreign, batch_size, options):
    draft, theirs = foreign
    tokenizers = {"tokenizer": OURS, "assistant_tokenizer": theirs}
    inputs = ragged_prompts(batch_size, seed=5)
    stats = assert_decodes_as_plain(
        target, draft, inputs, max_new_tokens=32, **tokenizers, **options
    )
    assert stats.num_accepted > 0


def test_fault_e_draft_model_is_unchanged(target, foreign):
    """Sample, because transformers then replaces the draft's head and embeddings."""
    draft, theirs = foreign
    modules = [id(module) for module in draft.modules()]
    weights, config = copy.deepcopy(draft.state_dict()), draft.generation_config.to_dict()
    options = {
        "tokenizer": OURS,
        "assistant_tokenizer": theirs,
        "max_new_tokens": 8,
        "do_sample": True,
    }
    target.generate(**ragged_prompts(2, seed=7), assistant_model=draft, **options)
    assert [id(module) for module in draft.modules()] == modules
    assert all(torch.equal(weights[name], weight) for name, weight in draft.state_dict().items())
    assert draft.generation_config.to_dict() == config


def test_tokenizers_are_looked_up_in_local_files(target, tmp_path, monkeypatch):
    draft, looked_up, load = padded_draft(target, 72), [], AutoTokenizer.from_pretrained

    def watched(name, **options):
        looked_up.append((name, options["local_files_only"]))
        return load(name, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", watched)
    for name, letters in (
        ("ours", CHARACTERS),
        ("theirs", CHARACTERS),
        ("other", CHARACTERS[::-1]),
    ):
        letters_tokenizer(letters).save_pretrained(tmp_path / name)
        target.config.save_pretrained(tmp_path / name)
    monkeypatch.setattr(target, "name_or_path", str(tmp_path / "ours"))
    draft.name_or_path = str(tmp_path / "theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            target.generate(
                **ragged_prompts(1, seed=9),
                assistant_model=draft,
                num_assistant_tokens=2,
                max_new_tokens=3,
            )
    # Looked up once for all calls.
    assert looked_up == [(str(tmp_path / name), True) for name in ("ours", "theirs")]
    draft.name_or_path = str(tmp_path / "other")
    with pytest.raises(UnsupportedModelError, match="their tokenizers differ; pass tokenizer= and"):
        target.generate(**ragged_prompts(1, seed=9), assistant_model=draft, max_new_tokens=3)


@pytest.mark.parametrize("size", [72, 62])
def test_near_sizes_without_tokenizers_warn_once_of_padding(target, size):
    with pytest.warns(
        UserWarning, match=f"64 ids and the draft {size}; their tokenizers were not found"
    ) as caught:
        options = {"max_new_tokens": 20, "speculation_cache": "dynamic" if size == 62 else "auto"}
        stats = assert_decodes_as_plain(
            target, padded_draft(target, size), ragged_prompts(2, seed=10), **options
        )
    assert len(caught) == 1
    assert stats.verified_acceptance_rate > 0.3


@pytest.mark.parametrize(("size", "eos_token_id"), [(64 + 1025, None), (72, 5)])
def test_different_sizes_or_eos_ids_are_refused(target, size, eos_token_id):
    draft = make_model("llama", vocab_size=size)
    draft.generation_config.eos_token_id = eos_token_id
    with pytest.raises(
        UnsupportedModelError,
        match=f"got {size} tokens and their tokenizers were not found; pass tok",
    ):
        target.generate(**ragged_prompts(1, seed=11), assistant_model=draft)


def test_low_acceptance_over_calls_warns_once_with_both_names(target, monkeypatch):
    draft, good, prompts = (
        noisy_copy(target, 0.0),
        noisy_copy(target, 0.03),
        ragged_prompts(3, seed=13),
    )
    # Every drafted token is wrong, as with another vocabulary.
    draft.lm_head.weight.copy_(target.lm_head.weight.roll(1, 0))
    monkeypatch.setattr(target, "name_or_path", "the/target")
    draft.name_or_path = "the/draft"
    attributes = set(vars(target)), set(vars(draft))
    known = {"tokenizer": OURS, "assistant_tokenizer": OURS}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for assistant, draft_options in (
            (draft, known),
            (draft, known),
            (good, {}),
            (good, {}),
            (draft, {}),
        ):
            target.generate(
                **prompts,
                **draft_options,
                assistant_model=assistant,
                max_new_tokens=16,
                num_assistant_tokens=5,
            )
        # A call verifies 45 drafted tokens, and no pair warns before 64.
        assert not caught
        for _ in range(3):
            target.generate(
                **prompts, assistant_model=draft, max_new_tokens=16, num_assistant_tokens=5
            )
    (warning,) = caught
    assert "of the/target and the/draft have the same size but may differ" in str(warning.message)
    assert warning.filename == __file__
    assert (set(vars(target)), set(vars(draft))) == attributes


def test_transformers_universal_generator_gives_the_plain_text(target, foreign):
    draft, theirs = foreign
    tokenizers = {"target_tokenizer": OURS, "assistant_tokenizer": theirs}
    source = partial(
        AssistedCandidateGeneratorDifferentTokenizers, assistant_model=draft, **tokenizers
    )
    options = {"candidate_generator": source, "num_assistant_tokens": None, "max_new_tokens": 24}
    stats = assert_decodes_as_plain(target, None, ragged_prompts(1, seed=4), **options)
    assert 0 < stats.num_accepted < stats.num_verified


LETTERS = "abcdefghinrst"


def table(target, draft, num_target=None, num_draft=None):
    return intersect_vocabularies(target, draft, num_target or len(target), num_draft or len(draft))


def pairs_of(target, draft) -> dict[str, str]:
    """Return the tokens that two tokenizers share, spelled in both ways."""
    mapping = table(target, draft)
    ids = (
        mapping.table.is_shared.nonzero()[:, 0].tolist(),
        mapping.table.draft_ids[mapping.table.is_shared].tolist(),
    )
    return dict(
        zip(target.convert_ids_to_tokens(ids[0]), draft.convert_ids_to_tokens(ids[1]), strict=True)
    )


def test_spaces_and_bytes_of_all_formats_match():
    target = byte_level_tokenizer([" the", "ing", "é"])
    draft = metaspace_tokenizer([" the", " rain", "ing"], LETTERS + "é")
    pairs = pairs_of(target, draft)
    expected = {"Ġthe": f"{WORD_MARK}the", "Ġ": WORD_MARK, "ing": "ing"}
    # Two bytes and one letter; <0x61> is a byte token, so it does not spell the letter.
    expected |= {"Ã©": "é", "Ċ": "<0x0A>", "a": "a"}
    assert expected.items() <= pairs.items()
    assert pairs_of(draft, target) == {theirs: ours for ours, theirs in pairs.items()}


def test_special_tokens_pair_by_name_then_by_role():
    target = byte_level_tokenizer([], eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    draft = metaspace_tokenizer(
        [], LETTERS, eos_token="<|end|>", pad_token="<pad>", bos_token="</s>"
    )
    by_name = {"<pad>": "<pad>", "</s>": "</s>"}  # "</s>" has a different role in the draft
    assert by_name.items() <= pairs_of(target, draft).items()
    target = byte_level_tokenizer([], eos_token="</s>", pad_token="<pad>")
    draft = metaspace_tokenizer([], LETTERS, eos_token="<|end|>", pad_token="[PAD]")
    assert {"</s>": "<|end|>", "<pad>": "[PAD]"}.items() <= pairs_of(target, draft).items()


def test_special_token_does_not_match_its_name_as_text():
    target = letters_tokenizer(["a", "b", "#"], eos_token="#")
    draft = letters_tokenizer(["#", "a", "b"])
    assert pairs_of(target, draft) == {"a": "a", "b": "b"}


def test_missing_token_is_fed_as_the_end_of_its_text():
    target = byte_level_tokenizer(["string", " the"])
    draft = metaspace_tokenizer(["ring"], LETTERS + "g", pad_token="<pad>")
    mapping = table(target, draft)
    word = target.convert_tokens_to_ids("string")
    assert not mapping.table.is_shared[word]
    words = torch.tensor([[word, target.convert_tokens_to_ids("Ġthe")]])
    for _ in range(2):
        assert draft.convert_ids_to_tokens(mapping.encoded(words)[0]) == ["ring", "e"]


def test_token_without_text_is_fed_as_the_unknown_token():
    target = letters_tokenizer("abcd")
    draft = letters_tokenizer(["a", "b", "c", "?"], unk_token="?")
    mapping = table(target, draft, num_target=9)  # five ids are padding
    assert mapping.encoded(torch.arange(4, 9)).tolist() == [3] * 5
    assert not mapping.table.is_shared[4:].any()


def test_ids_past_the_embeddings_are_not_used():
    target, draft = letters_tokenizer("abcd"), letters_tokenizer("dcba")
    mapping = table(target, draft, num_target=3, num_draft=2)
    assert mapping.table.is_shared.tolist() == [False, False, True]
    assert mapping.encoded(torch.arange(3)).max() < 2


READING_S = 0.02


class CountingTokenizer(PreTrainedTokenizerFast):
    """Tokenizer that counts operations that are slow for large vocabularies."""

    num_read = num_encoded = 0

    def get_vocab(self):
        self.num_read += 1
        time.sleep(READING_S)
        return super().get_vocab()

    def __call__(self, text, **options):
        self.num_encoded += len(text) if isinstance(text, list) else 0
        return super().__call__(text, **options)


def counting(tokenizer):
    return CountingTokenizer(tokenizer_object=tokenizer.backend_tokenizer, padding_side="left")


def replace_model(tokenizer):
    tokenizer.backend_tokenizer.model = letters_tokenizer("dcbe").backend_tokenizer.model


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens(["da"]),
        lambda tokenizer: tokenizer.add_special_tokens({"eos_token": "a"}),
        replace_model,
    ],
    ids=["token added", "role given", "vocabulary replaced"],
)
def test_pair_is_compared_again_after_a_tokenizer_change_only(change):
    ours, theirs = counting(letters_tokenizer("abcd")), counting(letters_tokenizer("dcba"))
    first = table(ours, theirs)
    for _ in range(3):
        assert not are_equal(ours, theirs)
        assert table(ours, theirs).table is first.table
    num_read = ours.num_read, theirs.num_read
    assert max(num_read) <= 2
    change(theirs)
    assert not are_equal(ours, theirs)
    again = table(ours, theirs)
    assert again.table is not first.table
    assert ours.num_read > num_read[0] and theirs.num_read > num_read[1]


def test_vocabulary_is_read_and_tokens_encoded_once(target, foreign):
    ours, theirs = counting(OURS), counting(foreign[1])
    inputs = ragged_prompts(3, seed=5)
    options = {"assistant_model": foreign[0], "tokenizer": ours, "assistant_tokenizer": theirs}
    options |= {
        "max_new_tokens": 8,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
    }
    stats = hf_speculate.SpeculationStats()
    target.generate(**inputs, **options, speculation_stats=stats)
    assert stats.vocabulary_s >= 2 * READING_S
    counts = ours.num_read, theirs.num_read, theirs.num_encoded
    assert 0 < counts[2] < 8  # only those of the 8 missing tokens that have occurred
    target.generate(**inputs, **options)
    assert (ours.num_read, theirs.num_read, theirs.num_encoded) == counts


def test_tokenizers_are_not_kept_alive():
    target, draft = letters_tokenizer("abcd"), letters_tokenizer("dcba")
    assert not are_equal(target, draft)
    table(target, draft)
    references = [weakref.ref(target), weakref.ref(draft)]
    del target, draft
    gc.collect()
    assert [reference() for reference in references] == [None, None]
