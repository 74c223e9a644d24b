"""The Drafter contract, and the draft model against its own plain `generate`."""

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_speculate.cache.dynamic import DynamicKVCache
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.models.inferencer import Inferencer
from hf_speculate.models.language_model import LanguageModel
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.triton_kernels.noise import row_seeds
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy
from tests.cases import each_value
from tests.tiny import KINDS, SLIDING_WINDOW, make_model, ragged_prompts

GREEDY, RANDOM = SampleStrategy.GREEDY, SampleStrategy.RANDOM
VOCAB_SIZE = 64
K = 4
LOGIT_TOLERANCE = 1e-9  # float64 round-off of attention over masked columns; wrong states differ by 1e-2 and more
FLOAT32_TOLERANCE = 1e-5  # distributions are rounded to float32, whose resolution at these magnitudes is 2e-6
Made = tuple[Drafter, DynamicKVCache | None]


class Texts:
    """Rows under way: feeds a drafter and rolls its cache back as the decoder does."""

    def __init__(self, made: Made, prompts: dict[str, Tensor]):
        self.drafter, self.kv_cache = made
        self.ids: list[list[int]] = prompts["input_ids"].tolist()  # padding included
        self.num_pads = (prompts["attention_mask"] == 0).sum(1).tolist()
        self.num_held = [0] * len(self.ids)
        self.kept: Kept | None = None
        self.num_rounds = 0
        self.seeds = row_seeds(7, len(self.ids))

    @property
    def real_ids(self) -> list[list[int]]:
        return [ids[num:] for ids, num in zip(self.ids, self.num_pads, strict=True)]

    @property
    def keys(self) -> NoiseKeys:
        positions = torch.tensor([len(ids) for ids in self.real_ids])
        return NoiseKeys(self.seeds, torch.full_like(self.seeds, self.num_rounds), positions)

    def draft(self, num_draft_tokens: int = K, strategy: SampleStrategy = GREEDY) -> DraftOut:
        """The next draft, which must be of the form that the decoder expects."""
        num_query = max(len(ids) - held for ids, held in zip(self.ids, self.num_held, strict=True))
        query = torch.tensor([ids[-num_query:] for ids in self.ids])
        self.num_rounds += 1
        self.drafted = draft = self.drafter.draft(
            DraftRequest(query, self.kv_cache, num_draft_tokens, strategy, self.keys, self.kept)
        )
        shape = len(self.ids), min(int(draft.lens.max()), num_draft_tokens)
        assert (draft.token_ids.shape, draft.lens.shape) == (shape, shape[:1])
        assert (draft.token_ids.dtype, draft.lens.dtype) == (torch.int64, torch.int32)
        assert 0 <= draft.token_ids.min() <= draft.token_ids.max() < VOCAB_SIZE
        if draft.token_logits is not None:
            expected = draft.token_logits.float().logsumexp(-1)
            assert torch.allclose(draft.logsumexp, expected, atol=FLOAT32_TOLERANCE, rtol=0)
        return draft

    def keep(self, num_accepted: list[int]) -> None:
        """Accept so many tokens of each row, and let an undrafted one follow."""
        drafted = self.drafted.token_ids
        held = [len(ids) + drafted.shape[1] - 1 for ids in self.ids]
        valid = [min(num, len(ids) + a) for num, ids, a in zip(held, self.ids, num_accepted, strict=True)]
        block = torch.full((len(self.ids), drafted.shape[1] + 1), -1)
        for row, accepted in enumerate(num_accepted):
            refused = int(drafted[row, min(accepted, drafted.shape[1] - 1)]) if drafted.shape[1] else 0
            emitted = [*drafted[row, :accepted].tolist(), refused % (VOCAB_SIZE - 1) + 1]
            block[row, : len(emitted)] = torch.tensor(emitted)
            self.ids[row] += emitted
        num_query = max(len(ids) - seen for ids, seen in zip(self.ids, valid, strict=True))
        self.num_held = [len(ids) - num_query for ids in self.ids]
        if self.kv_cache is not None:
            self.kv_cache.crop([num - keep for num, keep in zip(held, self.num_held, strict=True)])
        self.kept = Kept(block, torch.tensor(num_accepted, dtype=torch.int32) + 1)

    def rows(self, indices: list[int]) -> None:
        self.drafter.rows(indices)
        if self.kv_cache is not None:
            self.kv_cache.rows(indices)
        if self.kept is not None:
            self.kept = Kept(self.kept.token_ids[indices], self.kept.num_emitted[indices])
        self.seeds = self.seeds[indices]
        for name in ("ids", "num_pads", "num_held"):
            setattr(self, name, [getattr(self, name)[row] for row in indices])


class DrafterContract:
    """What every implementation keeps; a subclass makes a drafter of `VOCAB_SIZE` ids that stops for nothing."""

    draws = True  # it samples where it is asked to, and does not stay a point mass

    def make(self, batch_size: int, attention_mask: Tensor | None = None) -> Made:
        raise AssertionError("a subclass makes the drafter and its cache")

    def texts(self, batch_size: int, seed: int = 3) -> Texts:
        prompts = ragged_prompts(batch_size, seed=seed)
        return Texts(self.make(batch_size, prompts["attention_mask"]), prompts)

    def test_requests_that_cannot_be_are_refused(self):
        drafter, kv_cache = self.make(1)
        request = DraftRequest(torch.ones(1, 3, dtype=torch.int64), kv_cache, K, GREEDY)
        for changes, error, name in (
            ({"num_draft_tokens": 0}, ConfigError, "num_draft_tokens"),
            ({"query_token_ids": torch.zeros(2, 0)}, ShapeError, r"\[B, Q\]"),
            ({"sample_strategy": RANDOM}, ConfigError, "keys must be given"),
        ):
            with pytest.raises(error, match=name):
                drafter.draft(request._replace(**changes))

    @each_value(strategy=[GREEDY, RANDOM], indices=[[0, 1, 2], [2, 0], [1], [0, 2]])
    def test_rows_of_a_batch_draft_on_as_if_each_read_its_text_afresh(self, strategy, indices):
        texts = self.texts(3)
        for num_accepted in ([0, 2, K], [K, K, K], [1, 0, 3], [K, 0, 0], [0, 0, 0]):
            most = texts.draft(K, strategy).token_ids.shape[1]
            texts.keep([min(num, most) for num in num_accepted])
        texts.rows(indices)
        draft = texts.draft(K, strategy)
        assert (draft.token_logits is not None) == (strategy is RANDOM and self.draws)
        for row, ids in enumerate(texts.real_ids):
            drafter, kv_cache = self.make(1)
            keys = texts.keys.rows(torch.tensor([row]))
            alone = drafter.draft(DraftRequest(torch.tensor([ids]), kv_cache, K, strategy, keys))
            num = int(alone.lens[0])
            assert int(draft.lens[row]) == num
            assert torch.equal(draft.token_ids[row, :num], alone.token_ids[0, :num])
            if draft.token_logits is not None:
                logits = draft.token_logits[row, :num], alone.token_logits[0, :num]
                assert torch.allclose(*logits, atol=LOGIT_TOLERANCE, rtol=0)


def make_drafter(
    model: PreTrainedModel,
    batch_size: int,
    attention_mask: Tensor | None = None,
    processors: list | None = None,
    **settings,
) -> tuple[ModelDrafter, DynamicKVCache]:
    block = BlockLogitsProcessorList(processors or [])
    drafter = ModelDrafter(Inferencer(LanguageModel(model)), block, DraftSettings(**settings))
    return drafter, DynamicKVCache(DynamicCache(), batch_size, attention_mask)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_model("llama")


def greedy_draft(model: PreTrainedModel, prompts: dict[str, Tensor], num: int, **options) -> DraftOut:
    made = make_drafter(model, len(prompts["input_ids"]), prompts["attention_mask"], **options)
    return Texts(made, prompts).draft(num)


class TestModelDrafter(DrafterContract):
    def make(self, batch_size, attention_mask=None):
        return make_drafter(make_model("llama"), batch_size, attention_mask)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_equal_the_models_own_generate(kind):
    model = make_model(kind)
    prompts = ragged_prompts(3, seed=4, max_len=2 * SLIDING_WINDOW)
    expected = model.generate(**prompts, max_new_tokens=SLIDING_WINDOW + 2)[:, prompts["input_ids"].shape[1] :]
    draft = greedy_draft(model, prompts, SLIDING_WINDOW + 2)
    assert torch.equal(draft.token_ids, expected)


def test_processors_read_padding_and_the_text_that_was_kept_in_all_rounds(llama):
    prompts = ragged_prompts(3, seed=9)
    made = make_drafter(llama, 3, prompts["attention_mask"], processors=[RepetitionPenaltyLogitsProcessor(1.6)])
    texts = Texts(made, prompts)
    for num_accepted in ([0, 2, K], [K, 1, 0], [3, K, 2]):
        texts.draft()
        texts.keep(num_accepted)
    texts.rows([2, 0])
    draft, num_changed = texts.draft(), 0
    for ids, text, num_pads in zip(draft.token_ids, texts.ids, texts.num_pads, strict=True):
        inputs = {"input_ids": torch.tensor([text]), "attention_mask": (torch.arange(len(text)) >= num_pads)[None]}
        free, processed = (llama.generate(**inputs, max_new_tokens=K, repetition_penalty=n) for n in (1.0, 1.6))
        assert torch.equal(ids, processed[0, -K:])
        num_changed += int((ids != free[0, -K:]).sum())
    assert num_changed > 0


def test_the_distribution_handed_over_is_the_processed_one(llama):
    warp = LogitsProcessorList([TemperatureLogitsWarper(0.6), TopKLogitsWarper(5)])
    texts = Texts(make_drafter(llama, 2, processors=list(warp)), ragged_prompts(2, seed=9, min_len=6, max_len=6))
    draft = texts.draft(K, RANDOM)
    for row, ids in enumerate(texts.ids):
        whole = torch.tensor([ids + draft.token_ids[row].tolist()])
        expected = warp(whole, llama(whole).logits[0, -K - 1 : -1]).float()
        assert torch.equal(draft.token_logits[row].isinf(), expected.isinf())
        assert torch.allclose(draft.token_logits[row].float(), expected, atol=FLOAT32_TOLERANCE, rtol=0)


def test_drafting_ends_early_only_when_every_row_has_met_its_eos(llama):
    prompts = ragged_prompts(3, seed=4)
    whole = greedy_draft(llama, prompts, 8).token_ids
    texts = Texts(make_drafter(llama, 3, prompts["attention_mask"], eos_token_ids=whole[:, 1]), prompts)
    all_meet = texts.draft(8)
    assert all_meet.token_ids.shape[1] == all_meet.lens.max() < 8
    assert texts.kv_cache.get_num_tokens() == 12 + all_meet.token_ids.shape[1] - 1
    only_first = next(token for token in whole[0].tolist() if token not in whole[1:])
    one_meets = greedy_draft(llama, prompts, 8, eos_token_ids=torch.tensor([only_first]))
    assert one_meets.token_ids.shape[1] == 8
    assert one_meets.lens[0] < 8
    assert one_meets.lens[1:].tolist() == [8, 8]


def test_the_confidence_is_that_of_the_processed_distribution(llama):
    prompts = ragged_prompts(2, seed=4)
    sure = greedy_draft(llama, prompts, 4, confidence_threshold=0.9, processors=[TopKLogitsWarper(1)])
    assert sure.lens.tolist() == [4, 4]
    unsure = greedy_draft(llama, prompts, 4, confidence_threshold=0.9, processors=[TemperatureLogitsWarper(1e3)])
    assert unsure.lens.tolist() == [1, 1]
    assert unsure.token_ids.shape[1] == 1
