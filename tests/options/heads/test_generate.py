"""Test heads of all kinds in `generate()`: plain text, and no trace of the drafts."""

import copy
import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import pipeline

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.tools.checks.layers import check_layers
from hf_speculate.types import SampleStrategy
from tests.cases import assert_decodes_as_plain, assert_equal_ids, each_value
from tests.compatibility_rows import CHARACTERS
from tests.generation.test_distribution import SIGNIFICANCE, draw, joint_distribution, p_value
from tests.options.heads.designs import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    MTP,
    NUM_TARGET_LAYERS,
    TARGET_WIDTH,
    VOCAB_SIZE,
    make_weights,
    write_speculators,
)
from tests.options.heads.kinds import KINDS
from tests.options.heads.reference import write_fitted
from tests.options.heads.rounds import PAD, BySum, Rounds, random_texts, target_of
from tests.options.heads.test_pard import write_pard
from tests.support.compiled_calls import compile_config
from tests.support.tiny import make_model, make_small_model, ragged_prompts
from tests.support.tiny_tokenizers import letters_tokenizer

NUM_NEW = 24
NUM_DRAWS = 8_000  # over 512 texts
NUM_DRAWN = 3  # tokens per text: the prompt's forward gives the first, and a round gives the others
SOME_IDS = tuple(index for index in range(VOCAB_SIZE) if index % 8)
FITTED = replace(
    EAGLE3, hidden_size=64, head_dim=16, draft_ids=SOME_IDS, aux_layers=(1, 3, NUM_TARGET_LAYERS)
)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Write a head fitted to the greedy texts of `prompts()` except some tokens; return both."""
    return write_fitted(tmp_path_factory.mktemp("head"), FITTED, target_of(), prompts(), NUM_NEW)


@pytest.fixture(scope="module")
def pair(fitted):
    """Return the enabled target and the head."""
    target = copy.deepcopy(target_of())
    return hf_speculate.enable(target), load_drafter(fitted[0], target)


def prompts(batch_size: int = 3):
    inputs = ragged_prompts(3, seed=0, vocab_size=VOCAB_SIZE)
    return {name: tensor[3 - batch_size :] for name, tensor in inputs.items()}


@each_value(kind=KINDS, batch_size=[1, 3])
def test_greedy_text_equals_plain_for_every_kind(kind, batch_size, tmp_path):
    head, target = KINDS[kind](tmp_path)
    options = {"max_new_tokens": NUM_NEW, "num_assistant_tokens": 3}
    stats = assert_decodes_as_plain(
        hf_speculate.enable(target), head, prompts(batch_size), **options
    )
    hf_speculate.disable(target)
    assert max(stats.rounds_by_draft_len) == 3


@pytest.mark.parametrize("design", [EAGLE3, DFLASH, MTP])
def test_head_reads_a_target_with_shared_keys(design, tmp_path):
    """Share keys between the last layers.

    The auxiliary layers of EAGLE-3 and DFlash include the first and the last of those layers.
    """
    layers = {
        "num_hidden_layers": NUM_TARGET_LAYERS,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }
    target = make_model(
        "gemma4", vocab_size=VOCAB_SIZE, hidden_size=TARGET_WIDTH, num_kv_shared_layers=3, **layers
    )
    head = load_drafter(write_speculators(tmp_path, design, make_weights(design)), target)
    assert_decodes_as_plain(hf_speculate.enable(target), head, prompts(), max_new_tokens=NUM_NEW)


def test_target_keeps_no_hook(pair):
    target, head = pair
    assert NUM_TARGET_LAYERS in head.hidden_layers
    before = len(target.model.layers[-1]._forward_hooks)
    with pytest.raises(ZeroDivisionError):
        target.generate(
            **prompts(),
            assistant_model=head,
            max_new_tokens=8,
            speculation_callback=lambda report: 1 / 0,
        )
    assert len(target.model.layers[-1]._forward_hooks) == before


@pytest.mark.parametrize(
    ("design", "verifier", "options"),
    [
        (EAGLE3, "rejection", {}),
        (DFLASH, "rejection", {"draft_sampling": "argmax"}),
        (DFLASH, "block", {}),
        *(
            (DFLASH2.with_options(selector_top_k=3), verifier, {})
            for verifier in ("rejection", "block", "coupled")
        ),
        (DSPARK, "coupled", {}),
    ],
)
def test_joint_distribution_is_exact_with_a_smaller_vocabulary(design, verifier, options, tmp_path):
    target = hf_speculate.enable(
        make_small_model(8, seed=0, dtype=torch.float32, num_hidden_layers=2)
    )
    fields = {
        "hidden_size": 16,
        "target_hidden_size": 16,
        "vocab_size": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
    }
    if design.kind != "dflash2":  # DFlash 2 proposes three of the 8 tokens
        fields["draft_ids"] = (1, 2, 3, 5, 6, 7)
    design = replace(design, **fields, aux_layers=(0, 1, 2))
    weights = make_weights(design, seed=1)
    if "lm_head.weight" in weights:
        weights["lm_head.weight"] /= 8  # flat enough that every token occurs
    head = load_drafter(write_speculators(tmp_path, design, weights), target)
    stats = hf_speculate.SpeculationStats()
    options |= {"num_assistant_tokens": 2, "max_new_tokens": NUM_DRAWN, "verifier": verifier}
    counts = draw(target, head, NUM_DRAWS, **options, speculation_stats=stats)
    assert p_value(counts, joint_distribution(target, NUM_DRAWN)) > SIGNIFICANCE
    assert min(stats.accepted_per_position) > 0


@pytest.mark.parametrize("form", [str, Path])
def test_head_is_loaded_by_name(form, pair, tmp_path):
    """Load the head in the first call and keep it with the target."""
    folder = write_speculators(tmp_path / "head", FITTED, make_weights(FITTED))
    for _ in range(2):
        assert (
            assert_decodes_as_plain(
                pair[0], form(folder), prompts(), max_new_tokens=NUM_NEW
            ).num_drafted
            > 0
        )
        shutil.rmtree(folder, ignore_errors=True)


def test_pipelines_accept_a_head(pair):
    target, head = pair
    make = {
        "task": "text-generation",
        "model": target,
        "tokenizer": letters_tokenizer(CHARACTERS[:VOCAB_SIZE]),
    }
    options, stats = {"max_new_tokens": 8, "do_sample": False}, hf_speculate.SpeculationStats()
    expected = pipeline(**make)("abc", **options)
    write = pipeline(**make, assistant_model=head)
    assert write("abc", **options, num_assistant_tokens=2, speculation_stats=stats) == expected
    assert stats.num_drafted > 0


@pytest.mark.parametrize(
    ("design", "cause"),
    [
        (FITTED, "it may read other layers"),
        (MTP, "it may belong to another target, or to weights that this one had"),
    ],
)
def test_low_first_token_acceptance_warns_once(pair, design, cause, tmp_path):
    """Count over several calls, because a schedule stops drafting early in a single call."""
    target, fitted = pair
    head = load_drafter(write_speculators(tmp_path, design, make_weights(design, seed=2)), target)
    options = {"max_new_tokens": 45, "num_assistant_tokens": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**prompts(), **options, assistant_model=head)
    with pytest.warns(
        UserWarning,
        match=f"fewer than 20% of the first tokens that .* drafted were accepted; {cause}",
    ):
        target.generate(**prompts(), **options, assistant_model=head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**prompts(), **options, assistant_model=head)
        for _ in range(2):
            target.generate(**prompts(), **options, assistant_model=fitted)


def test_options_unsupported_with_a_head_are_refused(pair, tmp_path):
    target, head = pair
    for draft_options in (
        {"prompt_lookup_num_tokens": 4},
        {"draft_state": hf_speculate.DraftState()},
    ):
        with pytest.raises(
            UnsupportedGenerationError,
            match=f"{next(iter(draft_options))} cannot be combined with a draft head",
        ):
            target.generate(**prompts(), assistant_model=head, **draft_options)
    other = hf_speculate.enable(
        make_model("llama", vocab_size=VOCAB_SIZE, hidden_size=TARGET_WIDTH)
    )
    with pytest.raises(
        UnsupportedModelError, match="it was loaded for 6 layers, and the target has 2"
    ):
        other.generate(**prompts(), assistant_model=head, max_new_tokens=4)


def test_default_number_of_tokens_bounds_the_adaptive_length(pair):
    # A new head has no estimates from other calls.
    target, head = pair[0], pair[1].with_layers(pair[1].hidden_layers)
    assert head.default_draft_tokens == 4
    stats = hf_speculate.SpeculationStats()
    target.generate(
        **prompts(), assistant_model=head, max_new_tokens=NUM_NEW, speculation_stats=stats
    )
    assert max(stats.rounds_by_draft_len) <= 4  # timings of tiny models decide whether it drafts
    assert "drafter: eagle3 head" in stats.plan
    assert "draft length: adaptive, at most 4;" in stats.plan


def decoded(target, head, **options):
    """Return ids and statistics."""
    stats = hf_speculate.SpeculationStats()
    options |= {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "speculation_stats": stats,
    }
    return target.generate(
        **prompts(), assistant_model=head, max_new_tokens=NUM_NEW, **options
    ), stats


class Overwriting(nn.Module):
    """Module that overwrites its input after reading it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, hidden_states, *args, **kwargs):
        states = hidden_states.clone()
        hidden_states.fill_(7)
        return self.module(states, *args, **kwargs)


@pytest.mark.parametrize("layers", [(0, 3, 5), (1, 3, NUM_TARGET_LAYERS)])
def test_states_are_read_before_the_target_overwrites_them(pair, tmp_path, layers):
    design, target = replace(FITTED, aux_layers=layers), copy.deepcopy(target_of())
    head = load_drafter(write_fitted(tmp_path, design, target, prompts(), NUM_NEW)[0], target)
    expected, before = decoded(hf_speculate.enable(target), head)
    decoder = target.get_decoder()
    decoder.layers, decoder.norm = (
        nn.ModuleList(map(Overwriting, decoder.layers)),
        Overwriting(decoder.norm),
    )
    found, after = decoded(target, head)
    assert_equal_ids(expected, found)
    assert after.accepted_per_position == before.accepted_per_position
    assert min(after.accepted_per_position) > 0


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "top_k": 0, "seed": 5}], ids=["greedy", "sampling"]
)
def test_compiled_rounds_equal_eager_rounds(pair, tmp_path, sampling):
    target, design = pair[0], replace(FITTED, aux_layers=(0, 3, 5))
    head = load_drafter(write_fitted(tmp_path, design, target, prompts(), NUM_NEW)[0], target)
    eager, before = decoded(target, head, **sampling)
    num_graphs = counters["stats"]["unique_graphs"]
    ids, after = decoded(target, head, **sampling, compile_config=compile_config())
    assert_equal_ids(eager, ids)
    assert counters["stats"]["unique_graphs"] > num_graphs
    assert (after.compiled, after.fallbacks) == (["target", "draft"], [])
    assert after.accepted_per_position == before.accepted_per_position
    assert min(after.accepted_per_position) > 0


@pytest.mark.fallback("eager forwards")
@pytest.mark.parametrize(
    "layer", [-1, NUM_TARGET_LAYERS], ids=["after the final norm", "before the final norm"]
)
def test_target_with_a_prenorm_state_read_stays_eager(pair, tmp_path, layer):
    target, design = pair[0], MTP if layer == -1 else replace(EAGLE3, aux_layers=(1, layer))
    head = load_drafter(write_speculators(tmp_path, design, make_weights(design)), target)
    ids, stats = decoded(target, head, compile_config=compile_config())
    assert_equal_ids(target.generate(**prompts(), max_new_tokens=NUM_NEW), ids)
    assert ("target" in stats.compiled) == (layer == -1)
    assert ("state before the final norm" in " ".join(stats.fallbacks)) == (layer != -1)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_layer_indices_off_by_one_are_found(fitted, is_wrong):
    (folder, texts), layers = fitted, tuple(layer - is_wrong for layer in FITTED.aux_layers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check = check_layers(
            load_drafter(folder, target_of(), aux_layers=layers), target_of(), texts, num_tokens=60
        )
    assert ["load it with aux_layers=[1, 3, 6]" in str(one.message) for one in caught] == [
        True
    ] * is_wrong
    assert (check.layers, check.best_layers) == (layers, FITTED.aux_layers)
    assert check.accuracies[int(is_wrong)] > 0.4
    assert 50 < check.num_tokens <= 60


def test_check_layers_needs_a_head_with_layers(fitted, tmp_path):
    write_pard(tmp_path)
    with pytest.raises(
        ConfigError, match="check_layers needs a head that reads the states of layers"
    ):
        check_layers(
            load_drafter(tmp_path, target_of()), target_of(), torch.ones(1, 9, dtype=torch.int64)
        )
    with pytest.raises(ConfigError, match="prompts must hold a text of at least three tokens"):
        check_layers(
            load_drafter(fitted[0], target_of()), target_of(), torch.ones(1, 2, dtype=torch.int64)
        )


def test_check_layers_of_a_head_is_deprecated(fitted):
    folder, texts = fitted
    head = load_drafter(folder, target_of())
    with pytest.warns(
        DeprecationWarning, match=r"call check_layers\(head, ...\) of hf_speculate.tools"
    ) as caught:
        check = head.check_layers(target_of(), texts, num_tokens=20)
    assert caught[0].filename == __file__
    assert check == check_layers(head, target_of(), texts, num_tokens=20)


K = 3
TOLERANCE = 1e-5  # MTP and PARD run layers of transformers, which compute norms in float32
LONG = 530  # tokens, more than a head reads in one forward


@pytest.fixture(scope="module", params=KINDS)
def loaded(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("head"))


def test_text_read_in_pieces_drafts_as_text_read_at_once(loaded):
    """Draft between the pieces, and go on after a row has left."""
    head, target = loaded
    texts = random_texts([LONG, 30, 40], seed=4)
    pieces = Rounds(head, target, [text[:20] for text in texts])
    for end in (21, LONG // 2, LONG):
        pieces.draft(K)
        pieces.texts = [text[:end] for text in texts]
        if end == 21:
            pieces.rows([2, 0])
            texts = [texts[2], texts[0]]
    at_once = Rounds(head, target, texts)
    at_once.num_rounds = pieces.num_rounds  # the noise depends on the round
    ours, theirs = (one.draft(K, SampleStrategy.RANDOM, seeds=[2, 0]) for one in (at_once, pieces))
    torch.testing.assert_close(ours.token_logits, theirs.token_logits, rtol=0, atol=TOLERANCE)


def recording(head, drafts):
    """Return a factory for drafters of the head that append every draft to a list."""

    def make(setup):
        drafter = head(setup)
        draft = drafter.draft
        drafter.draft = lambda request: drafts.append(draft(request)) or drafts[-1]
        return drafter

    return make


def test_chunked_prompt_gives_the_drafts_of_a_whole_one(loaded):
    """Cache the beginning of one prompt, which the head never reads: the text must be plain."""
    head, target = loaded[0], hf_speculate.enable(copy.deepcopy(loaded[1]))
    ids = torch.tensor(random_texts([9, 9], seed=5))
    expected, drafts = target.generate(ids, max_new_tokens=12), {}
    for name, options in {
        "whole": {},
        "chunks": {"prefill_chunk_size": 2},
        "prefix": {CACHE_NAME: None},
    }.items():
        if CACHE_NAME in options:
            options[CACHE_NAME] = target(ids[:, :5], use_cache=True)[CACHE_NAME]
        drafts[name] = []
        options |= {"drafter": recording(head, drafts[name]), "num_assistant_tokens": K}
        options |= {"num_assistant_tokens_schedule": "constant", "max_new_tokens": 12}
        assert_equal_ids(expected, target.generate(ids, **options))
    whole, chunks = (
        [draft.token_ids.tolist() for draft in drafts[name]] for name in ("whole", "chunks")
    )
    assert whole == chunks
    assert len(drafts["prefix"]) > 1


def test_processors_see_the_text_and_earlier_drafts(loaded):
    """Reject drafts in some rounds, and go on after a row has left."""
    head, target = loaded
    rounds = Rounds(
        head,
        target,
        random_texts([6, 4, 9], seed=6),
        processors=BlockLogitsProcessorList([BySum()]),
    )
    for number, accepted in enumerate([(0, 2, 1), (1, 0), (1, 2)]):
        draft = rounds.draft(2, SampleStrategy.RANDOM, seeds=range(len(accepted)))
        for text, num_pads, ids in zip(
            rounds.texts, rounds.pads, draft.token_ids.tolist(), strict=True
        ):
            read = sum(text) + len(text) + num_pads * (PAD + 1)
            assert ids == [read % VOCAB_SIZE, (read + read % VOCAB_SIZE + 1) % VOCAB_SIZE]
        rounds.accept(draft, accepted, seed=number)
        if number == 0:
            rounds.rows([0, 2])


@pytest.mark.parametrize("strategy", SampleStrategy)
def test_drafts_end_at_eos(loaded, strategy):
    head, target = loaded
    texts = random_texts([6, 4, 9], seed=7)
    whole = Rounds(head, target, texts).draft(K, strategy)
    ends = int(whole.token_ids[1, 1])
    draft = Rounds(head, target, texts, eos_token_ids=frozenset({ends})).draft(K, strategy)
    for row, ids in enumerate(whole.token_ids.tolist()):
        expected = ids.index(ends) + 1 if ends in ids else K
        assert draft.lens[row] == expected
        assert draft.token_ids[row, :expected].tolist() == ids[:expected]


def test_pickled_head_drafts_the_same_tokens(loaded):
    head, target = loaded
    texts, loaded_head = random_texts([6, 4], seed=8), pickle.loads(pickle.dumps(head))
    ours, theirs = (
        Rounds(one, target, texts).draft(K, SampleStrategy.RANDOM) for one in (head, loaded_head)
    )
    assert torch.equal(ours.token_logits, theirs.token_logits)
    assert loaded_head.network is not head.network


def test_copy_of_a_head_is_the_head_itself(pair):
    """Copy as `generate` copies, in every call, a `GenerationConfig` that contains the head."""
    _, head = pair
    assert copy.deepcopy(head) is head
