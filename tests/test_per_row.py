"""Test how rows are selected and joined through declared fields."""

import torch

from hf_speculate.rows.per_row import PerRow, RowIndices


class Lens(PerRow):
    BY_ROW = ("lens",)

    def __init__(self, lens):
        self.lens = lens


class Rows(PerRow):
    BY_ROW = ("names", "waiting")
    TENSORS = ("states", "mask")
    PARTS = ("tokens", "host_tokens", "missing")

    def __init__(self, *numbers):
        self.names, self.waiting = [f"row {number}" for number in numbers], []
        self.states = {"keys": (torch.tensor(numbers)[:, None], torch.tensor(numbers))}
        self.mask = self.missing = None
        self.tokens = self.host_tokens = Lens(list(numbers))
        self.derived = "of these rows"

    def forget(self):
        self.derived = None


def test_rows_are_selected_in_their_new_order():
    rows = Rows(0, 1, 2)
    rows.rows((2, 0))
    assert (rows.names, rows.waiting, rows.mask) == (["row 2", "row 0"], [], None)
    assert [part.tolist() for part in rows.states["keys"]] == [[[2], [0]], [2, 0]]
    assert rows.tokens.lens == [2, 0]
    assert rows.derived is None


def test_joined_rows_follow_the_present_ones():
    rows = Rows(0, 1)
    names = rows.names
    rows.join(Rows(7))
    assert (rows.names, rows.waiting, rows.mask) == (["row 0", "row 1", "row 7"], [], None)
    assert [part.tolist() for part in rows.states["keys"]] == [[[0], [1], [7]], [0, 1, 7]]
    assert rows.tokens.lens == [0, 1, 7]
    assert rows.derived is None
    assert names == ["row 0", "row 1"]  # other objects may hold it


def test_parts_of_a_batch_share_one_upload():
    row_indices, device = RowIndices([1, 0]), torch.device("cpu")
    assert RowIndices.of(row_indices) is row_indices
    assert row_indices.on(device) is row_indices.on(device)
    assert row_indices.select(torch.tensor([[1, 2, 3]]), dim=1).tolist() == [[2, 1]]
