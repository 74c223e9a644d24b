"""TokenBuffer against rows kept as plain lists."""

import pytest
import torch

from hf_speculate.cache.token_buffer import TokenBuffer

FREE = -1  # what may stand past a row's count


class Twin:
    """A buffer and the same rows as lists."""

    def __init__(self, ids: list[list[int]], capacity: int = 0):
        self.rows = [list(row) for row in ids]
        self.buffer = TokenBuffer(torch.tensor(ids), capacity)

    def append(self, ids: list[list[int]]) -> None:
        width = max(len(row) for row in ids)
        block = torch.tensor([row + [FREE] * (width - len(row)) for row in ids])
        self.buffer.append(block, [len(row) for row in ids])
        for kept, new in zip(self.rows, ids, strict=True):
            kept += new

    def check(self) -> None:
        assert self.buffer.lens == [len(row) for row in self.rows]
        for row, ids in enumerate(self.rows):
            assert self.buffer.token_ids[row, : len(ids)].tolist() == ids
        for num in range(1, min(map(len, self.rows)) + 1):
            assert self.buffer.last(num).tolist() == [row[-num:] for row in self.rows]


def test_it_begins_with_a_copy():
    ids = torch.tensor([[1, 2], [3, 4]])
    buffer = TokenBuffer(ids, capacity=8)
    ids.zero_()
    assert buffer.last(2).tolist() == [[1, 2], [3, 4]]
    assert buffer.lens == [2, 2]


def test_even_rows_append_a_whole_block_without_counts():
    twin = Twin([[1, 2], [3, 4]])
    twin.buffer.append(torch.tensor([[5, 6], [7, 8]]))
    twin.rows = [[1, 2, 5, 6], [3, 4, 7, 8]]
    twin.check()


def test_even_rows_become_ragged_and_go_on():
    twin = Twin([[1, 2], [3, 4], [5, 6]], capacity=32)
    assert twin.buffer.is_even
    twin.append([[7, 8, 9], [10], [11, 12]])
    assert not twin.buffer.is_even
    twin.check()
    twin.append([[13], [14, 15, 16, 17], [18, 19]])
    twin.check()


def test_rows_that_are_equally_long_again_are_even():
    twin = Twin([[1], [2]])
    twin.append([[3, 4], [5]])
    twin.append([[6], [7, 8]])
    assert twin.buffer.is_even
    twin.check()


def test_a_row_may_stay_as_it_is():
    twin = Twin([[1, 2], [3, 4]])
    twin.append([[], [5, 6]])
    twin.append([[], [7]])
    twin.check()


@pytest.mark.parametrize("counts", [[3, 3], [1, 3], [0, 2]])
def test_what_stands_past_the_counts_is_overwritten_by_the_next_tokens(counts):
    buffer = TokenBuffer(torch.tensor([[1], [2]]))
    buffer.append(torch.tensor([[3, 4, 5], [6, 7, 8]]), counts)
    buffer.append(torch.tensor([[9], [10]]))
    expected = [[1, *[3, 4, 5][: counts[0]], 9], [2, *[6, 7, 8][: counts[1]], 10]]
    assert [buffer.token_ids[row, :length].tolist() for row, length in enumerate(buffer.lens)] == expected


@pytest.mark.parametrize("is_ragged", [False, True])
def test_padding_never_stands_in_the_buffer(is_ragged):
    buffer = TokenBuffer(torch.tensor([[1], [2]]), capacity=8)
    if is_ragged:
        buffer.append(torch.tensor([[3], [FREE]]), [1, 0])
    buffer.append(torch.full((2, 3), FREE), [0, 0])
    assert (buffer.token_ids >= 0).all()


@pytest.mark.parametrize("is_ragged", [False, True])
def test_it_grows_past_its_capacity_and_keeps_what_it_held(is_ragged):
    twin = Twin([[1, 2], [3, 4]], capacity=3)
    if is_ragged:
        twin.append([[5], []])
    for step in range(40):
        twin.append([[step, step + 1, step + 2], [step, step + 1, step + 2]])
    twin.check()
    assert twin.buffer.token_ids.shape[1] >= max(twin.buffer.lens)


def test_growing_doubles_so_that_long_texts_are_seldom_copied():
    buffer, sizes = TokenBuffer(torch.zeros(1, 4, dtype=torch.int64)), set()
    for _ in range(1000):
        buffer.append(torch.ones(1, 1, dtype=torch.int64))
        sizes.add(buffer.token_ids.shape[1])
    assert len(sizes) <= 9  # 8, 16, ... 1024, 2048


def test_within_its_capacity_it_stays_in_place():
    buffer = TokenBuffer(torch.tensor([[1]]), capacity=10)
    address = buffer.token_ids.data_ptr()
    for _ in range(9):
        buffer.append(torch.tensor([[2]]))
    assert buffer.token_ids.data_ptr() == address
    assert buffer.token_ids.shape == (1, 10)


@pytest.mark.parametrize("lens", [[1, 3], [2, 2], [0, 1], [3, 4]])
def test_truncated_rows_go_on_from_where_they_were_cut(lens):
    twin = Twin([[1, 2, 3], [4, 5, 6]])
    twin.append([[], [7]])
    twin.buffer.truncate(lens)
    twin.rows = [row[:length] for row, length in zip(twin.rows, lens, strict=True)]
    twin.check()
    twin.append([[8, 9], [10]])
    twin.check()


@pytest.mark.parametrize("indices", [[0], [2, 0], [1, 2], [2, 1, 0]])
def test_rows_keeps_the_named_rows_in_their_order(indices):
    twin = Twin([[1, 2], [3, 4], [5, 6]])
    twin.append([[7], [8, 9], [10]])
    twin.buffer.rows(indices)
    twin.rows = [twin.rows[row] for row in indices]
    twin.check()
    twin.append([[11, 12]] * len(indices))
    twin.check()
