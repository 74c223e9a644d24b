"""Row lengths on the device against the same ones on the host, whichever way they came about."""

import random

import pytest
import torch

from hf_speculate.cache.row_lens import RowCounts, RowLens, Ruler


def check(lens: RowLens) -> None:
    """What the device says is what the host says."""
    assert lens.on_device().tolist() == lens.on_host
    for num, offset in ((1, 0), (3, 0), (2, -2), (4, -40)):
        wanted = [[length + offset + place for place in range(num)] for length in lens.on_host]
        assert lens.columns(num, offset).expand(len(wanted), -1).tolist() == wanted


@pytest.mark.parametrize("seed", range(20))
def test_any_course_of_growing_shrinking_following_and_leaving(seed: int) -> None:
    make = random.Random(seed)
    lens = RowLens([make.randint(0, 9)] * make.randint(1, 4), Ruler("cpu"))
    other = RowLens(lens.on_host, Ruler("cpu"))
    for _ in range(12):
        counts = [make.randint(0, 5) for _ in lens.on_host]
        match make.choice(["all", "known", "told", "follow", "rows"]):
            case "all":
                lens.add(make.randint(0, 4))
            case "known":
                shared = make.randint(-2, 2)
                lens.add_counts(RowCounts(counts, torch.tensor([num - shared for num in counts]).int(), shared))
            case "told":
                lens.add_counts(counts)
            case "follow":
                lens.set([max(length - num, 0) for length, num in zip(lens.on_host, counts, strict=True)])
            case "rows":
                kept = make.sample(range(len(counts)), make.randint(1, len(counts)))
                lens.rows(kept)
                other.rows(kept)
        gap = make.randint(-3, 3)
        other.set([length + gap for length in lens.on_host], lens)
        if not (lens.is_even or other.is_even):
            varying, shared = lens.less(other)
            assert (varying + shared).tolist() == [-gap] * len(lens.on_host)
        twin = lens.copy()
        check(lens)
        check(other)
        lens.add(1)
        check(twin)
        check(lens)
