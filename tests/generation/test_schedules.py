"""Compare rounds with changing draft lengths, including lengths by row, with plain `generate`."""

import pytest
import torch
from transformers import GenerationConfig

import hf_speculate
from hf_speculate.errors import ConfigError
from tests.cases import Unchanged, assert_decodes_as_plain, assert_equal_ids, each_value, pair
from tests.schedule.scripted import LENS, ScriptedSchedule
from tests.support.tiny import noisy_copy, ragged_prompts

NUM_NEW = 40
PROCESSED = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}


@pytest.mark.fallback("lock step")
@each_value(
    family=["llama", "mistral_window", "gpt2", "qwen2"],
    batch_size=[1, 3, 4, 4, 3],
    options=[PROCESSED, {}, {"logits_processor": [Unchanged()]}, {}],
    keeps_rows=[False, False, False, True],
)
def test_plain_steps_between_drafts_keep_the_greedy_text(
    scripted, family, batch_size, options, keeps_rows
):
    target, draft = pair(family)
    inputs = ragged_prompts(batch_size, seed=5)
    text = target.generate(**inputs, max_new_tokens=NUM_NEW)[:, -NUM_NEW:]
    ends = (
        {"eos_token_id": [int(text[0, 1]), int(text[2, 7])], "pad_token_id": 0}
        if batch_size > 1
        else {}
    )
    options = {"max_new_tokens": NUM_NEW, "return_dict_in_generate": keeps_rows, **options, **ends}
    stats = assert_decodes_as_plain(target, draft, inputs, **options)
    assert stats.rounds_by_draft_len[0] > (1 if ends else 3)
    assert stats.num_accepted or stats.lock_step
    if stats.lock_step:  # the rows count as one
        assert all(
            len(outcome.rows) == 1 and outcome.num_rows == batch_size
            for outcome in scripted[0].outcomes
        )


@pytest.mark.parametrize("scripted", [(0, 3)], indirect=True)
@each_value(
    family=["llama", "gpt2", "falcon_h1"],
    own=[{}, {"prompt_lookup_num_tokens": 4}],
    options=[
        {},
        {"do_sample": True, "verifier": "coupled", "seed": 3},
        {"repetition_penalty": 1.3},
    ],
)
def test_rows_of_equal_length_stay_equal_in_a_probe(scripted, monkeypatch, family, own, options):
    monkeypatch.setattr(ScriptedSchedule, "is_trial", True)
    target, draft = pair(family)
    inputs, reports = ragged_prompts(3, seed=5), []
    draft = None if own else draft
    own = {"speculation_callback": reports.append, **own}
    assert_decodes_as_plain(target, draft, inputs, max_new_tokens=NUM_NEW, **own, **options)
    assert all(len(set(report.num_emitted)) == 1 for report in reports)
    assert any(max(report.num_accepted) > min(report.num_accepted) for report in reports)


def test_schedule_gets_the_outcome_of_every_round(scripted):
    target, draft = pair("llama")
    inputs = ragged_prompts(1, seed=3)
    draft_options = {"assistant_model": draft, "num_assistant_tokens": max(LENS)}
    target.generate(**inputs, max_new_tokens=NUM_NEW, **draft_options)
    outcomes, (prefill_s, num_read) = scripted[0].outcomes, scripted[0].prompt
    prompt_len = inputs["input_ids"].shape[1]
    assert prefill_s > 0
    assert num_read == prompt_len
    assert scripted[0].num_unread[:3] == [prompt_len + 1, prompt_len + 2, 1]
    assert [rows[0].num_left for rows in scripted[0].ahead][:2] == [NUM_NEW - 1, NUM_NEW - 2]
    assert sum(outcome.rows[0].num_emitted for outcome in outcomes) == NUM_NEW - 1
    assert tuple(outcome.num_draft_tokens for outcome in outcomes[:5]) == LENS[:5]
    assert outcomes[0].num_fed == outcomes[2].num_fed == 0
    assert outcomes[1].num_fed > 3  # includes the prompt
    # The previous round left one or two unread tokens. Two plain steps follow.
    assert outcomes[4].num_fed in (3, 4)
    assert all(
        outcome.draft_s >= 0 and outcome.score_s > 0 and outcome.other_s > 0 for outcome in outcomes
    )


def test_adaptive_default_is_bounded_by_a_number():
    target = pair("llama")[0]
    draft = noisy_copy(target, 0.0).float()  # half the bytes
    for schedule, num, max_len, cache_kind in (
        (None, None, 10, "auto"),
        ("adaptive", 3, 3, "dynamic"),
    ):
        options = {
            "num_assistant_tokens_schedule": schedule,
            "num_assistant_tokens": num,
            "max_new_tokens": 24,
        }
        inputs = ragged_prompts(2, seed=3)
        stats = assert_decodes_as_plain(
            target, draft, inputs, **options, speculation_cache=cache_kind
        )
        assert 0 < max(stats.rounds_by_draft_len) <= max_len


@pytest.mark.parametrize("own", [{}, {"assistant_early_exit": 1}])
def test_confidence_threshold_shortens_drafts_only(own):
    options = {"max_new_tokens": NUM_NEW, **ragged_prompts(2, seed=9)}
    target, draft = pair("llama")
    draft = None if own else draft
    sure, unsure = (
        assert_decodes_as_plain(
            target, draft, options, **own, assistant_confidence_threshold=threshold
        )
        for threshold in (None, 0.9)
    )
    assert unsure.num_drafted / unsure.num_rounds < sure.num_drafted / sure.num_rounds


LENS_OF_ROWS = [0, 2, 5]
LOCK_STEP = {"logits_processor": [Unchanged()]}


def decoded(family, lens, inputs, **options):
    """Return the new tokens and the statistics."""
    target, draft = pair(family)
    stats = hf_speculate.SpeculationStats()
    options = {"assistant_model": draft, "max_new_tokens": NUM_NEW, **options}
    draft_options = {} if lens is None else {"num_assistant_tokens": lens}
    output = target.generate(**inputs, **draft_options, speculation_stats=stats, **options)
    return output[:, inputs["input_ids"].shape[1] :], stats


@pytest.mark.fallback("lock step")
@pytest.mark.parametrize(
    ("family", "own", "options"),
    [
        ("llama", {}, {"eos_token_id": [5, 9]}),  # rows leave the batch
        ("llama", {}, LOCK_STEP),
        ("gpt2", {"assistant_model": None, "prompt_lookup_num_tokens": 4}, {}),
        ("mistral_window", {"prompt_lookup_num_tokens": 4}, {}),
        ("falcon_h1", {}, {}),
    ],
)
def test_greedy_rows_draft_at_most_their_number(family, own, options):
    inputs = ragged_prompts(3, seed=3)
    plain = pair(family)[0].generate(**inputs, max_new_tokens=NUM_NEW, **options)
    ours, stats = decoded(family, LENS_OF_ROWS, inputs, **own, **options)
    assert_equal_ids(plain[:, inputs["input_ids"].shape[1] :], ours)
    longest = own["prompt_lookup_num_tokens"] if "assistant_model" in own else max(LENS_OF_ROWS)
    max_lens = [0] * 3 if options is LOCK_STEP else [min(num, longest) for num in LENS_OF_ROWS]
    for drafted, rounds, num in zip(
        stats.drafted_per_row, stats.rounds_per_row, max_lens, strict=True
    ):
        assert drafted <= rounds * num
        assert (drafted > 0) == (num > 0)
    assert sum(stats.drafted_per_row) == stats.num_drafted
    assert sum(stats.accepted_per_row) == stats.num_accepted
    assert stats.num_accepted or options is LOCK_STEP


@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled", "typical"])
def test_sampled_rows_equal_calls_with_their_number(verifier):
    inputs = ragged_prompts(3, seed=4)
    options = {
        "do_sample": True,
        "verifier": verifier,
        "eos_token_id": [5, 9, 13, 21, 33, 47],
        "pad_token_id": 0,
    }
    ours, stats = decoded("llama", LENS_OF_ROWS, inputs, seed=[7, 8, 9], **options)
    assert stats.num_accepted > 0
    lens = []
    for row, num in enumerate(LENS_OF_ROWS):
        row_inputs = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        (alone,), _ = decoded("llama", num or [0], row_inputs, seed=[7 + row], **options)
        assert torch.equal(alone, ours[row, : len(alone)])
        lens.append(len(alone))
    assert len(set(lens)) > 1  # rows leave the batch


def test_list_in_a_config_applies_to_outputs_of_each_prompt():
    config = GenerationConfig(num_assistant_tokens=[0, 3, 2, 0], max_new_tokens=NUM_NEW)
    options = {"do_sample": True, "num_return_sequences": 2, "seed": [1, 2, 3, 4]}
    _, stats = decoded(
        "llama", None, ragged_prompts(2, seed=5), generation_config=config, **options
    )
    assert [num > 0 for num in stats.drafted_per_row] == [False, True, True, False]


def test_invalid_list_of_numbers_is_refused():
    for lens, draft_options, message in (
        ([1, 2], {}, "one int per output row, 3 of them, got 2"),
        ([1, 2, 129], {}, r"in 0..128 per output row, got \[1, 2, 129\]"),
        ([], {}, "a list of one number"),
        (
            [1, 2, 3],
            {"num_assistant_tokens_schedule": "adaptive"},
            "must be 'constant' with a number",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            decoded("llama", lens, ragged_prompts(3, seed=1), **draft_options)
