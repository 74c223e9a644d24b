"""Rounds of changing length, plain steps among them, decode what plain `generate` does."""

from tests.cases import Unchanged, assert_decodes_as_plain, each_value, pair
from tests.schedule.scripted import LENS
from tests.tiny import noisy_copy, ragged_prompts

NUM_NEW = 40
PROCESSED = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}


@each_value(options=[{}, PROCESSED], batch_size=[1, 3], kind=["llama", "mistral_window", "gpt2"])
def test_plain_steps_between_drafts_leave_greedy_text_as_it_is(scripted, kind, batch_size, options):
    stats = assert_decodes_as_plain(*pair(kind), ragged_prompts(batch_size, seed=3), max_new_tokens=NUM_NEW, **options)
    assert stats.rounds_by_draft_len[0] > 3
    assert stats.num_accepted > 0


@each_value(keeps_rows=[False, True], processors=[[], [], [Unchanged()]])
def test_rows_that_end_early_do_not_disturb_plain_steps(scripted, keeps_rows, processors):
    target, draft = pair("qwen2")
    inputs = ragged_prompts(4, seed=5)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    options = {"eos_token_id": [int(text[0, 1]), int(text[2, 7])], "pad_token_id": 0, "max_new_tokens": NUM_NEW}
    options |= {"return_dict_in_generate": keeps_rows, "logits_processor": processors}
    stats = assert_decodes_as_plain(target, draft, inputs, **options)
    if stats.lock_step:  # its rows count as one
        assert all(len(outcome.row_ids) == 1 and outcome.num_rows == 4 for outcome in scripted[0].outcomes)


def test_the_schedule_is_told_what_a_round_was(scripted):
    target, draft = pair("llama")
    target.generate(**ragged_prompts(1, seed=3), max_new_tokens=NUM_NEW, assistant_model=draft)
    outcomes = scripted[0].outcomes
    assert tuple(outcome.num_draft_tokens for outcome in outcomes[:5]) == LENS[:5]
    assert outcomes[0].num_fed == outcomes[2].num_fed == 0
    assert outcomes[1].num_fed > 3  # the prompt
    assert outcomes[4].num_fed in (3, 4)  # the round before emitted one token that was not read, or two; then two steps
    assert all(outcome.draft_s >= 0 and outcome.score_s > 0 and outcome.other_s > 0 for outcome in outcomes)


def test_adaptive_is_the_default_and_a_number_bounds_it():
    target = pair("llama")[0]
    draft = noisy_copy(target, 0.0).float()  # half the bytes
    for schedule, num, most in ((None, None, 10), ("adaptive", 3, 3)):
        options = {"num_assistant_tokens_schedule": schedule, "num_assistant_tokens": num, "max_new_tokens": 24}
        stats = assert_decodes_as_plain(target, draft, ragged_prompts(2, seed=3), **options)
        assert 0 < max(stats.rounds_by_draft_len) <= most
