"""Test that verdicts on random rounds are well-formed."""

import pytest
import torch

from hf_speculate.kernels import Stream, sample
from tests.kernels.distributions import make_keys
from tests.kernels.operations import OPERATIONS, assert_well_formed, make_round

pytest.importorskip("hypothesis", reason="needs hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SPOILERS = [torch.nan, torch.inf, -torch.inf, 0.0, 6e4, -6e4]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_verdicts_are_well_formed(data: st.DataObject) -> None:
    num_rows, num_draft_tokens = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    vocab_size = data.draw(st.sampled_from([1, 2, 3, 17, 600, 4097]))
    target, ids, draft = make_round(
        num_rows, num_draft_tokens, vocab_size, seed=data.draw(st.integers(0, 99))
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    target, draft = target.to(dtype), draft.to(data.draw(st.sampled_from(DTYPES)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for tensor in (target, draft):
        entries = torch.rand(tensor.shape, generator=generator) < data.draw(
            st.sampled_from([0.0, 0.01, 1.0])
        )
        rows = torch.rand(tensor.shape[:2], generator=generator) < data.draw(
            st.sampled_from([0.0, 0.3])
        )
        tensor.masked_fill_(entries & rows.unsqueeze(-1), data.draw(st.sampled_from(SPOILERS)))
    strays = torch.randint(-3, vocab_size + 3, ids.shape, generator=generator)
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, strays, ids)
    ids = ids.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    lens = torch.randint(0, num_draft_tokens + 1, (num_rows,), generator=generator)
    keys = make_keys(num_rows, seed=data.draw(st.integers(-(2**63), 2**63 - 1)))
    for operation in OPERATIONS.values():
        verdict = operation(target, ids, draft, keys, lens)
        assert_well_formed(verdict, vocab_size, lens)
    drawn = sample(target[:, 0], keys=keys, stream=data.draw(st.sampled_from(list(Stream))))
    assert ((drawn.token_ids >= 0) & (drawn.token_ids < vocab_size)).all()
