"""Second scoring: score a round again if its logits are NaN or infinite.

A drafted token may make the target compute NaN even though plain decoding never reads this token.
Attention multiplies masked values by zero, and zero times NaN is NaN. The row then loses all its
logits, even the logits of accepted tokens. In this case, the round is rolled back, its KV cache
columns are overwritten, and the target reads the same tokens one by one, as in plain decoding. If
the logits are NaN again, the target itself is the cause.

If the output does not depend on the draft, only the newest token is read, and the round becomes a
plain step. Otherwise, all tokens are read, because dropping a draft based on its content would bias
the output: drafts are sampled from a different distribution than the target's, and only the
residual of a rejected token corrects for the difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_speculate.engine.batch import Batch
from hf_speculate.engine.plan import Plan
from hf_speculate.engine.ranks import Ranks
from hf_speculate.engine.target_session import TargetSession
from hf_speculate.engine.verification import Verification
from hf_speculate.types import DraftOut, NoiseKeys, Scored, Verified
from hf_speculate.verify.base import depends_on_draft


class Rescored(NamedTuple):
    """A round after its second scoring."""

    draft: DraftOut  # the tokens that were read again and verified
    scored: Scored
    verified: Verified


@dataclass(frozen=True)
class SecondScoring:
    """Scores a round again, one token at a time."""

    target: TargetSession
    verification: Verification
    depends_on_draft: bool  # whether the output depends on the draft
    ranks: Ranks

    @classmethod
    def of(cls, plan: Plan, target: TargetSession, verification: Verification) -> "SecondScoring":
        """Return the second scoring for a planned call."""
        return cls(target, verification, depends_on_draft(plan.config), plan.call.ranks)

    def run(self, batch: Batch, draft: DraftOut, keys: NoiseKeys, first: Verified) -> Rescored:
        """Score and verify a round's draft again after the verdict `first`."""
        scored_draft = draft if self.depends_on_draft else batch.no_draft()
        num_forwards = scored_draft.token_ids.shape[1] + 1
        self.target.kv_cache.crop(draft.token_ids.shape[1] + 1)
        self.target.kv_cache.clear_rejected()
        self._run_dummies(batch, (self.ranks.max(num_forwards) or 0) - num_forwards)
        tokens = self.target.query(batch, draft)[:, :num_forwards].split(1, dim=1)
        scored = joined([self._score(token, **self.target.options) for token in tokens])
        verified = self.verification.verify(
            batch, scored.logits, scored_draft, keys, checks_logits=True
        )
        num_host_syncs = first.num_host_syncs + verified.num_host_syncs
        if verified.has_bad_logits:  # plain decoding would have bad logits as well
            verified = self.verification.verify(batch, scored.logits, scored_draft, keys)
            num_host_syncs += verified.num_host_syncs
        verified = verified._replace(
            num_drafted=first.num_drafted, num_host_syncs=num_host_syncs, is_rescored=True
        )
        return Rescored(scored_draft, scored, verified)

    def join_others(self, batch: Batch) -> None:
        """Run dummy forwards to match other ranks' second scorings; called before every round."""
        while num_forwards := self.ranks.max(0):
            self._run_dummies(batch, num_forwards)

    def _run_dummies(self, batch: Batch, num_forwards: int) -> None:
        """Run forwards to match other ranks, and discard the results."""
        for _ in range(num_forwards):
            self._score(batch.tokens.last(1).contiguous())
            self.target.kv_cache.crop(1)

    def _score(self, token: Tensor, **options: Any) -> Scored:
        """Score one token per row, [B, 1], in a separate forward; the logits are [B, 1, V]."""
        return self.target.model.run_unpadded(
            token, self.target.kv_cache, logits_to_keep=1, **options
        )


def joined(outputs: Sequence[Scored]) -> Scored:
    """Concatenate the outputs of several single-token forwards."""
    if len(outputs) == 1:
        return outputs[0]
    captured = [output.captured for output in outputs if output.captured is not None]
    return outputs[0]._replace(
        logits=torch.cat([output.logits for output in outputs], dim=1),
        hidden_states=_by_layer(
            [output.hidden_states for output in outputs], lambda states: torch.cat(states, dim=-2)
        ),
        attentions=_by_layer([output.attentions for output in outputs], _joined_attentions),
        captured=torch.cat(captured, dim=1) if captured else None,
    )


def _by_layer(states: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Join the states of each layer; None for a layer without states, or if no layer has any."""
    if states[0] is None:
        return None
    return tuple(
        None if layers[0] is None else join(list(layers)) for layers in zip(*states, strict=True)
    )


def _joined_attentions(rows: list[Tensor]) -> Tensor:
    """Join Q rows [B, H, 1, T'] to [B, H, Q, T]; each row ends in the column of its token."""
    gaps = range(len(rows) - 1, -1, -1)  # columns after each token
    width = max(row.shape[-1] + gap for row, gap in zip(rows, gaps, strict=True))
    aligned = [
        pad(row, (width - gap - row.shape[-1], gap)) for row, gap in zip(rows, gaps, strict=True)
    ]
    return torch.cat(aligned, dim=-2)
