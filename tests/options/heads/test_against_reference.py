"""Compare heads in every format with the cacheless float64 reference.

PARD and MTP layers of checkpoints have separate tests.
"""

from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessor

import hf_speculate
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.types import SampleStrategy
from tests.options.heads.designs import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    MTP,
    NUM_TARGET_LAYERS,
    PEAGLE,
    VOCAB_SIZE,
    Design,
    layer_fields,
    make_weights,
    write_original,
    write_speculators,
    write_z_lab,
)
from tests.options.heads.reference import Reference
from tests.options.heads.rounds import Rounds, random_texts, target_of

TOLERANCE = 1e-9  # float64; sums over all pairs round differently from sums over new pairs only
K = 4
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
VARIANTS: dict[str, Design] = {
    "EAGLE-3": EAGLE3,
    "own embeddings, biases": replace(EAGLE3, has_embeddings=True, has_bias=True),
    "whole vocabulary, head norms": replace(EAGLE3, draft_ids=None, has_head_norms=True),
    "norm_before_fc": EAGLE3.with_options(norm_before_fc=True, norm_before_residual=True),
    "EAGLE-3.1": EAGLE3.with_options(fc_norm=True, norm_output=True),
    "two layers, window": replace(EAGLE3, num_layers=2, **MIXED),
    "another width": replace(EAGLE3, hidden_size=16),
    "two states, last layer": replace(EAGLE3, aux_layers=(0, NUM_TARGET_LAYERS)),
    "the last state alone": replace(EAGLE3, aux_layers=(-1,)).with_options(
        use_aux_hidden_state=False, eagle_config={"use_aux_hidden_state": False}
    ),
    "partial rotary, scaled": replace(
        EAGLE3,
        rope={"rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        options={"logit_scale": 0.5},
    ),
    "P-EAGLE": PEAGLE.with_options(fc_norm=True, norm_before_residual=True),
    "DFlash": DFLASH,
    "DFlash, windows": replace(DFLASH, **MIXED),
    "DFlash, windows that see ahead": replace(DFLASH, **MIXED).with_options(
        sliding_window_non_causal=True
    ),
    "DFlash, own tables, from the anchor": replace(
        DFLASH, draft_ids=EAGLE3.draft_ids, has_embeddings=True
    ).with_options(sample_from_anchor=True),
    "DFlash 2, windows": replace(DFLASH2, **MIXED),
    "DFlash 2, two taps": DFLASH2.with_options(
        conv_kernel_size=2, conv_group_size=24, selector_top_k=VOCAB_SIZE
    ),
    "DFlash 2, own tables": replace(DFLASH2, hidden_size=16, has_embeddings=True),
    "DSpark, some ids": replace(DSPARK, draft_ids=EAGLE3.draft_ids),
    "DSpark, gated": DSPARK.with_options(markov_head_type="gated"),
    "DSpark, rnn": DSPARK.with_options(markov_head_type="rnn", sample_from_anchor=False),
    "MTP": MTP,
    "MTP of Llama": replace(MTP, has_head_norms=False),
}


def reference_of(design, weights, target):
    tables = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return Reference(design, weights, *tables)


def assert_drafts_are_the_references(rounds, reference, draft):
    """Compare the draft's logits, which are -inf outside the draft vocabulary."""
    vocab_size, draft_ids = reference.design.vocab_size, reference.design.draft_ids
    for row, text in enumerate(rounds.texts):
        drafted, num = draft.token_ids[row].tolist(), draft.token_ids.shape[1]
        logits = reference.logits(text, rounds.states(row), drafted, num)
        ids = list(range(vocab_size)) if draft_ids is None else list(draft_ids)
        expected = torch.full((num, vocab_size), -torch.inf, dtype=torch.float64)
        expected[:, ids] = logits
        torch.testing.assert_close(draft.token_logits[row], expected, rtol=0, atol=TOLERANCE)
        assert set(drafted) <= set(ids)


def assert_drafts_are_the_best(rounds, reference, draft):
    """Assert that without sampling, each token is the argmax of the reference."""
    ids = torch.tensor(reference.design.draft_ids or range(reference.design.vocab_size))
    for row, text in enumerate(rounds.texts):
        drafted = draft.token_ids[row].tolist()
        logits = reference.logits(text, rounds.states(row), drafted, draft.token_ids.shape[1])
        assert drafted == ids[logits.argmax(-1)].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_equal_the_cacheless_reference(name, tmp_path):
    design, target = VARIANTS[name], target_of()
    weights = make_weights(design)
    head = load_drafter(write_speculators(tmp_path, design, weights), target)
    assert (head.spec.kind, head.spec.format, head.default_draft_tokens) == (
        design.kind,
        "speculators",
        K,
    )
    assert head.hidden_layers == ((-1,) if design.kind == "mtp" else design.aux_layers)
    reference = reference_of(design, weights, target)
    rounds = Rounds(head, target, random_texts([7, 3, 2], seed=1))
    assert_drafts_are_the_best(rounds, reference, Rounds(head, target, rounds.texts).draft(K))
    for number, accepted in enumerate([(2, 0, 4), (4, 1, 3), (0, 2, None), (1, 4, None)]):
        draft = rounds.draft(K, SampleStrategy.RANDOM)
        assert_drafts_are_the_references(rounds, reference, draft)
        rounds.accept(draft, accepted, seed=number)
        if number == 1:
            # Plain steps, whose tokens are reported in the next round.
            rounds.texts = [[*text, 3, 7] for text in rounds.texts]
    rounds.rows([2, 0])
    draft = rounds.draft(K, SampleStrategy.RANDOM, seeds=[2, 0])
    assert_drafts_are_the_references(rounds, reference, draft)


# options of the folder, and its logits as a function of the logits in the speculators format
Z_LAB = {
    "z-lab": ({}, lambda logits: logits),
    "softcap": (
        {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 1.0},
        lambda logits: 3 * torch.tanh(logits * 0.5 / 3),
    ),
    "names of an encoder": ({}, lambda logits: logits),
    "mask embedding": ({"mask_token_id": 7}, lambda logits: logits),
}


@pytest.mark.parametrize("name", Z_LAB)
def test_z_lab_and_speculators_formats_draft_the_same(name, tmp_path):
    target, weights = target_of(), make_weights(DFLASH)
    texts, (options, expected) = random_texts([6, 4], seed=3), Z_LAB[name]
    given = dict(weights)
    if name == "names of an encoder":
        given["encoder.fc.weight"], given["encoder.output_norm_enc.weight"] = (
            given.pop(old) for old in ("fc.weight", "hidden_norm.weight")
        )
    elif name == "mask embedding":  # replaces the embedding of another token
        given["mask_embedding"] = (
            target.get_input_embeddings().weight[DFLASH.options["mask_token_id"]].float()
        )
    folders = [
        write_speculators(tmp_path / "speculators", DFLASH, weights),
        write_z_lab(tmp_path / "z-lab", DFLASH.with_options(**options), given),
    ]
    heads = [load_drafter(folder, target) for folder in folders]
    assert [head.hidden_layers for head in heads] == [DFLASH.aux_layers] * 2
    plain, ours = (
        Rounds(head, target, texts).draft(16, SampleStrategy.RANDOM).token_logits for head in heads
    )
    # a block bounds the draft length
    assert plain.shape[1] == DFLASH.block_size - 1 == heads[0].spec.max_draft_tokens
    # The table is rounded to float32.
    torch.testing.assert_close(ours, expected(plain), rtol=0, atol=1e-5)


def as_embeddings(weights):
    """Return the codebooks under the names of embeddings."""
    return {
        f"{name}.weight" if name.endswith("_codebook") else name: weight
        for name, weight in weights.items()
    }


ROTARY = {
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
DFLASH2_FOLDERS = {
    "block_size nested": lambda folder, weights: write_z_lab(
        folder, DFLASH2.with_options(block_size=DFLASH2.block_size), weights, block_size=None
    ),
    "block_size at the top": lambda folder, weights: write_z_lab(folder, DFLASH2, weights),
    "codebooks as embeddings": lambda folder, weights: write_z_lab(
        folder, DFLASH2, as_embeddings(weights)
    ),
    "sharded": lambda folder, weights: write_z_lab(
        folder, DFLASH2, weights, {"max_shard_size": 4096}
    ),
    "rotary of the target": lambda folder, weights: write_z_lab(folder, DFLASH2, weights, **ROTARY),
    "rotary of the target, nested": lambda folder, weights: write_speculators(
        folder, DFLASH2, weights, transformer_layer_config=layer_fields(DFLASH2) | ROTARY
    ),
}


@pytest.mark.parametrize("name", DFLASH2_FOLDERS)
def test_dflash_2_drafts_the_same_in_every_format_and_length(name, tmp_path):
    target, weights, texts = target_of(), make_weights(DFLASH2), random_texts([6, 4], seed=3)
    folders = [
        write_speculators(tmp_path / "speculators", DFLASH2, weights),
        DFLASH2_FOLDERS[name](tmp_path / "other", weights),
    ]
    heads = [load_drafter(folder, target) for folder in folders]
    assert {head.spec.kind for head in heads} == {"dflash2"}
    expected = Rounds(heads[0], target, texts).draft(16, SampleStrategy.RANDOM).token_logits
    assert expected.shape[1] == DFLASH2.block_size - 1  # a block bounds the draft length
    for num in (16, 2):  # the block is always filled completely
        found = Rounds(heads[1], target, texts).draft(num, SampleStrategy.RANDOM).token_logits
        torch.testing.assert_close(found, expected[:, :num], rtol=0, atol=TOLERANCE)


def without_effect(weights):
    """Return weights with neutral convolutions and no bonus from the previous token."""
    for name, weight in weights.items():
        if name.endswith("base_kernel"):
            weight.zero_()[:, 0] = 1
        elif name.endswith(("kernel_projection.weight", "successor_codebook")):
            weight.zero_()
    return weights


@pytest.mark.parametrize("num_candidates", [1, 5])
def test_dflash_2_without_its_additions_drafts_as_dflash(num_candidates, tmp_path):
    design, target = DFLASH2.with_options(selector_top_k=num_candidates), target_of()
    weights = without_effect(make_weights(design))
    own = ("candidate_selector", "_conv.")
    plain = {
        name: weight for name, weight in weights.items() if not any(word in name for word in own)
    }
    heads = [
        load_drafter(write_speculators(tmp_path / "2", design, weights), target),
        load_drafter(write_speculators(tmp_path / "1", DFLASH, plain), target),
    ]
    ours, theirs = (
        Rounds(head, target, random_texts([6, 4], seed=3)).draft(K).token_ids for head in heads
    )
    assert torch.equal(ours, theirs)


@hf_speculate.register_row_wise
class Bans(LogitsProcessor):
    """Processor that bans ids."""

    def __init__(self, token_ids):
        self.token_ids = token_ids

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, self.token_ids, -torch.inf)


@pytest.mark.parametrize("design", [EAGLE3, DFLASH2], ids=["EAGLE-3", "DFlash 2"])
def test_row_with_all_proposals_banned_ignores_processors(design, tmp_path):
    target, texts = target_of(), random_texts([6, 4], seed=3)
    head = load_drafter(write_speculators(tmp_path, design, make_weights(design)), target)
    expected = Rounds(head, target, texts).draft(K, SampleStrategy.RANDOM)
    proposed = expected.token_logits[0, 0].isfinite().nonzero()[:, 0]
    processors = BlockLogitsProcessorList([Bans(proposed)])
    draft = Rounds(head, target, texts, processors=processors).draft(K, SampleStrategy.RANDOM)
    # The logits are float32, as a processor returns them.
    assert torch.equal(draft.token_logits[0, 0], expected.token_logits[0, 0].float())
    assert draft.token_ids[0, 0] == expected.token_ids[0, 0]
    assert draft.logsumexp.isfinite().all()


@pytest.mark.parametrize("reads_markov", [True, False])
def test_drafts_end_where_the_confidence_product_is_low(reads_markov, tmp_path):
    design = DSPARK.with_options(
        enable_confidence_head=True, confidence_head_with_markov=reads_markov
    )
    target, weights = target_of(), make_weights(design, seed=5)
    head = load_drafter(write_speculators(tmp_path, design, weights), target)
    reference = reference_of(design, weights, target)
    threshold, texts = 0.2, random_texts([7, 3, 5, 9], seed=1)
    assert head.spec.max_draft_tokens == DSPARK.block_size
    rounds = Rounds(head, target, texts, confidence_threshold=threshold)
    whole = Rounds(head, target, texts).draft(K)
    draft = rounds.draft(K)
    lens = []
    for row, text in enumerate(rounds.texts):
        estimates = reference.confidences(
            text, rounds.states(row), whole.token_ids[row].tolist(), K
        )
        lens.append(int((estimates.cumprod(0) >= threshold).sum()))
    assert len(set(lens)) > 1
    assert draft.lens.tolist() == lens
    assert draft.token_ids.shape[1] == max(lens)
    assert torch.equal(draft.token_ids, whole.token_ids[:, : max(lens)])


def nested(ids):
    name = "eagle_aux_hidden_state_layer_ids"
    return {name: None, "eagle_config": {name: ids}}


# Prefix of the weight names, options for saving the weights, config fields, and the layers that are
# read.
FORMATS = {
    "bin": ("", {"safe_serialization": False}, {}, EAGLE3.aux_layers),
    "sharded": ("", {"max_shard_size": 4096}, {}, EAGLE3.aux_layers),
    "model. in names": ("model.", {}, {}, EAGLE3.aux_layers),
    "ids of inputs nested": ("", {}, nested([3, 5, 6]), (3, 5, 6)),
    "ids of outputs nested": ("", {}, nested([1, 3, 5]), (2, 4, 6)),
    "no ids": ("", {}, nested(None), (2, NUM_TARGET_LAYERS // 2, NUM_TARGET_LAYERS - 3)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_equal_weights_draft_the_same_in_every_format(name, tmp_path):
    target, weights, (prefix, saving, fields, layers) = (
        target_of(),
        make_weights(EAGLE3),
        FORMATS[name],
    )
    folder = write_speculators(
        tmp_path / "speculators", replace(EAGLE3, aux_layers=layers), weights
    )
    renamed = {prefix + own: weight for own, weight in weights.items()}
    original = write_original(tmp_path / "original", EAGLE3, renamed, saving, **fields)
    expected, found = load_drafter(folder, target), load_drafter(original, target)
    assert found.hidden_layers == layers
    texts = random_texts([6, 4], seed=3)
    drafts = [
        Rounds(head, target, texts).draft(K, SampleStrategy.RANDOM) for head in (expected, found)
    ]
    assert torch.equal(drafts[0].token_logits, drafts[1].token_logits)
