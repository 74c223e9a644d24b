"""Test drafts from draft models and early exits: their tokens, lengths and ends."""

import torch
from transformers import DynamicCache, TemperatureLogitsWarper, TopKLogitsWarper

import hf_speculate
from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.draft.base import DraftRequest
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.processors import BlockLogitsProcessorList
from tests.cases import ACCEPTED_ALL, each_value, pair
from tests.support.tiny import TINY_FAMILIES, make_model, ragged_prompts

VOCAB_SIZE = 64
K = 4
# sums are rounded to float32, whose resolution is 2e-6 at these magnitudes
FLOAT32_TOLERANCE = 1e-5


class Compares:
    """Verifier for drafts by the target itself.

    It asserts that the drafted tokens are the target's, and accepts part of each draft.
    """

    def __init__(self):
        self.batch_sizes, self.num_compared = [], 0

    def verify(self, target_logits, draft, keys):
        steps, best = torch.arange(draft.token_ids.shape[1]), target_logits.argmax(-1)
        counts = steps < draft.lens[:, None]  # [B, K]
        self.batch_sizes.append(len(counts))
        self.num_compared += int(counts.sum())
        if draft.token_logits is None:
            assert torch.equal(draft.token_ids[counts], best[:, :-1][counts])
        else:
            logits, sums = draft.token_logits[counts], draft.logsumexp[counts]
            torch.testing.assert_close(
                logits, target_logits[:, :-1][counts], rtol=0, atol=FLOAT32_TOLERANCE
            )
            torch.testing.assert_close(
                sums, logits.float().logsumexp(-1), rtol=0, atol=FLOAT32_TOLERANCE
            )
        accepted = steps < (best[:, :1] + keys.positions[:, None]) % (K + 1)
        return hf_speculate.keep_prefix(target_logits, draft, accepted, (best + 1) % VOCAB_SIZE)


SAMPLING = {
    "do_sample": True,
    "draft_sampling": "sample",
    "temperature": 0.6,
    "top_k": 5,
    "seed": 2,
}
PROCESSORS = {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2}


@each_value(
    family=[*TINY_FAMILIES, *TINY_FAMILIES],
    options=[{}, PROCESSORS, SAMPLING, PROCESSORS | SAMPLING],
    plain_steps=[False, True],
)
def test_draft_equal_to_its_target_drafts_the_target_tokens(
    family, options, plain_steps, registry, request
):
    """Cover rejections, acceptances, leaving rows and plain steps, past all windows."""
    if plain_steps:
        request.getfixturevalue("scripted")
    (target, draft), compares = pair(family, ACCEPTED_ALL), Compares()
    hf_speculate.register_verifier("compares", lambda config: compares, lossless=False)
    options = {**options, "verifier": "compares", "assistant_model": draft, "eos_token_id": [7, 19]}
    target.generate(
        **ragged_prompts(8, seed=4), **options, max_new_tokens=40, num_assistant_tokens=K
    )
    assert compares.num_compared > 50
    assert compares.batch_sizes[0] > compares.batch_sizes[-1]


def make_drafter(model, batch_size, attention_mask=None, processors=(), **settings):
    """Make a drafter and its cache."""
    block = BlockLogitsProcessorList(processors)
    drafter = ModelDrafter(Inferencer(LanguageModel(model)), block, DraftSettings(**settings))
    return drafter, DynamicKVCache(DynamicCache(), batch_size, attention_mask)


def greedy_draft(num, prompts, **options):
    """Return a Llama's draft and the number of tokens in its cache."""
    drafter, kv_cache = make_drafter(
        make_model("llama"), len(prompts["input_ids"]), prompts["attention_mask"], **options
    )
    return drafter.draft(DraftRequest(prompts["input_ids"], kv_cache, num)), max(
        kv_cache.num_real_tokens
    )


def test_drafting_ends_early_only_after_eos_in_every_row():
    prompts = ragged_prompts(3, seed=4)
    whole = greedy_draft(8, prompts)[0].token_ids
    all_meet, num_cached = greedy_draft(8, prompts, eos_token_ids=whole[:, 1])
    assert all_meet.token_ids.shape[1] == all_meet.lens.max() < 8
    assert num_cached == 12 + all_meet.token_ids.shape[1] - 1
    only_first = next(token for token in whole[0].tolist() if token not in whole[1:])
    one_meets, _ = greedy_draft(8, prompts, eos_token_ids=torch.tensor([only_first]))
    assert one_meets.token_ids.shape[1] == 8
    assert one_meets.lens[0] < 8
    assert one_meets.lens[1:].tolist() == [8, 8]


def test_confidence_is_that_of_the_processed_distribution():
    for processor, num in ((TopKLogitsWarper(1), 4), (TemperatureLogitsWarper(1e3), 1)):
        draft, _ = greedy_draft(
            4, ragged_prompts(2, seed=4), confidence_threshold=0.9, processors=[processor]
        )
        assert draft.lens.tolist() == [num, num]
        assert draft.token_ids.shape[1] == num
