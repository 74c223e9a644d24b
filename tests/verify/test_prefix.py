"""`keep_prefix` writes the verdict of any rule that decides each position by itself."""

import re
from pathlib import Path

import torch

from hf_speculate.config import SpeculationConfig
from hf_speculate.types import DraftOut, Status
from hf_speculate.verify import GreedyVerifier, keep_prefix
from hf_speculate.verify.base import make_verifier
from tests.cases import each_value
from tests.verify.test_verifiers import VOCAB_SIZE, assert_whole, make_keys, make_round


class GreedyByHand:
    """Greedy verification as a user would write it."""

    def verify(self, target_logits, draft, keys):
        best = target_logits.argmax(-1)  # [B, K+1]
        return keep_prefix(target_logits, draft, best[:, :-1] == draft.token_ids, best)


def hostile_round(kind: str) -> tuple[torch.Tensor, DraftOut]:
    """Rows that agree with the target for 0..3 tokens, then meet what `kind` says, with lengths of 0..4."""
    target = 3 * torch.randn(64, 5, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    ids, rows = target[:, :-1].argmax(-1), torch.arange(64)
    places = rows % 4
    if kind == "bad ids":
        ids[rows, places] = torch.where(rows < 32, -1, VOCAB_SIZE)
    elif kind == "nan":
        target[rows, places, 3] = torch.nan
    elif kind == "masked":
        target[rows, places] = -torch.inf
    elif kind == "infinite":
        target[rows, places, 3] = torch.inf
    return target, DraftOut(ids, (rows // 4 % 5).to(torch.int32), None, None)


@each_value(dtype=[torch.bfloat16, torch.float32, torch.float64], kind=["none", "bad ids", "nan", "masked", "infinite"])
def test_a_rule_over_it_answers_hostile_rows_as_the_kernels_do(kind, dtype):
    target, draft = hostile_round(kind)
    target = target.to(dtype)
    keys = make_keys(64)
    ours, kernels = (verifier.verify(target, draft, keys) for verifier in (GreedyByHand(), GreedyVerifier()))
    assert torch.equal(ours.num_accepted, kernels.num_accepted)
    assert torch.equal(ours.status, kernels.status)
    assert (ours.status != 0).any() == (kind != "none")
    is_whole = (ours.status & ~int(Status.BAD_DRAFT_ID)) == 0
    assert torch.equal(ours.token_ids[is_whole], kernels.token_ids[is_whole])
    last = ours.token_ids.gather(1, ours.num_accepted.long()[:, None])
    assert ((last >= 0) & (last < VOCAB_SIZE)).all()


def test_a_token_that_the_target_forbids_is_refused_and_one_to_follow_is_moved_into_the_vocabulary():
    target, draft = make_round(2, 2, has_logits=False)
    target[0, 1, draft.token_ids[0, 1]] = -torch.inf
    following = torch.tensor([[0, -5, 0], [0, 0, VOCAB_SIZE]])
    verdict = keep_prefix(target, draft, torch.ones(2, 2, dtype=torch.bool), following)
    assert verdict.num_accepted.tolist() == [1, 2]
    assert verdict.token_ids[[0, 1], [1, 2]].tolist() == [0, VOCAB_SIZE - 1]
    assert verdict.status.tolist() == [0, 0]


def test_the_rule_in_the_guide_is_a_whole_one(registry):
    text = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?register_verifier.*?)^```$", text, re.M | re.S)
    exec(code, {})
    target, draft = make_round(64, 3, has_logits=False)
    verdict = make_verifier(SpeculationConfig(verifier="near")).verify(target, draft, make_keys(64))
    assert_whole(verdict, draft)
    greedy = GreedyVerifier().verify(target, draft, make_keys(64))
    assert (verdict.num_accepted > greedy.num_accepted).any()
