"""Heads of all kinds but PARD and checkpoint MTP against the cacheless float64 reference over forced rounds."""

from dataclasses import replace

import pytest
import torch

from hf_speculate.draft.heads.kinds import HeadKind
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.draft.heads.load_dflash import read_dflash
from hf_speculate.draft.heads.load_network import ConfigSource
from hf_speculate.draft.heads.target_parts import TargetShape
from hf_speculate.types import SampleStrategy
from tests.draft.heads.designs import (
    DFLASH,
    DSPARK,
    EAGLE3,
    MTP,
    NUM_TARGET_LAYERS,
    PEAGLE,
    Design,
    layer_fields,
    make_weights,
    write_speculators,
    write_z_lab,
)
from tests.draft.heads.rounds import Rounds, random_texts, target_of
from tests.draft.heads.test_eagle3 import VARIANTS as EAGLE3_VARIANTS
from tests.draft.heads.test_eagle3 import assert_drafts_are_the_references, reference_of

K = 4
SOME_IDS = EAGLE3.draft_ids
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}

VARIANTS: dict[str, Design] = {
    **{f"EAGLE-3, {name}": design for name, design in EAGLE3_VARIANTS.items()},
    "P-EAGLE": PEAGLE,
    "P-EAGLE, fc_norm": PEAGLE.with_options(fc_norm=True, norm_before_residual=True),
    "DFlash": DFLASH,
    "DFlash, own tables": replace(DFLASH, draft_ids=SOME_IDS, has_embeddings=True),
    "DFlash, windows": replace(DFLASH, **MIXED),
    "DFlash, windows that see ahead": replace(DFLASH, **MIXED).with_options(sliding_window_non_causal=True),
    "DFlash, from the anchor": DFLASH.with_options(sample_from_anchor=True),
    "DSpark": DSPARK,
    "DSpark, some ids": replace(DSPARK, draft_ids=SOME_IDS),
    "DSpark, gated": DSPARK.with_options(markov_head_type="gated"),
    "DSpark, rnn": DSPARK.with_options(markov_head_type="rnn", sample_from_anchor=False),
    "MTP": MTP,
    "MTP of Llama": replace(MTP, has_head_norms=False),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_cacheless_reference(name, tmp_path):
    design, target = VARIANTS[name], target_of()
    weights = make_weights(design)
    head = load_drafter(write_speculators(tmp_path, design, weights), target)
    assert (head.spec.kind, head.spec.format) == (design.kind, "speculators")
    layers = (-1,) if design.kind == "mtp" else design.aux_layers
    assert head.default_draft_tokens == K
    assert head.hidden_layers == layers
    reference = reference_of(design, weights, target)
    rounds = Rounds(head, target, random_texts([7, 3, 2], seed=1))
    for number, accepted in enumerate([(2, 0, 4), (4, 1, 3), (0, 2, None), (1, 4, None)]):
        draft = rounds.draft(K, SampleStrategy.RANDOM)
        assert_drafts_are_the_references(rounds, reference, draft, design.vocab_size, design.draft_ids)
        rounds.accept(draft, accepted, seed=number)


def test_z_lab_and_speculators_draft_the_same(tmp_path):
    target, weights = target_of(), make_weights(DFLASH)
    folders = [
        write_speculators(tmp_path / "speculators", DFLASH, weights),
        write_z_lab(tmp_path / "z-lab", DFLASH, weights),
        write_z_lab(tmp_path / "encoder", DFLASH, _with_encoder_names(weights)),
    ]
    heads = [load_drafter(folder, target) for folder in folders]
    assert [head.hidden_layers for head in heads] == [DFLASH.aux_layers] * 3
    texts = random_texts([6, 4], seed=3)
    drafts = [Rounds(head, target, texts).draft(K, SampleStrategy.RANDOM).token_logits for head in heads]
    assert torch.equal(drafts[0], drafts[1])
    assert torch.equal(drafts[0], drafts[2])


def _with_encoder_names(weights):
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {names.get(name, name): weight for name, weight in weights.items()}


def test_without_ids_z_labs_states_are_spread_over_the_layers(tmp_path):
    design = replace(DFLASH, aux_layers=(2, NUM_TARGET_LAYERS - 2))
    folder = write_z_lab(tmp_path, design, make_weights(design), dflash_config={"mask_token_id": 3})
    assert load_drafter(folder, target_of()).hidden_layers == (2, NUM_TARGET_LAYERS - 2)


def test_z_labs_options_scale_logits_and_embeddings(tmp_path):
    target, weights = target_of(), make_weights(DFLASH)
    options = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 1.0}
    plain = load_drafter(write_z_lab(tmp_path / "plain", DFLASH, weights), target)
    design = DFLASH.with_options(**options)
    capped = load_drafter(write_z_lab(tmp_path / "capped", design, weights), target)
    texts = random_texts([6, 4], seed=3)
    before, after = (
        Rounds(head, target, texts).draft(K, SampleStrategy.RANDOM).token_logits for head in (plain, capped)
    )
    torch.testing.assert_close(after, 3 * torch.tanh(before * 0.5 / 3))


def test_a_mask_embedding_of_its_own_takes_the_place_of_the_mask_tokens(tmp_path):
    target, weights = target_of(), make_weights(DFLASH)
    given = target.get_input_embeddings().weight[DFLASH.options["mask_token_id"]].float()
    other = DFLASH.with_options(mask_token_id=7)
    heads = [
        load_drafter(write_z_lab(tmp_path / "plain", DFLASH, weights), target),
        load_drafter(write_z_lab(tmp_path / "own", other, {**weights, "mask_embedding": given}), target),
    ]
    texts = random_texts([6, 4], seed=3)
    drafts = [Rounds(head, target, texts).draft(K, SampleStrategy.RANDOM).token_logits for head in heads]
    torch.testing.assert_close(*drafts, rtol=0, atol=1e-5)  # the table rounded to float32


@pytest.mark.parametrize("reads_markov", [True, False])
def test_confidence_ends_drafts_where_the_product_of_estimates_falls_below(reads_markov, tmp_path):
    design = DSPARK.with_options(enable_confidence_head=True, confidence_head_with_markov=reads_markov)
    target, weights = target_of(), make_weights(design, seed=5)
    head = load_drafter(write_speculators(tmp_path, design, weights), target)
    reference = reference_of(design, weights, target)
    threshold = 0.2

    texts = random_texts([7, 3, 5, 9], seed=1)
    rounds = Rounds(head, target, texts, changes={"confidence_threshold": threshold})
    whole = Rounds(head, target, texts).draft(K)
    draft = rounds.draft(K)
    lens = []
    for row, text in enumerate(rounds.texts):
        estimates = reference.confidences(text, rounds.states(row), whole.token_ids[row].tolist(), K)
        lens.append(int((estimates.cumprod(0) >= threshold).sum()))
    assert len(set(lens)) > 1
    assert draft.lens.tolist() == lens
    assert draft.token_ids.shape[1] == max(lens)
    assert torch.equal(draft.token_ids, whole.token_ids[:, : max(lens)])


@pytest.mark.parametrize(("design", "most"), [(DFLASH, 4), (DSPARK, 5)], ids=["DFlash", "DSpark"])
def test_a_block_bounds_the_draft(design, most, tmp_path):
    target = target_of()
    head = load_drafter(write_speculators(tmp_path, design, make_weights(design)), target)
    assert head.spec.max_draft_tokens == most
    rounds = Rounds(head, target, random_texts([6, 4], seed=3))
    assert rounds.draft(16).token_ids.shape == (2, most)


def test_dspark_predicts_from_the_anchor_if_its_config_does_not_say():
    """As the trainers of both kinds do."""
    shape = TargetShape(24, NUM_TARGET_LAYERS, 32, "llama", "")
    fields = {"transformer_layer_config": layer_fields(DFLASH), "mask_token_id": 3, "aux_hidden_state_layer_ids": [1]}
    for kind, expected in (("dspark", True), ("dflash", False)):
        found = read_dflash(ConfigSource(fields, HeadKind(kind, "speculators"), "head", shape))
        assert found.options.samples_from_anchor is expected
        assert found.spec.max_draft_tokens == (8 if expected else 7)
