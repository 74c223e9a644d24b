"""What a batch keeps of its rows."""

import torch

from hf_speculate.engine.batch import Batch


def test_rows_that_stay_keep_what_belongs_to_them():
    ids = torch.tensor([[0, 5, 6], [1, 2, 3], [0, 0, 9]])
    batch = Batch(ids, torch.tensor([11, 12, 13]), 8, [2, 3, 1], [1, 0, 2])
    assert batch.begin_round().positions.tolist() == [2, 3, 1]
    batch.is_finished = [False, True, False]
    batch.rows([2, 0])
    assert (batch.row_ids, batch.is_finished) == ([2, 0], [False, False])
    assert (batch.num_pads, batch.num_prompt_tokens, batch.num_left) == ([2, 1], [1, 2], [5, 5])
    assert batch.tokens.token_ids[:, :3].tolist() == [[0, 0, 9], [0, 5, 6]]
    keys = batch.begin_round()
    assert (keys.seeds.tolist(), keys.rounds.tolist(), keys.positions.tolist()) == ([13, 11], [2, 2], [1, 2])
