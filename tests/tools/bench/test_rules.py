"""Rules of quality as users write them, and what they let through."""

import math

import pytest

from hf_speculate import ConfigError
from hf_speculate.tools.bench.drift import Drift
from hf_speculate.tools.bench.rules import Rule, parse_rule

PLAIN = Drift(-100.0, 100, 100)


@pytest.mark.parametrize(
    ("text", "rule", "shown"),
    [
        ("exact", Rule(), "exact"),
        ("agreement>=0.95", Rule(0.95, None), "agreement >= 0.95"),
        ("agreement=0.95", Rule(0.95, None), "agreement >= 0.95"),
        ("drop <= 0.05", Rule(None, 0.05), "drop <= 0.05"),
        ("drop=5e-2,agreement=1", Rule(1.0, 0.05), "agreement >= 1, drop <= 0.05"),
    ],
)
def test_a_rule_is_read(text, rule, shown):
    assert parse_rule(text) == rule
    assert str(rule) == shown
    assert rule.is_exact is (text == "exact")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--quality must be exact, or bounds such as agreement>=0.95,drop<=0.05, got ''"),
        ("agreement", "got 'agreement'; quote > and <"),
        ("agreement<=0.9", "got 'agreement<=0.9'"),
        ("drop>=0.9", "got 'drop>=0.9'"),
        ("exact,drop=0.1", "got 'exact'"),
        ("drop=1e", "got 'drop=1e'"),
        ("agreement=1.5", r"agreement must be in \[0, 1\], got 1.5"),
        ("drop=-1", "drop must be >= 0"),
        ("drop=1e999", "drop must be >= 0"),
    ],
)
def test_what_is_no_rule_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_rule(text)


@pytest.mark.parametrize(
    ("rule", "drift", "do_sample", "complaint"),
    [
        (Rule(0.9), Drift(-900.0, 90, 100), False, ""),
        (Rule(0.9), Drift(-100.0, 89, 100), False, "agreement 0.890 < 0.9"),
        (Rule(None, 0.125), Drift(-112.5, 0, 100), False, ""),
        (Rule(None, 0.1), Drift(-112.0, 100, 100), False, "drop 0.120 > 0.1"),
        (Rule(None, 0.1), Drift(-50.0, 0, 100), False, ""),
        (Rule(None, 0.1), Drift(-50.0, 0, 100), True, "drop 0.500 > 0.1"),
        (Rule(None, 0.1), Drift(-math.inf, 0, 100), False, "drop inf > 0.1"),
        (Rule(None, 0.1), Drift(math.nan, 0, 100), False, "drop nan > 0.1"),
        (Rule(0.9, 0.1), Drift(-150.0, 95, 100), False, "drop 0.500 > 0.1"),
    ],
)
def test_a_bound_holds_for_the_text_of_a_method(rule, drift, do_sample, complaint):
    assert rule.complaint(drift, PLAIN, do_sample) == complaint
