"""Test that the table of `generate()` arguments is complete, and test its calls and its page."""

from functools import cache

import pytest
import torch
import transformers

import hf_speculate
from hf_speculate.config import FIELD_NAMES
from hf_speculate.generation import validate_call as calls
from tests.cases import assert_equal_ids
from tests.compatibility import (
    COMMAND,
    CONFIG_FIELDS,
    PAGE,
    SIGNATURE,
    WHERE,
    as_code,
    decode_plainly,
    decode_with_draft,
    models,
    pinned_version,
    refusal,
    render,
)
from tests.compatibility_rows import ARGUMENTS, FIELDS, LOCK_STEP, OWN_FIELDS

ROWS = (*ARGUMENTS, *FIELDS, *OWN_FIELDS)


def with_places(state, in_configs):
    """Pair each row in a state with a place for its name, taking turns between the places."""
    differences = [
        (row, in_configs if row.call.in_configs and row not in ARGUMENTS else WHERE[:1])
        for row in ROWS
        if row.state == state and row.call is not None
    ]
    return [
        pytest.param(row, where, id=f"{row.name}-{number}-{where}")
        for number, (row, places) in enumerate(differences)
        for where in (places[:1] if places == WHERE[:1] else [places[number % len(places)]])
    ]


def test_table_has_a_row_for_every_field_and_argument():
    arguments, fields, ours = (
        {row.name for row in rows} for rows in (ARGUMENTS, FIELDS, OWN_FIELDS)
    )
    served = calls._DECODER_KWARGS | calls._ENCODER_DECODER_KWARGS
    assert (fields, ours) == (set(CONFIG_FIELDS), set(FIELD_NAMES) - set(CONFIG_FIELDS))
    assert (SIGNATURE | served) - fields <= arguments


@pytest.mark.parametrize(("row", "where"), with_places("not supported", WHERE))
def test_refused_value_raises_the_message_of_the_page(row, where):
    def fail(*args):
        raise AssertionError("a model ran before the refusal")

    handles = [model.register_forward_pre_hook(fail) for model in models(row.call.family)[1:]]
    try:
        message = refusal(row.call, where)
    finally:
        for handle in handles:
            handle.remove()
    assert as_code(message) in PAGE.read_text(encoding="utf-8")


@cache
def plain_ids(number):
    """Return the ids from plain decoding, computed once for all places of a row."""
    return decode_plainly(ROWS[number].call)


@pytest.mark.fallback("eager forwards", "lock step", "no graphs")
@pytest.mark.parametrize(("row", "where"), with_places("supported", WHERE[:2]))
def test_supported_value_gives_the_text_of_plain_decoding(row, where):
    call, stats = row.call, hf_speculate.SpeculationStats()
    plain = plain_ids(ROWS.index(row))
    assert_equal_ids(plain, decode_with_draft(call, where, speculation_stats=stats))
    assert stats.num_rounds > 0
    assert stats.lock_step == (LOCK_STEP in row.note)
    if call.changes and where == "keyword":
        without = decode_plainly(call, without=row.name)
        assert plain.shape != without.shape or not torch.equal(plain, without), (
            "the value has no effect here"
        )


@pytest.mark.parametrize(("row", "where"), with_places("no effect", WHERE[:2]))
def test_inapplicable_value_changes_nothing(row, where):
    call, stats = row.call, hf_speculate.SpeculationStats()
    without = decode_plainly(call, without=row.name)
    assert_equal_ids(without, plain_ids(ROWS.index(row)))
    assert_equal_ids(without, decode_with_draft(call, where, speculation_stats=stats))
    assert stats.num_rounds > 0


@pytest.mark.fallback("lock step")
def test_page_equals_the_rendered_table():
    """Compare with the page of the pinned version. For other versions, compare only the names."""
    page = PAGE.read_text(encoding="utf-8")
    if transformers.__version__ == pinned_version():
        assert page == render(), f"docs/compatibility.md is out of date: run {COMMAND}"
    assert all(f"| `{row.name}` |" in page or f"| {row.name} |" in page for row in ROWS)
