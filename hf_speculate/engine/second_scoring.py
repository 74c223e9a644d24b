"""Second scoring: a round whose logits are NaN or infinite is scored again, so that no drafted token changes the text.

A drafted token may make the target compute NaN where plain decoding, which never reads it, computes none. Attention
multiplies what a mask hides by zero, and zero times NaN is NaN: the logits of the whole row are lost, those of its
accepted tokens too. The round is then rolled back, its columns of the KV cache are overwritten, and the target reads
the same tokens in forwards of one token, as plain decoding does. Logits that are NaN again are the target's own.

If the output does not depend on the draft, the newest token alone is read: the round becomes a plain step. Otherwise
all tokens are, because dropping a draft for what it holds would bias the output: it is sampled from another
distribution than the target's, which the residual of a rejected token makes up for.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hf_speculate.engine.batch import Batch
from hf_speculate.engine.distributed import SyncedRanks
from hf_speculate.engine.target_session import TargetSession
from hf_speculate.engine.verification import Verification
from hf_speculate.types import DraftOut, NoiseKeys, Scored, Verified


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
    ranks: SyncedRanks | None

    def run(self, batch: Batch, draft: DraftOut, keys: NoiseKeys, first: Verified) -> Rescored:
        """The round anew, from the draft that led to the verdict `first`."""
        scored_draft = draft if self.depends_on_draft else batch.no_draft()
        num_forwards = scored_draft.token_ids.shape[1] + 1
        self.target.roll_back(draft)
        if self.ranks is not None:
            self.target.run_dummy(batch, self.ranks.more_forwards(num_forwards) - num_forwards)
        scored = self.target.score_again(batch, draft, num_forwards)
        verified = self.verification.verify(batch, scored.logits, scored_draft, keys, checks_logits=True)
        num_host_syncs = first.num_host_syncs + verified.num_host_syncs
        if verified.has_bad_logits:  # of the text itself, as in plain decoding
            verified = self.verification.verify(batch, scored.logits, scored_draft, keys)
            num_host_syncs += verified.num_host_syncs
        verified = verified._replace(num_drafted=first.num_drafted, num_host_syncs=num_host_syncs, is_rescored=True)
        return Rescored(scored_draft, scored, verified)
