"""Compare blocks of positions with transformers' processor list, run position by position."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkLogitsProcessor
from transformers.generation import logits_process

from hf_speculate.errors import ConfigError, UnsupportedGenerationError
from hf_speculate.processors import BlockLogitsProcessorList, register_row_wise
from hf_speculate.processors.registry import NOT_ROW_WISE, READS

VOCAB_SIZE = 41
LONGEST_LEN = 9
RAGGED_LENS = [9, 3, 6, 9]
TAKES_EMPTY_PREFIXES = (
    "MinLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
)
IGNORES_BY_ROW = "Tensor" in str(
    inspect.signature(transformers.RepetitionPenaltyLogitsProcessor.__init__)
)

# The settings change results for prefix lengths of 3 to 13, as in the blocks below.
EXAMPLES: dict[str, Callable[[], Any]] = {
    "EpsilonLogitsWarper": lambda: transformers.EpsilonLogitsWarper(3e-3),
    "EtaLogitsWarper": lambda: transformers.EtaLogitsWarper(3e-3),
    "MinPLogitsWarper": lambda: transformers.MinPLogitsWarper(0.05),
    "TemperatureLogitsWarper": lambda: transformers.TemperatureLogitsWarper(0.7),
    "TopHLogitsWarper": lambda: transformers.TopHLogitsWarper(0.4),
    "TopKLogitsWarper": lambda: transformers.TopKLogitsWarper(7),
    "TopPLogitsWarper": lambda: transformers.TopPLogitsWarper(0.8),
    "TypicalLogitsWarper": lambda: transformers.TypicalLogitsWarper(0.8),
    "AlternatingCodebooksLogitsProcessor": lambda: transformers.AlternatingCodebooksLogitsProcessor(
        3, 20, 10
    ),
    "BarkEosPrioritizerLogitsProcessor": lambda: logits_process.BarkEosPrioritizerLogitsProcessor(
        [2, 5], 0.05
    ),
    "ExponentialDecayLengthPenalty": lambda: transformers.ExponentialDecayLengthPenalty(
        (4, 1.3), [2, 5], 3
    ),
    "ForcedBOSTokenLogitsProcessor": lambda: transformers.ForcedBOSTokenLogitsProcessor(1),
    "ForcedEOSTokenLogitsProcessor": lambda: transformers.ForcedEOSTokenLogitsProcessor(10, [2, 5]),
    "InfNanRemoveLogitsProcessor": transformers.InfNanRemoveLogitsProcessor,
    "LogitNormalization": transformers.LogitNormalization,
    "MinLengthLogitsProcessor": lambda: transformers.MinLengthLogitsProcessor(8, [2, 5]),
    "MinNewTokensLengthLogitsProcessor": lambda: transformers.MinNewTokensLengthLogitsProcessor(
        3, 5, 2
    ),
    "NoBadWordsLogitsProcessor": lambda: transformers.NoBadWordsLogitsProcessor(
        [[1], [2, 3], [4, 1, 2], [5]], 5
    ),
    "NoRepeatNGramLogitsProcessor": lambda: transformers.NoRepeatNGramLogitsProcessor(2),
    "RepetitionPenaltyLogitsProcessor": lambda: transformers.RepetitionPenaltyLogitsProcessor(1.3),
    "NoRepeatNGramLogitsProcessor of one": lambda: transformers.NoRepeatNGramLogitsProcessor(1),
    "RepetitionPenaltyLogitsProcessor without prompt": lambda: (
        transformers.RepetitionPenaltyLogitsProcessor(1.3, 5)
    ),
    "SequenceBiasLogitsProcessor": lambda: transformers.SequenceBiasLogitsProcessor(
        {(1,): 2.0, (2, 3): -3.0}
    ),
    "SuppressTokensAtBeginLogitsProcessor": lambda: (
        transformers.SuppressTokensAtBeginLogitsProcessor([1, 4], 9)
    ),
    "SuppressTokensLogitsProcessor": lambda: transformers.SuppressTokensLogitsProcessor([1, 4]),
    "WatermarkLogitsProcessor": lambda: WatermarkLogitsProcessor(
        VOCAB_SIZE, "cpu", seeding_scheme="selfhash"
    ),
    "WhisperTimeStampLogitsProcessor": lambda: transformers.WhisperTimeStampLogitsProcessor(
        SimpleNamespace(
            no_timestamps_token_id=5, eos_token_id=2, bos_token_id=1, max_initial_timestamp_index=3
        ),
        6,
    ),
}


class Block(SimpleNamespace):
    def __init__(self, lens: list[int], *, vocab_size: int = VOCAB_SIZE, num_draft_tokens: int = 4):
        """Draw ids from a small alphabet, so n-grams repeat, and scores with infinities."""
        generator = torch.Generator().manual_seed(0)
        # [B, K+1, V]
        scores = torch.randn(len(lens), num_draft_tokens + 1, vocab_size, generator=generator) * 3
        # [B, T]
        self.input_ids = torch.randint(0, 7, (len(lens), LONGEST_LEN), generator=generator)
        self.scores = scores.masked_fill(
            torch.rand(scores.shape, generator=generator) < 0.05, -torch.inf
        )
        # [B, K]
        self.draft_token_ids = torch.randint(
            0, 7, (len(lens), num_draft_tokens), generator=generator
        )
        self.prefix_lens = lens


def run_by_position(make: Callable[[], list[Any]], block: Block) -> Tensor:
    """Run batches of equal length as plain `generate` does, and keep the rows of that length."""
    processors = LogitsProcessorList(make())
    processed = torch.empty_like(block.scores, dtype=torch.float32)
    for position in range(block.scores.shape[1]):
        for prefix_len in set(block.prefix_lens):
            rows = [row for row, length in enumerate(block.prefix_lens) if length == prefix_len]
            batch_ids = block.input_ids.new_ones(len(block.scores), prefix_len + position)
            batch_ids[rows, :prefix_len] = block.input_ids[rows, :prefix_len]
            batch_ids[rows, prefix_len:] = block.draft_token_ids[rows, :position]
            batch_scores = block.scores[:, position].to(torch.float32, copy=True)
            processed[rows, position] = processors(batch_ids, batch_scores)[rows]
    return processed


def run_block(processors: list[Any], block: Block) -> Tensor:
    return BlockLogitsProcessorList(processors)(
        block.input_ids,
        block.scores,
        draft_token_ids=block.draft_token_ids,
        prefix_lens=block.prefix_lens,
    )


def assert_same_bits(ours: Tensor, twin: Tensor) -> None:
    """Compare bits, so -0.0 differs from 0.0, and a NaN equals itself."""
    assert ours.dtype == twin.dtype == torch.float32
    assert ours.shape == twin.shape
    assert torch.equal(ours.contiguous().view(torch.int32), twin.contiguous().view(torch.int32))


def test_transformers_processors_are_all_classified() -> None:
    classes = inspect.getmembers(logits_process, inspect.isclass)
    known = {
        cls for _, cls in classes if issubclass(cls, LogitsProcessor) and cls is not LogitsProcessor
    }
    assert {cls for cls in known if (cls in READS) == (cls in NOT_ROW_WISE)} == set()
    assert {type(make()) for make in EXAMPLES.values()} == known & set(READS)


@register_row_wise
class FavoursFrequent(LogitsProcessor):
    """Custom processor that favours frequent tokens.

    It writes to its argument and records the shapes of its calls.
    """

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
        scores += torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones(input_ids.shape))
        return scores


@pytest.mark.parametrize(("name", "make"), [*EXAMPLES.items(), ("a user's", FavoursFrequent)])
def test_block_equals_position_by_position(name: str, make: Callable[[], Any]) -> None:
    blocks = [
        Block([LONGEST_LEN] * 3),
        Block(RAGGED_LENS),
        Block([1, 4]),
        Block(RAGGED_LENS, num_draft_tokens=0),
    ]
    blocks += [Block([0, 3])] * (name in TAKES_EMPTY_PREFIXES)
    blocks[1].scores = blocks[1].scores.bfloat16()
    for block in blocks:
        before = [block.input_ids.clone(), block.scores.clone(), block.draft_token_ids.clone()]
        assert_same_bits(run_block([make()], block), run_by_position(lambda: [make()], block))
        after = (block.input_ids, block.scores, block.draft_token_ids)
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    block = Block([1, 3, 6, 9])
    if name == "InfNanRemoveLogitsProcessor":
        block.scores[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert not torch.equal(run_block([make()], block), block.scores), "the example changes nothing"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_scores_keep_nan_of_logits_unless_the_class_hides_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Find rounds with NaN by their scores, unless a processor hides NaN or fails on NaN."""
    # Some processors fail on NaN only until the process has compiled something.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    are_nan = []
    for block in (Block([1, 4]), Block(RAGGED_LENS)):
        block.scores[0] = torch.nan
        with suppress(ValueError):
            are_nan.append(bool(run_block([EXAMPLES[name]()], block)[0].isnan().any(-1).all()))
    assert BlockLogitsProcessorList([EXAMPLES[name]()]).keep_nan == (are_nan == [True, True])
    assert not BlockLogitsProcessorList([FavoursFrequent()]).keep_nan


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_hostile_draft_id_changes_no_earlier_position(name: str) -> None:
    block, faults = Block(RAGGED_LENS), [(0, -1), (1, VOCAB_SIZE), (2, -(2**40)), (4, 2**40)]
    expected = run_block([EXAMPLES[name]()], block)
    for row, (draft_len, hostile_id) in enumerate(faults):
        block.draft_token_ids[row, draft_len:] = hostile_id
    before = block.draft_token_ids.clone()
    ours = run_block([EXAMPLES[name]()], block)
    assert torch.equal(block.draft_token_ids, before)
    for row, (draft_len, _) in enumerate(faults):
        assert_same_bits(ours[row, : draft_len + 1], expected[row, : draft_len + 1])


WARPERS = ("Temperature", "TopK", "TopP", "MinP", "Typical")
HEAT, TOP_K, TOP_P, MIN_P, TYPICAL = (EXAMPLES[f"{name}LogitsWarper"]() for name in WARPERS)
PENALTY = EXAMPLES["RepetitionPenaltyLogitsProcessor"]()
KEEPS_3, FILLS_K = (
    transformers.TopPLogitsWarper(0.1, min_tokens_to_keep=3),
    transformers.TopKLogitsWarper(5, -7.0),
)
SUBCLASSED = type("Subclassed", (transformers.TopKLogitsWarper,), {})(5)
CUTS = [
    *([transformers.TopPLogitsWarper(share)] for share in (0.0, 1.0)),
    *([transformers.TopKLogitsWarper(num)] for num in (1, 10**6)),
    [transformers.TopPLogitsWarper(0.1, min_tokens_to_keep=10**6)],
    [transformers.TopPLogitsWarper(0.5, filter_value=-7.0)],
    *([KEEPS_3], [FILLS_K], [TOP_K, TOP_P], [TOP_P, TOP_K]),
]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 4099])
@pytest.mark.parametrize("cuts", CUTS)
def test_cutoffs_of_hostile_rows_equal_transformers(cuts: list[Any], vocab_size: int) -> None:
    block = Block([LONGEST_LEN] * 5, vocab_size=vocab_size, num_draft_tokens=1)
    block.scores[0, 0] = block.scores[0, 0].round()  # ties
    block.scores[0, 1] = 0.0
    block.scores[0, 1, ::2] = -0.0
    block.scores[1, 0] = block.scores[1, 1, 1:] = -torch.inf
    block.scores[2, 0, 3] = block.scores[2, 1] = torch.nan
    block.scores[3, 0, 5] = block.scores[3, 1, 4:] = torch.inf
    assert_same_bits(run_block(cuts, block), run_by_position(lambda: cuts, block))


@pytest.mark.skipif(not IGNORES_BY_ROW, reason="this version takes one number for all rows")
def test_ignored_padding_follows_its_row() -> None:
    def make() -> list[transformers.LogitsProcessor]:
        return [transformers.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([0, 2, 5, 8]))]

    block, row_indices = Block(RAGGED_LENS), [3, 1]
    expected = run_by_position(make, block)
    assert_same_bits(run_block(make(), block), expected)
    processors, lens = (
        BlockLogitsProcessorList(make()).rows(row_indices),
        [RAGGED_LENS[row] for row in row_indices],
    )
    ours = processors(
        block.input_ids[row_indices],
        block.scores[row_indices],
        block.draft_token_ids[row_indices],
        lens,
    )
    assert_same_bits(ours, expected[row_indices])


BY_PROMPT = {
    **{
        f"n-grams of {num}": lambda ids, num=num: (
            logits_process.EncoderNoRepeatNGramLogitsProcessor(num, ids)
        )
        for num in (1, 2, 5)
    },
    "penalty": lambda ids: logits_process.EncoderRepetitionPenaltyLogitsProcessor(1.7, ids),
}


@pytest.mark.parametrize("num_prompts", [4, 2, 1])
@pytest.mark.parametrize("name", BY_PROMPT)
def test_prompt_state_of_processors_is_held_by_row(name: str, num_prompts: int) -> None:
    prompts = torch.randint(0, 7, (num_prompts, 4000), generator=torch.Generator().manual_seed(3))
    block, row_indices = Block(RAGGED_LENS), [3, 1]
    expected = run_by_position(lambda: [BY_PROMPT[name](prompts)], block)
    assert not torch.equal(expected, block.scores), "the example changes nothing"
    processors = BlockLogitsProcessorList([BY_PROMPT[name](prompts)]).by_row(4)
    # older versions accept only as many rows as there are prompts
    if name == "penalty" and torch.equal(expected[3], block.scores[3]):
        assert len(processors.foreign) == 1
        return
    assert_same_bits(run_block(processors, block), expected)
    assert not processors.row_wise_part()
    lens, ids = [RAGGED_LENS[row] for row in row_indices], block.input_ids[row_indices]
    ours = processors.rows(row_indices)(
        ids, block.scores[row_indices], block.draft_token_ids[row_indices], lens
    )
    assert_same_bits(ours, expected[row_indices])
    fewer = block.scores[row_indices][
        :, :1, :5
    ]  # a draft model may have fewer ids than the prompts
    assert_same_bits(
        processors.rows(row_indices).for_draft()(ids, fewer, prefix_lens=lens),
        expected[row_indices][:, :1, :5],
    )


def test_uneven_prompt_counts_keep_transformers_processors() -> None:
    prompts = torch.ones(2, 3, dtype=torch.int64)
    processors = [BY_PROMPT[name](prompts) for name in ("n-grams of 2", "penalty")]
    assert BlockLogitsProcessorList(processors).by_row(3).foreign == processors


def add_nothing(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores


def test_unknown_processors_are_refused_in_a_block() -> None:
    block, parts = Block([LONGEST_LEN] * 3), [SUBCLASSED, TOP_K, add_nothing, PENALTY]
    processors = BlockLogitsProcessorList(parts)
    assert list(processors.row_wise_part()) == [TOP_K, PENALTY]
    plain = LogitsProcessorList(parts)(block.input_ids, block.scores[:, 0])
    assert_same_bits(processors(block.input_ids, block.scores[:, 0]), plain)
    with pytest.raises(UnsupportedGenerationError, match="Subclassed, add_nothing"):
        run_block(processors, block)


@pytest.mark.parametrize("name", ["NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor"])
def test_draft_model_may_have_another_vocabulary_size(name: str) -> None:
    target = BlockLogitsProcessorList([EXAMPLES[name]()])
    block, wider = Block(RAGGED_LENS), Block(RAGGED_LENS, vocab_size=VOCAB_SIZE + 3)
    for _ in range(2):
        assert_same_bits(
            run_block(target, block), run_by_position(lambda: [EXAMPLES[name]()], block)
        )
        assert_same_bits(
            run_block(target.row_wise_part(), wider),
            run_by_position(lambda: [EXAMPLES[name]()], wider),
        )


def test_registered_class_runs_in_blocks_by_length() -> None:
    processor = FavoursFrequent()
    run_block([processor], Block([6, 8]))
    assert sorted(processor.shapes) == [(1, 6), (1, 7), (1, 11), (1, 12), (2, 8), (2, 9), (2, 10)]


@pytest.mark.parametrize(
    "wrong", [int, add_nothing, transformers.SynthIDTextWatermarkLogitsProcessor]
)
def test_invalid_and_row_mixing_classes_cannot_be_registered(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"LogitsProcessor or StoppingCriteria|history of contexts"
    ):
        register_row_wise(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "TopKLogitsWarper"]
)
def test_block_on_a_gpu_equals_plain_processors_there(name: str) -> None:
    block = Block(RAGGED_LENS)
    block.input_ids, block.scores = block.input_ids.cuda(), block.scores.cuda()
    block.draft_token_ids = block.draft_token_ids.cuda()
    # GPUs divide by multiplying with the reciprocal, so their bits differ from the CPU's.
    assert_same_bits(
        run_block([EXAMPLES[name]()], block), run_by_position(lambda: [EXAMPLES[name]()], block)
    )
