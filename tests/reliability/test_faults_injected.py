"""An error raised anywhere in a call arrives as it is, with one note on where, and leaves nothing behind."""

import re
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import hf_speculate
from hf_speculate.engine.stage_clock import Stage, StageClock
from hf_speculate.models import attention_switch
from tests.cases import assert_equal_ids, pair
from tests.generation.test_ownership import assert_same_contents, cache_contents, prefilled
from tests.reliability.faults import ERRORS, Fault, Mistake, RowWiseProcessor, put_in
from tests.tiny import SLIDING_WINDOW, ragged_prompts

NUM_NEW = 10  # at most three tokens a round: round 3 comes after the first token and at most six more
NUM_AFTER = 6
NUM_HELD = SLIDING_WINDOW + 2  # tokens in a passed cache, more than a window
PROMPT, ROUND_1, ROUND_3, LATER = "$", ", round 1$", ", round 3$", r", round \d+$"
PREPARED, READ = "the call was prepared", "the target read the prompt"
DRAFTED, SCORED, VERIFIED = "tokens were drafted", "the target scored tokens", "tokens were verified"
REPORTED = "speculation_callback ran"
STOPS, HANDED_ON, OUTPUT = "stopping criteria ran", "tokens were handed on", "the output was put together"


class Case(NamedTuple):
    place: str
    at: int  # the call that fails
    note: str  # a pattern


# The target runs once for the prompt and once a round, a draft of two tokens twice a round.
FORWARDS = [
    Case("target forward", 1, READ + PROMPT),
    Case("target forward", 2, SCORED + ROUND_1),
    Case("target forward", 4, SCORED + ROUND_3),
    Case("target layer", 1, READ + PROMPT),
    Case("target layer", 4, SCORED + ROUND_3),
    Case("draft forward", 1, DRAFTED + ROUND_1),
    Case("draft forward", 2, DRAFTED + ROUND_1),
    Case("draft forward", 5, DRAFTED + ROUND_3),
]
USER_CODE = [
    Case("foreign processor", 1, VERIFIED + PROMPT),
    Case("foreign processor", 2, VERIFIED + ROUND_1),
    Case("foreign processor", 9, VERIFIED + LATER),
    Case("row-wise processor", 1, VERIFIED + PROMPT),
    Case("row-wise processor", 2, DRAFTED + ROUND_1),
    Case("row-wise processor", 4, VERIFIED + ROUND_1),
    Case("foreign criterion", 1, VERIFIED + PROMPT),
    Case("foreign criterion", 2, VERIFIED + ROUND_1),
    Case("foreign criterion", 9, VERIFIED + LATER),
    Case("row-wise criterion", 1, STOPS + PROMPT),
    Case("row-wise criterion", 2, STOPS + ROUND_1),
    Case("store reader", 1, DRAFTED + ROUND_1),
    Case("store add", 1, OUTPUT + LATER),
    Case("callback", 1, REPORTED + ROUND_1),
    Case("callback", 3, REPORTED + ROUND_3),
]
ONE_ROW = [
    Case("streamer put", 2, HANDED_ON + PROMPT),
    Case("streamer put", 3, HANDED_ON + ROUND_1),
    Case("streamer put", 8, HANDED_ON + LATER),
    Case("streamer end", 1, OUTPUT + LATER),
    Case("candidates", 1, DRAFTED + ROUND_1),
    Case("candidates", 4, DRAFTED + LATER),
]
PREALLOCATED = [
    Case("allocation", 1, READ + PROMPT),
    Case("allocation", 7, READ + PROMPT),
    Case("allocation", 9, DRAFTED + ROUND_1),
    Case("handing back", 1, OUTPUT + LATER),
    Case("handing back", 2, OUTPUT + LATER),
]


class Setup(NamedTuple):
    kind: str
    batch_size: int
    is_passed: bool
    cache_kind: str

    @property
    def options(self) -> dict[str, Any]:
        return {"speculation_cache": self.cache_kind}


SETUPS = [
    Setup("llama", 1, False, "auto"),
    Setup("llama", 1, True, "dynamic"),
    Setup("llama", 3, True, "preallocated"),
    Setup("llama", 3, False, "dynamic"),
    Setup("mistral_window", 1, True, "preallocated"),
    Setup("mistral_window", 3, True, "dynamic"),
]


def fits(case: Case, setup: Setup) -> bool:
    if case in ONE_ROW and setup.batch_size > 1:
        return False
    if case.place == "row-wise criterion" and setup.kind == "mistral_window":
        return False  # rows without an end go in lock step there, and the criterion is asked in another stage
    if case.place == "handing back":
        return setup.cache_kind == "preallocated" and setup.is_passed
    if case.place == "allocation":  # what a passed cache holds is loaded before the prompt is read
        return setup.cache_kind != "dynamic" and not setup.is_passed
    return True


def inputs_of(setup: Setup) -> dict[str, Any]:
    return ragged_prompts(setup.batch_size, seed=5, min_len=NUM_HELD + 2, max_len=NUM_HELD + 6)


def cache_of(setup: Setup) -> DynamicCache | None:
    if not setup.is_passed:
        return None
    target, _ = pair(setup.kind)
    return prefilled(target, *(part[:, :NUM_HELD] for part in inputs_of(setup).values()))


@cache
def text_after(setup: Setup) -> torch.Tensor:
    target, _ = pair(setup.kind)
    return target.generate(**inputs_of(setup), past_key_values=cache_of(setup), max_new_tokens=NUM_AFTER)


def configs(*models):
    return [(one.config.to_dict(), one.config._attn_implementation, one.generation_config.to_dict()) for one in models]


def assert_error_arrives_alone(case: Case, setup: Setup, error: BaseException) -> None:
    """One call that fails, everything it must leave, and the next call."""
    target, draft = pair(setup.kind)
    inputs, cache = inputs_of(setup), cache_of(setup)
    before = configs(target, draft), None if cache is None else cache_contents(cache)
    cause = error.__cause__ = ValueError("what came before")
    args, stats = error.args, hf_speculate.SpeculationStats()
    inside, options = put_in(case.place, Fault(case.at, error), target, draft)
    with inside, pytest.raises(type(error)) as caught:
        target.generate(
            **inputs, past_key_values=cache, max_new_tokens=NUM_NEW, speculation_stats=stats, **options, **setup.options
        )
    assert caught.value is error
    assert (error.args, error.__cause__) == (args, cause)
    (note,) = error.__notes__
    assert re.fullmatch(f"hf_speculate: raised while {case.note}", note), note
    assert configs(target, draft) == before[0]
    assert attention_switch._HOLDERS == {}
    assert "acceptance rate" in str(stats)
    if cache is not None:
        assert_same_contents(before[1], cache_contents(cache))
    store = options.get("suffix_store")
    again = {"prompt_lookup_num_tokens": 2, "suffix_store": store} if store else {"num_assistant_tokens": 2}
    ours = target.generate(
        **inputs, past_key_values=cache, max_new_tokens=NUM_AFTER, assistant_model=draft, **again, **setup.options
    )
    assert_equal_ids(text_after(setup), ours)


EVERY_CASE = [*FORWARDS, *USER_CODE, *ONE_ROW, *PREALLOCATED]


def numbered(number: int, case: Case) -> Any:
    """The case in one of the setups that it fits, with one class of errors: both take turns."""
    fitting = [setup for setup in SETUPS if fits(case, setup)]
    setup, name = fitting[number % len(fitting)], list(ERRORS)[number % len(ERRORS)]
    return pytest.param(case, setup, name, id=f"{case.place} {case.at}-{name}-{' '.join(map(str, setup))}")


@pytest.mark.parametrize(("case", "setup", "name"), [numbered(*one) for one in enumerate(EVERY_CASE)])
def test_an_error_arrives_as_it_is_and_leaves_nothing_behind(case, setup, name):
    assert_error_arrives_alone(case, setup, ERRORS[name]())


def test_an_error_of_a_call_inside_a_call_gets_one_note():
    target, draft = pair("llama")
    error = Mistake("on purpose")

    class Nesting(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            processors = [RowWiseProcessor(Fault(1, error))]
            target.generate(input_ids, assistant_model=draft, max_new_tokens=3, logits_processor=processors)

    with pytest.raises(Mistake) as caught:
        target.generate(
            torch.tensor([[5, 6]]),
            assistant_model=draft,
            max_new_tokens=3,
            stopping_criteria=StoppingCriteriaList([Nesting()]),
        )
    assert caught.value is error
    assert error.__notes__ == [f"hf_speculate: raised while {VERIFIED}"]


@pytest.mark.parametrize(
    ("notes", "stages", "found"),
    [
        (["their own"], [(Stage.SCORE, 4)], ["their own", f"hf_speculate: raised while {SCORED}, round 4"]),
        ([], [(Stage.RETURN, 4), (None,)], []),  # outside of ours
        ("no list", [(Stage.SCORE,)], "no list"),  # it cannot be noted, and arrives all the same
    ],
)
def test_a_note_is_added_to_the_users_own_where_a_stage_runs(notes, stages, found):
    clock, error = StageClock(), Mistake("on purpose")
    error.__notes__ = notes
    for stage in stages:
        clock.enter(*stage)
    with pytest.raises(Mistake) as caught, clock:
        raise error
    assert caught.value is error
    assert error.__notes__ == found


def test_a_refusal_gets_no_note_and_an_error_of_ours_in_a_round_gets_one():
    target, draft = pair("llama")
    with pytest.raises(hf_speculate.ConfigError) as refused:
        target.generate(torch.tensor([[5, 6]]), assistant_model=draft, do_sample=True, seed=[1, 2], max_new_tokens=3)
    assert not hasattr(refused.value, "__notes__")
    error = hf_speculate.ShapeError("on purpose")
    processors = [RowWiseProcessor(Fault(1, error))]
    with pytest.raises(hf_speculate.ShapeError):
        target.generate(torch.tensor([[5, 6]]), assistant_model=draft, max_new_tokens=3, logits_processor=processors)
    assert error.__notes__ == [f"hf_speculate: raised while {VERIFIED}"]


def test_preparing_that_fails_is_noted():
    target, draft = pair("llama")
    error = Mistake("on purpose")

    def make(**prepared):
        raise error

    with pytest.raises(Mistake) as caught:
        target.generate(torch.tensor([[5, 6]]), candidate_generator=make, max_new_tokens=3)
    assert caught.value is error
    assert error.__notes__ == [f"hf_speculate: raised while {PREPARED}"]
    assert_equal_ids(
        target.generate(torch.tensor([[5, 6]]), max_new_tokens=3),
        target.generate(torch.tensor([[5, 6]]), max_new_tokens=3, assistant_model=draft),
    )
