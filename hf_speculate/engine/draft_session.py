"""Keeps count of what the drafter has seen of each row."""

import torch

from hf_speculate.draft.base import Drafter
from hf_speculate.engine.batch import Batch, DecoderSettings
from hf_speculate.engine.verification import Trimmed, Verified
from hf_speculate.types import DraftOut, NoiseKeys


class Follower:
    """A drafter that is fed what it has not seen, and forgets what was not kept.

    Args:
        drafter: proposes; None where nothing is drafted.
        settings: see `DecoderSettings`.
    """

    def __init__(self, drafter: Drafter | None, settings: DecoderSettings):
        self.drafter = drafter
        self.settings = settings
        self._was_live: list[bool] = []  # [B] at the last draft

    def num_unseen(self, batch: Batch) -> int:
        """Tokens at the end of the live rows that the drafter has not seen; as many in each, for plain steps add one.

        Finished rows that stay are fed as many, whatever they are: nobody uses their drafts.
        """
        no_live = all(batch.is_finished)  # then all are fed what they lack: other ranks take part in the forwards
        rows = zip(batch.tokens.lens, batch.num_held, batch.is_finished, strict=True)
        return max(length - held for length, held, is_finished in rows if no_live or not is_finished)

    def draft(self, batch: Batch, num_draft_tokens: int, num_fed: int, keys: NoiseKeys) -> DraftOut:
        """Let the drafter read and propose.

        Args:
            batch: the rows.
            num_draft_tokens: K at most; 0 for no draft.
            num_fed: tokens at the end of each row that it is fed.
            keys: noise of the round.
        """
        if num_draft_tokens == 0 or self.drafter is None:
            return batch.no_draft()
        self._was_live = [not is_finished for is_finished in batch.is_finished]
        batch.num_held = [length - num_fed for length in batch.tokens.lens]
        on_host = self.settings.drafts_on_host
        tokens = batch.host_tokens if on_host else batch.tokens
        draft = self.drafter.draft(
            tokens.last(num_fed),
            batch.draft_cache,
            num_draft_tokens,
            self.settings.draft_strategy,
            keys=keys,
            kept=batch.kept_on_host() if on_host else batch.kept(tokens),
        )
        batch.tell(on_host)
        draft = self._within_length(batch, draft)
        num_ahead = draft.token_ids.shape[1] - 1 if batch.draft_cache is not None else 0
        if draft.fed is not None:
            num_ahead = draft.fed.num_ahead
        batch.num_held = [length + num_ahead for length in batch.tokens.lens]
        if self.settings.is_lock_step and self.settings.pad_token_id is not None and any(batch.is_finished):
            finished = torch.tensor(batch.is_finished, device=draft.token_ids.device)[:, None]
            draft = draft._replace(token_ids=draft.token_ids.masked_fill(finished, self.settings.pad_token_id))
        return draft

    def crop(self, batch: Batch, draft: DraftOut, verified: Verified, trimmed: Trimmed) -> None:
        """Let the drafter forget what was not kept.

        Args:
            batch: the rows, the kept tokens written.
            draft: the round's proposal.
            verified: what the verifier made of it.
            trimmed: how much of that was kept.
        """
        if not draft.token_ids.shape[1]:
            return
        before = [length - num for length, num in zip(batch.tokens.lens, trimmed.num_emitted, strict=True)]
        is_own = [True] * len(before) if draft.fed is None else draft.fed.is_own
        most = [max(num - 1, 0) if own else 0 for num, own in zip(trimmed.num_emitted, is_own, strict=True)]
        followed = [  # what a finished row's drafts were is of no use to anybody
            num if done else min(num, accepted)
            for num, done, accepted in zip(most, batch.is_finished, verified.num_accepted, strict=True)
        ]
        valid = [min(held, length + num) for held, length, num in zip(batch.num_held, before, followed, strict=True)]
        kept = [min(num, accepted) for num, accepted in zip(most, verified.num_accepted, strict=True)]
        certain = [min(held, length + num) for held, length, num in zip(batch.num_held, before, kept, strict=True)]
        self._drop(batch, valid)
        self._note_valid(batch, certain)

    def undo(self, batch: Batch, draft: DraftOut) -> None:
        """Let the drafter forget a draft of which nothing is kept.

        Args:
            batch: the rows.
            draft: the round's proposal.
        """
        if draft.token_ids.shape[1]:
            pairs = zip(batch.num_held, batch.tokens.lens, strict=True)
            valid = [min(held, length) for held, length in pairs]
            self._drop(batch, valid)
            self._note_valid(batch, valid)

    def rows(self, indices: list[int]) -> None:
        """Forget all rows but `indices`, in that order. The caller does the same to the batch."""
        if self.drafter is not None:
            self.drafter.rows(indices)

    def _within_length(self, batch: Batch, draft: DraftOut) -> DraftOut:
        """Let no row count drafts past its own end, so that what it draws does not depend on its neighbours."""
        room = [max(self.settings.max_length - length - 1, 0) for length in batch.tokens.lens]
        if min(room) >= draft.token_ids.shape[1]:
            return draft
        most = torch.tensor(room, dtype=draft.lens.dtype, device=draft.lens.device)
        return draft._replace(lens=torch.minimum(draft.lens, most))

    def _note_valid(self, batch: Batch, certain: list[int]) -> None:
        """Say how much of each row's own text the draft cache holds, for later calls.

        What a row is fed once it has ended is not its text, so such a row can only lose.

        Args:
            batch: the rows, the cache cut back.
            certain: [B] tokens of each row, padding included, that it held before.
        """
        if batch.num_valid is None or batch.draft_cache is None:
            return
        rows = zip(batch.num_valid, certain, batch.num_pads or [], self._was_live, strict=True)
        valid = [max(num - pad, 0) if was_live else known for known, num, pad, was_live in rows]
        lens = batch.draft_cache.get_lens().tolist()
        batch.num_valid = [min(num, length) for num, length in zip(valid, lens, strict=True)]

    def _drop(self, batch: Batch, valid: list[int]) -> None:
        """Leave the drafter equally far behind in every row, so that its next query is rectangular.

        Args:
            batch: the rows, the kept tokens written.
            valid: [B] tokens of each row that the drafter has seen and that were kept.
        """
        behind = max(length - seen for length, seen in zip(batch.tokens.lens, valid, strict=True))
        num_query = max(behind, self.settings.min_draft_query)
        keep = [length - num_query for length in batch.tokens.lens]
        if batch.draft_cache is not None:
            batch.draft_cache.crop([held - num for held, num in zip(batch.num_held, keep, strict=True)])
        batch.num_held = keep
