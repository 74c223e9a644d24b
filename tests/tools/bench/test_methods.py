"""The names of methods, and what is read from a command line."""

import pytest

from hf_speculate import ConfigError
from hf_speculate.tools.bench.methods import (
    DraftLen,
    assisted_methods,
    our_methods,
    parse_draft_lens,
    parse_thresholds,
    threshold_methods,
)

LENS = [DraftLen(None, True), DraftLen(5, False)]


def test_numbers_of_tokens_are_read():
    lens = parse_draft_lens("3, adaptive,adaptive:16,3")
    assert lens == [DraftLen(3, False), DraftLen(None, True), DraftLen(16, True)]
    assert [one.label for one in lens] == ["K = 3", "adaptive", "adaptive up to 16"]
    assert [one.fields for one in lens] == [
        {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
        {"num_assistant_tokens_schedule": "adaptive"},
        {"num_assistant_tokens": 16, "num_assistant_tokens_schedule": "adaptive"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must name at least one number"),
        ("five", "a number, adaptive or adaptive:16, got 'five'"),
        ("adaptive:", "got 'adaptive:'"),
        ("5:6", "got '5:6'"),
        ("129", "num_assistant_tokens must be in 1..128"),
        ("0", "num_assistant_tokens must be in 1..128"),
        ("adaptive:0", "num_assistant_tokens must be in 1..128"),
    ],
)
def test_a_wrong_number_of_tokens_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_draft_lens(text)


def test_thresholds_are_read():
    assert parse_thresholds("0.05,0.2") == [0.05, 0.2]
    assert parse_thresholds("") == []
    for text, message in (("x", "--thresholds must be numbers"), ("1.5", r"posterior_threshold must be in \(0, 1\)")):
        with pytest.raises(ConfigError, match=message):
            parse_thresholds(text)


def test_every_verifier_meets_every_number_of_tokens():
    methods = our_methods(["greedy", "typical"], LENS, False, {"draft_sampling": "argmax"})
    names = ["greedy, adaptive", "greedy, K = 5", "typical, adaptive", "typical, K = 5"]
    assert [method.name for method in methods] == names
    assert [method.is_lossy for method in methods] == [False, False, True, True]
    assert [method.num_assistant_tokens for method in methods] == [None, 5, None, 5]
    assert methods[3].fields == {
        "verifier": "typical",
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "draft_sampling": "argmax",
    }


def test_alpha_goes_along_with_the_threshold_unless_it_is_set():
    def alphas(fields):
        methods = threshold_methods(["typical"], [0.04, 0.09, 0.25], LENS[1:], True, fields)
        return [method.fields["posterior_alpha"] for method in methods]

    assert alphas({}) == [0.2, 0.3, 0.5]
    assert alphas({"posterior_alpha": 0.6}) == [0.6] * 3


def test_assisted_generation_takes_its_defaults_and_the_first_constant_number():
    assert [method.name for method in assisted_methods([*LENS, DraftLen(8, False)], False)] == [
        "transformers, defaults",
        "transformers, K = 5",
    ]
    assert [method.name for method in assisted_methods(LENS[:1], False)] == ["transformers, defaults"]
