"""Heads of all kinds but PARD and checkpoint MTP against the cacheless float64 reference over forced rounds."""

from dataclasses import replace

import pytest
import torch

from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.types import SampleStrategy
from tests.draft.heads.designs import (
    DFLASH,
    DSPARK,
    EAGLE3,
    MTP,
    PEAGLE,
    Design,
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


Z_LAB = {  # options of the folder, and the logits that it gives for those of the speculators format
    "z-lab": ({}, lambda logits: logits),
    "softcap": (
        {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 1.0},
        lambda logits: 3 * torch.tanh(logits * 0.5 / 3),
    ),
    "names of an encoder": ({}, lambda logits: logits),
    "mask embedding": ({"mask_token_id": 7}, lambda logits: logits),
}


@pytest.mark.parametrize("name", Z_LAB)
def test_z_lab_and_speculators_draft_the_same(name, tmp_path):
    target, weights = target_of(), make_weights(DFLASH)
    texts, (options, expected) = random_texts([6, 4], seed=3), Z_LAB[name]
    given = dict(weights)
    if name == "names of an encoder":
        given["encoder.fc.weight"], given["encoder.output_norm_enc.weight"] = (
            given.pop(old) for old in ("fc.weight", "hidden_norm.weight")
        )
    elif name == "mask embedding":  # takes the place of another token's
        given["mask_embedding"] = target.get_input_embeddings().weight[DFLASH.options["mask_token_id"]].float()
    folders = [
        write_speculators(tmp_path / "speculators", DFLASH, weights),
        write_z_lab(tmp_path / "z-lab", DFLASH.with_options(**options), given),
    ]
    heads = [load_drafter(folder, target) for folder in folders]
    assert [head.hidden_layers for head in heads] == [DFLASH.aux_layers] * 2
    plain, ours = (Rounds(head, target, texts).draft(16, SampleStrategy.RANDOM).token_logits for head in heads)
    assert plain.shape[1] == DFLASH.block_size - 1 == heads[0].spec.max_draft_tokens  # a block bounds the draft
    torch.testing.assert_close(ours, expected(plain), rtol=0, atol=1e-5)  # the table rounded to float32


@pytest.mark.parametrize("reads_markov", [True, False])
def test_confidence_ends_drafts_where_the_product_of_estimates_falls_below(reads_markov, tmp_path):
    design = DSPARK.with_options(enable_confidence_head=True, confidence_head_with_markov=reads_markov)
    target, weights = target_of(), make_weights(design, seed=5)
    head = load_drafter(write_speculators(tmp_path, design, weights), target)
    reference = reference_of(design, weights, target)
    threshold = 0.2

    texts = random_texts([7, 3, 5, 9], seed=1)
    assert head.spec.max_draft_tokens == DSPARK.block_size
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
