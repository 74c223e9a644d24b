"""EAGLE-3 heads: equal drafts across formats, and logits of a cacheless float64 reference over forced rounds."""

from dataclasses import replace

import pytest
import torch

from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.types import SampleStrategy
from tests.draft.heads.designs import EAGLE3, NUM_TARGET_LAYERS, Design, make_weights, write_original, write_speculators
from tests.draft.heads.reference import Reference
from tests.draft.heads.rounds import Rounds, random_texts, target_of

TOLERANCE = 1e-9  # float64; sums over all pairs and over new ones round differently
K = 4

VARIANTS: dict[str, Design] = {
    "plain": EAGLE3,
    "own embeddings": replace(EAGLE3, has_embeddings=True),
    "whole vocabulary": replace(EAGLE3, draft_ids=None),
    "head norms": replace(EAGLE3, has_head_norms=True),
    "biases": replace(EAGLE3, has_bias=True),
    "norm_before_residual": EAGLE3.with_options(norm_before_residual=True),
    "norm_before_fc": EAGLE3.with_options(norm_before_fc=True, norm_before_residual=True),
    "EAGLE-3.1": EAGLE3.with_options(fc_norm=True, norm_output=True),
    "two layers": replace(EAGLE3, num_layers=2),
    "window": replace(EAGLE3, num_layers=2, layer_types=("sliding_attention", "full_attention"), sliding_window=4),
    "another width": replace(EAGLE3, hidden_size=16),
    "last layer": replace(EAGLE3, aux_layers=(0, 4, NUM_TARGET_LAYERS)),
    "two states": replace(EAGLE3, aux_layers=(2, 5)),
    "partial rotary": replace(EAGLE3, rope={"rope_theta": 1000.0, "partial_rotary_factor": 0.5}),
    "logit_scale": EAGLE3.with_options(logit_scale=0.5),
}


def reference_of(design, weights, target):
    tables = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return Reference(design, weights, *tables)


def assert_drafts_are_the_references(rounds, reference, draft, vocab_size, draft_ids):
    """The proposed distributions are the reference's, -inf outside of the draft vocabulary."""
    for row, text in enumerate(rounds.texts):
        drafted, num = draft.token_ids[row].tolist(), draft.token_ids.shape[1]
        logits = reference.logits(text, rounds.states(row), drafted, num)
        ids = list(range(vocab_size)) if draft_ids is None else list(draft_ids)
        expected = torch.full((num, vocab_size), -torch.inf, dtype=torch.float64)
        expected[:, ids] = logits
        torch.testing.assert_close(draft.token_logits[row], expected, rtol=0, atol=TOLERANCE)
        assert set(drafted) <= set(ids)


FORMATS = {
    "original": lambda folder, weights: write_original(folder, EAGLE3, weights),
    "original, bin": lambda folder, weights: write_original(folder, EAGLE3, weights, container="bin"),
    "original, sharded": lambda folder, weights: write_original(folder, EAGLE3, weights, container="sharded"),
    "original, model. in names": lambda folder, weights: write_original(
        folder, EAGLE3, {f"model.{name}": weight for name, weight in weights.items()}
    ),
    "original, ids of inputs nested": lambda folder, weights: nested(folder, weights, [3, 5, 6]),
    "original, ids of outputs nested": lambda folder, weights: nested(folder, weights, [1, 3, 5]),
    "original, no ids": lambda folder, weights: write_original(
        folder, EAGLE3, weights, eagle_aux_hidden_state_layer_ids=None
    ),
}


def nested(folder, weights, ids):
    fields = {
        "eagle_aux_hidden_state_layer_ids": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }
    return write_original(folder, EAGLE3, weights, **fields)


AUX_LAYERS = {  # where they are not those of the design
    "original, ids of inputs nested": (3, 5, 6),
    "original, ids of outputs nested": (2, 4, 6),
    "original, no ids": (2, NUM_TARGET_LAYERS // 2, NUM_TARGET_LAYERS - 3),
}


@pytest.mark.parametrize("name", FORMATS)
def test_equal_weights_draft_the_same_in_every_format(name, tmp_path):
    target, weights = target_of(), make_weights(EAGLE3)
    design = replace(EAGLE3, aux_layers=AUX_LAYERS.get(name, EAGLE3.aux_layers))
    expected = load_drafter(write_speculators(tmp_path / "speculators", design, weights), target)
    found = load_drafter(FORMATS[name](tmp_path / "original", weights), target)
    assert found.hidden_layers == design.aux_layers
    texts = random_texts([6, 4], seed=3)
    drafts = [Rounds(head, target, texts).draft(K, SampleStrategy.RANDOM) for head in (expected, found)]
    assert torch.equal(drafts[0].token_logits, drafts[1].token_logits)


def test_a_head_may_read_the_targets_last_state_alone(tmp_path):
    """As heads with use_aux_hidden_state false do: no fc, the state after the final norm."""
    design = replace(EAGLE3, aux_layers=(-1,)).with_options(use_aux_hidden_state=False)
    weights, target = make_weights(design), target_of()
    fields = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": False}}
    head = load_drafter(write_original(tmp_path, design, weights, **fields), target)
    assert head.hidden_layers == (-1,)
    rounds = Rounds(head, target, random_texts([5, 3], seed=4))
    draft = rounds.draft(K, SampleStrategy.RANDOM)
    assert_drafts_are_the_references(
        rounds, reference_of(design, weights, target), draft, design.vocab_size, design.draft_ids
    )
