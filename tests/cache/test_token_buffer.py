"""Compare token buffers with plain lists, and row lengths on the device with the host's."""

import random
from functools import cache

import pytest
import torch

from hf_speculate.rows.row_lens import ArangeCache, RowCounts, RowLens
from hf_speculate.rows.token_buffer import TokenBuffer

FREE = -1  # value that may follow the valid entries of a row


def check(buffer: TokenBuffer, rows: list[list[int]]) -> None:
    assert buffer.lens == [len(row) for row in rows]
    assert buffer.is_even == (len({len(row) for row in rows}) == 1)
    for row, ids in enumerate(rows):
        assert buffer.token_ids[row, : len(ids)].tolist() == ids
    assert (buffer.token_ids >= 0).all()
    for num in range(1, min(map(len, rows)) + 1):
        assert buffer.last(num).tolist() == [row[-num:] for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_buffer_equals_lists_through_random_operations(seed: int) -> None:
    """Append whole blocks or a number of tokens per row, even 0, and grow past the capacity."""
    make = random.Random(seed)
    rows = [[make.randrange(64), make.randrange(64)] for _ in range(make.randint(1, 4))]
    ids = torch.tensor(rows)
    buffer = TokenBuffer(ids, make.choice([0, 3, 64]))
    ids.zero_()  # the buffer contains a copy
    for _ in range(20):
        match make.choice(["whole", "counted", "counted", "later", "truncate", "rows"]):
            case "truncate":
                rows = [row[: make.randint(1, len(row))] for row in rows]
                buffer.row_lens.set([len(row) for row in rows])
            case "rows":
                row_indices = make.sample(range(len(rows)), make.randint(1, len(rows)))
                rows = [rows[row] for row in row_indices]
                buffer.rows(row_indices)
            case "later":  # uploaded together
                for _ in range(2):
                    new = [[make.randrange(64)] * make.randint(0, 3) for _ in rows]
                    buffer.append_later(new, RowCounts(list(map(len, new))))
                    rows = [row + ids for row, ids in zip(rows, new, strict=True)]
            case family:
                counts = [3 if family == "whole" else make.randint(0, 3) for _ in rows]
                new = [[make.randrange(64) for _ in range(count)] for count in counts]
                block = torch.tensor([ids + [FREE] * (3 - len(ids)) for ids in new])
                buffer.append(block, None if family == "whole" else counts)
                rows = [row + ids for row, ids in zip(rows, new, strict=True)]
        check(buffer, rows)


def test_buffer_stays_in_place_then_doubles():
    buffer, sizes = TokenBuffer(torch.zeros(1, 4, dtype=torch.int64), capacity=10), set()
    address = buffer.token_ids.data_ptr()
    for num in range(5, 1000):
        buffer.append(torch.ones(1, 1, dtype=torch.int64))
        sizes.add(buffer.token_ids.shape[1])
        assert num > 10 or buffer.token_ids.data_ptr() == address
    assert len(sizes) <= 9  # 10, 20, ... 1280


@cache
def padding(num_rows: int) -> torch.Tensor:
    """Return [B, 1], one more column in each row; always the same object, as in layouts."""
    return torch.arange(num_rows)[:, None]


def check_lens(lens: RowLens) -> None:
    """Assert that the lengths on device and host are equal."""
    assert lens.on_device().tolist() == lens.on_host
    for num, offset in ((1, 0), (3, 0), (2, -2), (4, -40)):
        wanted = [[length + offset + step for step in range(num)] for length in lens.on_host]
        assert lens.columns(num, offset).expand(len(wanted), -1).tolist() == wanted
        less = [[column - row for column in columns] for row, columns in enumerate(wanted)]
        assert lens.positions(num, offset, padding(len(wanted))).tolist() == less


@pytest.mark.parametrize("seed", range(20))
def test_row_lens_equal_the_host_through_random_operations(seed: int) -> None:
    make = random.Random(seed)
    lens = RowLens([make.randint(0, 9)] * make.randint(1, 4), ArangeCache("cpu"))
    second = RowLens(lens.on_host, ArangeCache("cpu"))
    for _ in range(12):
        counts = [make.randint(0, 5) for _ in lens.on_host]
        match make.choice(["all", "known", "told", "follow", "rows"]):
            case "all":
                lens.add(make.randint(0, 4))
            case "known":
                shared = make.randint(-2, 2)
                lens.add_counts(
                    RowCounts(counts, torch.tensor([num - shared for num in counts]).int(), shared)
                )
            case "told":
                lens.add_counts(counts)
            case "follow":
                lens.set(
                    [max(length - num, 0) for length, num in zip(lens.on_host, counts, strict=True)]
                )
            case "rows":
                row_indices = make.sample(range(len(counts)), make.randint(1, len(counts)))
                lens.rows(row_indices)
                second.rows(row_indices)
        gap = make.randint(-3, 3)
        second.set([length + gap for length in lens.on_host], lens)
        if not (lens.is_even or second.is_even):
            varying, shared = lens.less(second)
            assert (varying + shared).tolist() == [-gap] * len(lens.on_host)
        expected = lens.copy()
        check_lens(lens)
        check_lens(second)
        lens.add(1)
        check_lens(expected)
        check_lens(lens)
