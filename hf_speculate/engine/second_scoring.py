"""Second scoring: a round whose logits are NaN or infinite is scored again, so that no drafted token changes the text.

A drafted token may make the target compute NaN where plain decoding, which never reads it, computes none. Attention
multiplies what a mask hides by zero, and zero times NaN is NaN: the logits of the whole row are lost, those of its
accepted tokens too. The round is then rolled back, its columns of the KV cache are overwritten, and the target reads
the same tokens in forwards of one token, as plain decoding does. Logits that are NaN again are the target's own.

If the output does not depend on the draft, the newest token alone is read: the round becomes a plain step. Otherwise
all tokens are, because dropping a draft for what it holds would bias the output: it is sampled from another
distribution than the target's, which the residual of a rejected token makes up for.
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
    """Scores and verifies a round again, one token at a time."""

    target: TargetSession
    verification: Verification
    depends_on_draft: bool  # whether the output depends on what is drafted
    ranks: Ranks

    @classmethod
    def of(cls, plan: Plan, target: TargetSession, verification: Verification) -> "SecondScoring":
        """Return the second scoring of a planned call."""
        return cls(target, verification, depends_on_draft(plan.config), plan.call.ranks)

    def run(self, batch: Batch, draft: DraftOut, keys: NoiseKeys, first: Verified) -> Rescored:
        """Return the round anew, from the draft that led to the verdict `first`."""
        scored_draft = draft if self.depends_on_draft else batch.no_draft()
        num_forwards = scored_draft.token_ids.shape[1] + 1
        self.target.kv_cache.crop(draft.token_ids.shape[1] + 1)
        self.target.kv_cache.clear_rejected()
        self._run_dummies(batch, (self.ranks.max(num_forwards) or 0) - num_forwards)
        tokens = self.target.query(batch, draft)[:, :num_forwards].split(1, dim=1)
        scored = joined([self._score(token, **self.target.options) for token in tokens])
        verified = self.verification.verify(batch, scored.logits, scored_draft, keys, checks_logits=True)
        num_host_syncs = first.num_host_syncs + verified.num_host_syncs
        if verified.has_bad_logits:  # the text itself gives them, as in plain decoding
            verified = self.verification.verify(batch, scored.logits, scored_draft, keys)
            num_host_syncs += verified.num_host_syncs
        verified = verified._replace(num_drafted=first.num_drafted, num_host_syncs=num_host_syncs, is_rescored=True)
        return Rescored(scored_draft, scored, verified)

    def join_others(self, batch: Batch) -> None:
        """Take part in the second scorings of other ranks; called before every round."""
        while num_forwards := self.ranks.max(0):
            self._run_dummies(batch, num_forwards)

    def _run_dummies(self, batch: Batch, num_forwards: int) -> None:
        """Run forwards that other ranks need; nothing is kept of them."""
        for _ in range(num_forwards):
            self._score(batch.tokens.last(1).contiguous())
            self.target.kv_cache.crop(1)

    def _score(self, token: Tensor, **options: Any) -> Scored:
        """Logits [B, 1, V] after one token [B, 1] of each row, in a forward that reads no other."""
        return self.target.model.run_unpadded(token, self.target.kv_cache, logits_to_keep=1, **options)


def joined(parts: Sequence[Scored]) -> Scored:
    """Outputs of forwards of one token each, as the output of one forward."""
    if len(parts) == 1:
        return parts[0]
    captured = [part.captured for part in parts if part.captured is not None]
    return parts[0]._replace(
        logits=torch.cat([part.logits for part in parts], dim=1),
        hidden_states=_by_layer([part.hidden_states for part in parts], lambda states: torch.cat(states, dim=-2)),
        attentions=_by_layer([part.attentions for part in parts], _joined_attentions),
        captured=torch.cat(captured, dim=1) if captured else None,
    )


def _by_layer(parts: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Return the states of each layer joined; None for layers without states, or if there are none at all."""
    if parts[0] is None:
        return None
    return tuple(None if layers[0] is None else join(list(layers)) for layers in zip(*parts, strict=True))


def _joined_attentions(rows: list[Tensor]) -> Tensor:
    """[B, H, Q, T] of Q rows [B, H, 1, T'] that each end in the column of their own token."""
    gaps = range(len(rows) - 1, -1, -1)  # columns after each token
    width = max(row.shape[-1] + gap for row, gap in zip(rows, gaps, strict=True))
    aligned = [pad(row, (width - gap - row.shape[-1], gap)) for row, gap in zip(rows, gaps, strict=True)]
    return torch.cat(aligned, dim=-2)
