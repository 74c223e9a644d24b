"""What a draft session feeds its drafter."""

import torch

from hf_speculate.draft.base import DrafterDefaults
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.draft_session import DraftSession
from hf_speculate.types import DraftOut, SampleStrategy


class ProposesNothing(DrafterDefaults):
    """A drafter without a model that finds no match; it notes what it is fed."""

    def __init__(self):
        self.queries = []

    def draft(self, request):
        self.queries.append(request.query_token_ids)
        num_rows = len(request.query_token_ids)
        return DraftOut(
            torch.zeros(num_rows, 0, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int32), None, None
        )


def test_finished_rows_that_go_on_for_other_ranks_feed_their_last_token():
    drafter = ProposesNothing()
    batch = Batch(torch.tensor([[5, 6, 7]]), torch.tensor([0]), 8, [3], [0])
    drafts = DraftSession(drafter, None, SampleStrategy.GREEDY, 1)
    drafts.propose(batch, 2, batch.begin_round())
    batch.is_finished = [True]
    for _ in range(2):
        drafts.propose(batch, 2, batch.begin_round())
    assert [query.tolist() for query in drafter.queries] == [[[5, 6, 7]], [[7]], [[7]]]
