"""Test verifiers, their registry and `keep_prefix`."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hf_speculate
from hf_speculate.config import SpeculationConfig
from hf_speculate.errors import ConfigError
from hf_speculate.types import DraftOut, NoiseKeys, Status, Stream, Verdict
from hf_speculate.verify import (
    BlockVerifier,
    CoupledVerifier,
    GreedyVerifier,
    RejectionVerifier,
    TypicalVerifier,
    Verifier,
    keep_prefix,
    register_verifier,
)
from hf_speculate.verify.base import is_lossless, make_verifier
from tests.cases import ACCEPTED_ALL, assert_equal_ids, each_value, pair
from tests.kernels import distributions
from tests.support.tiny import ragged_prompts

VOCAB_SIZE = 11
make_keys = partial(distributions.make_keys, seed=5, rounds=2, positions=9)
CERTAIN = 60.0  # a logit this far above the others leaves them a probability of 0 in float32


def make_round(
    batch_size: int, num_drafted: int, *, has_logits: bool, lens: list[int] | None = None
) -> tuple[Tensor, DraftOut]:
    """Return random target logits [B, K+1, V], and a draft with about half of their argmaxes."""
    make = torch.Generator().manual_seed(batch_size + 10 * num_drafted)
    target = 3 * torch.randn(batch_size, num_drafted + 1, VOCAB_SIZE, generator=make)
    drafted = target[:, :-1] + 2 * torch.randn(batch_size, num_drafted, VOCAB_SIZE, generator=make)
    counts = torch.tensor([num_drafted] * batch_size if lens is None else lens, dtype=torch.int32)
    logits, sums = (drafted, drafted.logsumexp(-1)) if has_logits else (None, None)
    return target, DraftOut(drafted.argmax(-1), counts, logits, sums)


def assert_whole(verdict: Verdict, draft: DraftOut) -> None:
    """Assert that a verdict on a round without bad input is well-formed."""
    batch_size, num_drafted = draft.token_ids.shape
    assert verdict.token_ids.shape == (batch_size, num_drafted + 1)
    assert verdict.token_ids.dtype == torch.int64
    assert verdict.num_accepted.shape == verdict.status.shape == (batch_size,)
    assert (
        verdict.num_accepted.dtype
        == verdict.status.dtype
        == verdict.num_emitted.dtype
        == torch.int32
    )
    assert torch.equal(verdict.num_emitted, verdict.num_accepted + 1)
    assert ((verdict.num_accepted >= 0) & (verdict.num_accepted <= draft.lens)).all()
    assert (verdict.status == 0).all()
    for ids, drafted, num in zip(
        verdict.token_ids, draft.token_ids, verdict.num_accepted.tolist(), strict=True
    ):
        assert torch.equal(ids[:num], drafted[:num])
        assert 0 <= ids[num] < VOCAB_SIZE
        assert (ids[num + 1 :] == -1).all()


class VerifierContract:
    """Contract for every verifier.

    A subclass makes the verifier and names the fields of the keys that its draws depend on.
    """

    reads_keys: tuple[str, ...] = ()

    def make(self) -> Verifier:
        raise AssertionError("a subclass makes the verifier")

    @each_value(has_logits=[True, False], num_drafted=[1, 4], batch_size=[1, 64])
    def test_verdict_is_accepted_ids_then_one_more_then_padding(
        self, has_logits, num_drafted, batch_size
    ):
        target, draft = make_round(batch_size, num_drafted, has_logits=has_logits)
        verdict = self.make().verify(target, draft, make_keys(batch_size))
        assert_whole(verdict, draft)
        if batch_size > 1:
            assert len(verdict.num_accepted.unique()) == num_drafted + 1

    def test_certain_tokens_are_accepted_up_to_the_draft_length(self):
        target, draft = make_round(5, 4, has_logits=True, lens=[0, 1, 2, 3, 4])
        ids, past = target[:, :-1].argmax(-1), torch.arange(4) >= draft.lens[:, None]
        target.scatter_(2, target.argmax(-1, keepdim=True), CERTAIN)
        logits = target[:, :-1].clone()
        sure = DraftOut(ids, draft.lens, logits, logits.logsumexp(-1))
        verdict = self.make().verify(target, sure, make_keys(5))
        assert verdict.num_accepted.tolist() == [0, 1, 2, 3, 4]
        assert_whole(verdict, sure)
        assert verdict.token_ids.diagonal().tolist() == target.argmax(-1).diagonal().tolist()
        junk = torch.where(past[..., None], torch.nan, logits)
        unread = sure._replace(token_ids=ids.masked_fill(past, -1), token_logits=junk)
        for part, same in zip(
            verdict, self.make().verify(target, unread, make_keys(5)), strict=True
        ):
            assert torch.equal(part, same)

    def test_forbidden_token_is_never_accepted_or_emitted(self):
        target, draft = make_round(64, 3, has_logits=True)
        target[:, :-1].scatter_(2, draft.token_ids[..., None], -torch.inf)
        verdict = self.make().verify(target, draft, make_keys(64))
        assert_whole(verdict, draft)
        assert (verdict.num_accepted == 0).all()
        assert (verdict.token_ids[:, 0] != draft.token_ids[:, 0]).all()

    def test_row_is_verified_as_if_alone(self):
        target, draft = make_round(8, 3, has_logits=True)
        keys = make_keys(8)
        read = [tensor for tensor in (target, *draft, *keys) if tensor is not None]
        before = [tensor.clone() for tensor in read]
        whole = self.make().verify(target, draft, keys)
        assert all(torch.equal(*tensors) for tensors in zip(read, before, strict=True))
        for row in range(8):
            only = slice(row, row + 1)
            row_draft = DraftOut(*(None if field is None else field[only] for field in draft))
            alone = self.make().verify(target[only], row_draft, keys.rows(torch.tensor([row])))
            for one, same in zip(whole, alone, strict=True):
                assert torch.equal(one[only], same)

    def test_draws_depend_on_the_declared_key_fields_only(self):
        target, draft = make_round(64, 3, has_logits=True)
        keys = make_keys(64)
        first, again = (self.make().verify(target, draft, keys) for _ in range(2))
        assert torch.equal(first.token_ids, again.token_ids)
        for field in NoiseKeys._fields:
            verdict = self.make().verify(
                target, draft, keys._replace(**{field: getattr(keys, field) + 1})
            )
            assert torch.equal(first.token_ids, verdict.token_ids) != (field in self.reads_keys), (
                field
            )


class TestGreedyVerifier(VerifierContract):
    make = GreedyVerifier


class TestRejectionVerifier(VerifierContract):
    make, reads_keys = RejectionVerifier, NoiseKeys._fields


class TestBlockVerifier(VerifierContract):
    make, reads_keys = BlockVerifier, NoiseKeys._fields


class TestCoupledVerifier(VerifierContract):
    make, reads_keys = CoupledVerifier, ("seeds", "positions")


class TestTypicalVerifier(VerifierContract):
    make, reads_keys = (
        staticmethod(partial(TypicalVerifier, correction="sample")),
        NoiseKeys._fields,
    )


def typical(**settings) -> Verifier:
    return make_verifier(SpeculationConfig(verifier="typical", **settings).resolve(do_sample=False))


def keeps(verifier: Verifier, probs: list[float]) -> bool:
    """Return True if the verifier accepts token 0 under the distribution [V]."""
    draft = DraftOut(
        torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int32), None, None
    )
    return bool(
        verifier.verify(
            torch.tensor(probs).log().expand(1, 2, -1), draft, make_keys(1)
        ).num_accepted
    )


def test_typical_thresholds_follow_the_paper():
    # four equal probabilities have the value exp(-H), which is the threshold
    even = {"posterior_threshold": 0.99, "posterior_alpha": 0.9}
    assert keeps(typical(**even, entropy_epsilon=0.0), [0.25] * 4)
    # inside the logarithm, the epsilon makes the threshold 1/2
    assert not keeps(typical(**even, entropy_epsilon=0.25), [0.25] * 4)
    assert not keeps(typical(posterior_threshold=0.5, posterior_alpha=9.0), [0.5, 0.5])
    assert keeps(typical(), [0.091, 0.909])
    assert not keeps(typical(), [0.089, 0.911])
    flat = [1 / 64] * 64  # accepted because of its entropy: 0.3 * exp(-H) is below 1/64
    assert keeps(typical(), flat)
    assert not keeps(typical(posterior_alpha=1.1), flat)


def test_typical_correction_is_the_argmax_or_a_draw():
    target, draft = torch.zeros(64, 1, VOCAB_SIZE), make_round(64, 0, has_logits=False)[1]
    argmax, sample = {"typical_correction": "argmax"}, {"typical_correction": "sample"}
    for settings, do_sample, draws in [
        ({}, False, 0),
        ({}, True, 1),
        (argmax, True, 0),
        (sample, False, 1),
    ]:
        verifier = make_verifier(
            SpeculationConfig(verifier="typical", **settings).resolve(do_sample)
        )
        assert (len(verifier.verify(target, draft, make_keys(64)).token_ids.unique()) > 1) == draws


class KeepNothing:
    """Custom verifier that accepts nothing.

    It emits the target's argmax and records its drafts.
    """

    def __init__(self):
        self.drafts: list[DraftOut] = []

    def verify(self, target_logits, draft, keys):
        self.drafts.append(draft)
        return keep_prefix(
            target_logits, draft, torch.zeros_like(draft.token_ids).bool(), target_logits.argmax(-1)
        )


def test_unknown_verifier_error_lists_registered_names(registry):
    register_verifier("mine", lambda config: KeepNothing(), lossless=False)
    with pytest.raises(
        ConfigError, match=r"verifier must be one of block, coupled, greedy, mine, .* got 'magic'"
    ):
        make_verifier(SpeculationConfig(verifier="magic"))


def test_taken_verifier_name_needs_replace(registry):
    with pytest.raises(ConfigError, match="verifier name 'typical' is taken; pass replace=True"):
        register_verifier("typical", lambda config: KeepNothing(), lossless=True)
    assert not is_lossless(SpeculationConfig(verifier="typical"))
    register_verifier("typical", lambda config: KeepNothing(), lossless=True, replace=True)
    assert isinstance(make_verifier(SpeculationConfig(verifier="typical")), KeepNothing)
    assert is_lossless(SpeculationConfig(verifier="typical"))


@pytest.mark.parametrize("stream", [Stream.DRAFT, Stream.RACE])
def test_custom_verifier_chooses_the_draft_stream(registry, stream):
    """Draft with the target's noise, so an identical draft proposes the target's tokens."""
    register_verifier(
        "winners", lambda config: CoupledVerifier(), lossless=True, draft_stream=stream
    )
    target, draft = pair("llama", ACCEPTED_ALL)
    stats = hf_speculate.SpeculationStats()
    options = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": 20,
        "seed": 1,
        "speculation_stats": stats,
    }
    options["num_assistant_tokens"] = 5  # the schedule would not try a draft of the target's size
    target.generate(
        **ragged_prompts(4, seed=1), assistant_model=draft, verifier="winners", **options
    )
    assert (stats.verified_acceptance_rate == 1.0) == (stream is Stream.RACE)


@pytest.mark.parametrize("reads", [True, False])
def test_custom_verifier_decides_the_output(registry, reads):
    verifier, configs = KeepNothing(), []
    make = lambda config: configs.append(config) or verifier  # noqa: E731
    register_verifier("nothing", make, lossless=False, reads_draft_logits=reads)
    target, draft = pair("llama", ACCEPTED_ALL)
    inputs, stats = ragged_prompts(2, seed=1), hf_speculate.SpeculationStats()
    options = {
        "verifier": "nothing",
        "posterior_alpha": 0.7,
        "num_assistant_tokens": 3,
        "speculation_stats": stats,
    }
    ours = target.generate(
        **inputs, assistant_model=draft, do_sample=True, max_new_tokens=9, **options
    )
    assert_equal_ids(target.generate(**inputs, max_new_tokens=9), ours)
    assert stats.num_verified > stats.num_accepted == 0
    shown = [draft.token_logits for draft in verifier.drafts if draft.token_ids.shape[1] == 3]
    assert len(shown) > 0
    assert all((logits is not None) == reads for logits in shown)
    assert {config.posterior_alpha for config in configs} == {0.7}


class GreedyByHand:
    """Custom verifier for greedy decoding."""

    def verify(self, target_logits, draft, keys):
        best = target_logits.argmax(-1)  # [B, K+1]
        return keep_prefix(target_logits, draft, best[:, :-1] == draft.token_ids, best)


def hostile_round(fault: str) -> tuple[torch.Tensor, DraftOut]:
    """Return rows with 0 to 3 correct tokens before the fault, and draft lengths of 0 to 4."""
    target = 3 * torch.randn(64, 5, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    ids, rows = target[:, :-1].argmax(-1), torch.arange(64)
    faults = rows % 4
    if fault == "bad ids":
        ids[rows, faults] = torch.where(rows < 32, -1, VOCAB_SIZE)
    elif fault == "nan":
        target[rows, faults, 3] = torch.nan
    elif fault == "masked":
        target[rows, faults] = -torch.inf
    elif fault == "infinite":
        target[rows, faults, 3] = torch.inf
    return target, DraftOut(ids, (rows // 4 % 5).to(torch.int32), None, None)


@each_value(
    dtype=[torch.bfloat16, torch.float32, torch.float64],
    fault=["none", "bad ids", "nan", "masked", "infinite"],
)
def test_keep_prefix_handles_hostile_rows_like_the_kernels(fault, dtype):
    target, draft = hostile_round(fault)
    target = target.to(dtype)
    keys = make_keys(64)
    ours, kernels = (
        verifier.verify(target, draft, keys) for verifier in (GreedyByHand(), GreedyVerifier())
    )
    assert torch.equal(ours.num_accepted, kernels.num_accepted)
    assert torch.equal(ours.status, kernels.status)
    assert (ours.status != 0).any() == (fault != "none")
    is_whole = (ours.status & ~int(Status.BAD_DRAFT_ID)) == 0
    assert torch.equal(ours.token_ids[is_whole], kernels.token_ids[is_whole])
    last = ours.token_ids.gather(1, ours.num_accepted.long()[:, None])
    assert ((last >= 0) & (last < VOCAB_SIZE)).all()


def test_keep_prefix_rejects_forbidden_and_clamps_next_ids():
    target, draft = make_round(2, 2, has_logits=False)
    target[0, 1, draft.token_ids[0, 1]] = -torch.inf
    following = torch.tensor([[0, -5, 0], [0, 0, VOCAB_SIZE]])
    verdict = keep_prefix(target, draft, torch.ones(2, 2, dtype=torch.bool), following)
    assert verdict.num_accepted.tolist() == [1, 2]
    assert verdict.token_ids[[0, 1], [1, 2]].tolist() == [0, VOCAB_SIZE - 1]
    assert verdict.status.tolist() == [0, 0]


def test_verifier_of_the_guide_keeps_the_contract(registry):
    text = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(
        encoding="utf-8"
    )
    (code,) = re.findall(r"^```python\n(.*?register_verifier.*?)^```$", text, re.M | re.S)
    exec(code, {})
    target, draft = make_round(64, 3, has_logits=False)
    verdict = make_verifier(SpeculationConfig(verifier="near")).verify(target, draft, make_keys(64))
    assert_whole(verdict, draft)
    greedy = GreedyVerifier().verify(target, draft, make_keys(64))
    assert (verdict.num_accepted > greedy.num_accepted).any()
