"""A DFlash assistant that transformers has a class for drafts here what it drafts there."""

import pytest
import torch
from transformers import GenerationMixin
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import hf_speculate
from hf_speculate.draft.heads.dflash import BlockDrafter
from hf_speculate.draft.heads.load import load_drafter
from tests.cases import assert_equal_ids
from tests.draft.heads.watching import watch_drafter, watch_generators
from tests.draft.test_from_state_reading_generator import BLOCK_SIZE, make_dflash
from tests.tiny import make_model, ragged_prompts

NUM_NEW = 24


@pytest.mark.parametrize("window", [8, 64])
def test_the_drafts_are_those_of_transformers(window, tmp_path, monkeypatch):
    # few tokens, that some drafts are right
    target = hf_speculate.enable(make_model("llama", vocab_size=6, num_hidden_layers=3))
    draft = make_dflash(target)
    draft.config.sliding_window = window
    for layer in draft.layers:
        layer.self_attn.sliding_window = window
    draft.save_pretrained(tmp_path)
    theirs = watch_generators(monkeypatch, DFlashTokenCandidateGenerator)
    ours = watch_drafter(monkeypatch, BlockDrafter)
    inputs = ragged_prompts(1, seed=3, min_len=11, max_len=11, vocab_size=6)  # longer than the window
    options = {"max_new_tokens": NUM_NEW}
    text = GenerationMixin.generate(target, **inputs, **options, assistant_model=draft, speculation_type="dflash")
    head = load_drafter(tmp_path, target)
    assert head.hidden_layers == (1, 2)
    assert head.spec.max_draft_tokens == BLOCK_SIZE - 1
    assert head.network.windows == (window + 1, window + 1)
    stats = hf_speculate.SpeculationStats()
    options |= {"assistant_model": head, "num_assistant_tokens": BLOCK_SIZE - 1, "speculation_stats": stats}
    assert_equal_ids(text, target.generate(**inputs, **options))
    num = min(len(ours), len(theirs)) - BLOCK_SIZE  # at the end of the text it may ask for more than we do
    assert num > 3
    assert ours[:num] == [ids for _, ids in theirs[:num]]
    assert torch.tensor(ours[:num]).unique().numel() > 2
    assert stats.num_accepted > 0
