"""Compare blocks of tokens with transformers' criteria, called after every token."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import ConfidenceCriteria, stopping_criteria

from hf_speculate.errors import UnsupportedGenerationError
from hf_speculate.processors import register_row_wise
from hf_speculate.processors.registry import NOT_ROW_WISE, name_of
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria, StopVerdict
from hf_speculate.rows.token_buffer import TokenBuffer

TOKENS = [*"abcdefopst", "st", "op", "sto", "pped", "topper", "las", "stop", "ab", "bab"]
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}


def stops(strings: list[str], decoder: Any = decoders.Fuse) -> StopStringCriteria:
    backend = Tokenizer(models.BPE(vocab=IDS, merges=[]))
    backend.decoder = decoder()
    return StopStringCriteria(PreTrainedTokenizerFast(tokenizer_object=backend), strings)


def write(*rows: tuple[list[str], list[str]]) -> tuple[Tensor, list[int], list[int]]:
    """Build the arguments of a call from each row's tokens before and in the block.

    The ids after a block are hostile.
    """
    lines = [[IDS[token] for token in before + new] for before, new in rows]
    width = max(map(len, lines)) + 2
    token_ids = torch.tensor([line + [-1] * (width - len(line)) for line in lines])
    return token_ids, [len(before) for before, _ in rows], [len(new) for _, new in rows]


def ask(
    criterion: BlockStoppingCriteria, token_ids: Tensor, prefix_lens: list[int], num_new: list[int]
) -> StopVerdict:
    """Call the criterion on rows without their blocks, and assert that its inputs are unchanged."""
    tokens = TokenBuffer(token_ids)
    tokens.row_lens.set(prefix_lens)
    before, rows = (
        tokens.token_ids.clone(),
        zip(token_ids.tolist(), prefix_lens, num_new, strict=True),
    )
    verdict = criterion(
        tokens, [ids[prefix_len : prefix_len + num] for ids, prefix_len, num in rows]
    )
    assert torch.equal(tokens.token_ids, before)
    assert tokens.lens == prefix_lens
    return verdict


def run_token_by_token(
    criteria, token_ids: Tensor, prefix_lens: list[int], num_new: list[int]
) -> StopVerdict:
    """Append token by token and call the whole list each time, as plain `generate` does."""
    plain = StoppingCriteriaList(criteria)
    num_emitted, is_done = list(num_new), [False] * len(num_new)
    for row, (prefix_len, num) in enumerate(zip(prefix_lens, num_new, strict=True)):
        for at in range(1, num + 1):
            if plain(token_ids[row : row + 1, : prefix_len + at], None).item():
                num_emitted[row], is_done[row] = at, True
                break
    return StopVerdict(num_emitted, is_done)


@register_row_wise
class EndsOnSum(StoppingCriteria):
    """Custom criterion that depends on the whole prefix.

    It records the shapes of its calls.
    """

    def __init__(self, modulus: int = 7) -> None:
        self.modulus = modulus
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
        assert scores is None
        return input_ids.sum(dim=1) % self.modulus == 0


@register_row_wise
class EndsAtLengthAsOneBool(StoppingCriteria):
    """Custom criterion that returns one bool for all rows, as in older versions."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return input_ids.shape[1] >= 9


CRITERIA: dict[str, Callable[[], list[Any]]] = {
    "several eos": lambda: [
        EosTokenCriteria([IDS["e"], IDS["ab"]]),
        EosTokenCriteria(torch.tensor([IDS["c"]])),
    ],
    "two max lengths": lambda: [MaxLengthCriteria(11), MaxLengthCriteria(8)],
    "stop bytes": lambda: [stops(["stop", "aba"], decoders.ByteLevel)],
    "two widths": lambda: [stops(["abababab"]), stops(["ops", "tt"])],
    "registered": lambda: [EndsOnSum()],
    "one bool": lambda: [EndsAtLengthAsOneBool()],
    "everything": lambda: [
        MaxLengthCriteria(12),
        MaxTimeCriteria(3600.0),
        stops(["stop", "ab"]),
        EosTokenCriteria([IDS["e"]]),
        EndsOnSum(11),
    ],
}


@pytest.mark.parametrize("name", sorted(CRITERIA))
def test_verdicts_equal_token_by_token(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high, size: torch.randint(low, high, size, generator=generator)  # noqa: E731
    criteria = CRITERIA[name]()
    criterion = BlockStoppingCriteria(StoppingCriteriaList(criteria))
    assert criterion.is_row_wise
    for _ in range(12):
        prefix_lens, num_new = draw(0, 9, (4,)).tolist(), draw(0, 7, (4,)).tolist()
        token_ids = draw(6, len(TOKENS), (4, 16))  # "o" and later tokens make stop strings likely
        token_ids = torch.where(draw(0, 4, (4, 16)) == 0, draw(0, 6, (4, 16)), token_ids)
        for row, end in enumerate(p + n for p, n in zip(prefix_lens, num_new, strict=True)):
            token_ids[row, end:] = -1
        ours = ask(criterion, token_ids, prefix_lens, num_new)
        assert ours == run_token_by_token(criteria, token_ids, prefix_lens, num_new)


def test_rows_keep_their_block_when_time_is_up() -> None:
    blocks = write((["a"], ["b", "c"]), (["a"], ["e", "c"]), (["a"], []))
    late = MaxTimeCriteria(10.0, initial_timestamp=time.time() - 100)
    assert ask(BlockStoppingCriteria([late]), *blocks) == StopVerdict(
        [2, 2, 0], [True, True, False]
    )
    with_eos = BlockStoppingCriteria([late, EosTokenCriteria(IDS["e"])])
    assert ask(with_eos, *blocks) == StopVerdict([2, 1, 0], [True, True, False])


def test_registered_criteria_are_called_by_length_until_a_stop() -> None:
    criterion = EndsOnSum(10_000)
    ask(
        BlockStoppingCriteria([criterion]),
        torch.ones(3, 9, dtype=torch.int64),
        [4, 4, 5],
        [2, 3, 1],
    )
    assert sorted(criterion.shapes) == [(1, 7), (2, 5), (3, 6)]
    criterion.shapes.clear()
    ask(
        BlockStoppingCriteria([criterion, EosTokenCriteria(IDS["e"])]),
        *write((["b"], ["b", "e", "b", "b"])),
    )
    assert sorted(criterion.shapes) == [(1, 2), (1, 3)]


def end_never(input_ids: Tensor, scores: Any) -> bool:
    return False


def test_unknown_criteria_are_refused_by_name() -> None:
    subclassed = type("SubclassedEos", (EosTokenCriteria,), {})(2)
    criterion = BlockStoppingCriteria(
        [EosTokenCriteria(1), subclassed, ConfidenceCriteria(0.4), end_never]
    )
    assert not criterion.is_row_wise
    assert [name_of(processor) for processor in criterion.foreign] == [
        "SubclassedEos",
        "ConfidenceCriteria",
        "end_never",
    ]
    with pytest.raises(UnsupportedGenerationError, match="SubclassedEos, ConfidenceCriteria"):
        ask(criterion, *write((["a"], ["b"])))


def test_transformers_criteria_are_all_classified() -> None:
    own = {
        StoppingCriteria,
        EosTokenCriteria,
        MaxLengthCriteria,
        MaxTimeCriteria,
        StopStringCriteria,
    }
    classes = inspect.getmembers(stopping_criteria, inspect.isclass)
    criteria = {cls for _, cls in classes if issubclass(cls, StoppingCriteria)}
    assert criteria == own | (criteria & set(NOT_ROW_WISE))


def test_decoder_reads_properties_of_criteria() -> None:
    criterion = BlockStoppingCriteria(CRITERIA["everything"]())
    assert (criterion.max_length, criterion.eos_token_ids) == (12, {IDS["e"]})
    nothing = BlockStoppingCriteria(StoppingCriteriaList())
    assert (nothing.max_length, nothing.eos_token_ids, nothing.is_row_wise) == (None, None, True)
