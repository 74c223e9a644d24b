"""Test the prior for a draft source, and the key under which measurements are stored."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.draft.assistant_model import AssistantModel
from hf_speculate.draft.custom import CustomSource
from hf_speculate.draft.prompt_lookup import PromptLookup
from hf_speculate.engine import draft_length
from hf_speculate.engine.step_weights import cost_ratio, draft_prior, step_weights
from hf_speculate.options.heads.source import HeadSource
from hf_speculate.options.sources.early_exit import EarlyExit
from hf_speculate.schedule import DraftPrior
from hf_speculate.types import DraftOut
from tests.cases import new_pair
from tests.options.heads.kinds import KINDS
from tests.options.heads.rounds import Rounds, random_texts
from tests.support.tiny import make_model, ragged_prompts
from tests.support.tiny_encoders import make_llava, make_qwen2_vl

# fraction of weights in norms, scales and biases, which no matrix product reads
OTHER_WEIGHTS = 0.1
NUM_NEW = 12


class Products(TorchFunctionMode):
    """Mode that counts the bytes of multiplied matrices.

    It counts each matrix once and ignores the given ones.
    """

    def __init__(self, left_out=()):
        super().__init__()
        self._left_out = {weight.data_ptr() for weight in left_out}
        self._matrices = {}

    @property
    def num_bytes(self):
        return sum(matrix.numel() * matrix.element_size() for matrix in self._matrices.values())

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is linear and args[1].data_ptr() not in self._left_out:
            self._matrices[args[1].data_ptr()] = args[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": True}, {"vocab_size": 512, "dtype": torch.bfloat16}]
)
def test_step_bytes_are_those_of_multiplied_matrices(options):
    model = make_model("llama", **options)
    with Products() as products, torch.no_grad():
        model(torch.tensor([[1]]))
    assert step_weights(model).num_bytes == pytest.approx(products.num_bytes, rel=OTHER_WEIGHTS)


@pytest.mark.parametrize("make_reader", [make_llava, make_qwen2_vl])
def test_step_bytes_leave_out_image_encoders(make_reader):
    model = make_reader()
    with Products() as products, torch.no_grad():
        model(torch.tensor([[1]]))
    assert step_weights(model).num_bytes == pytest.approx(products.num_bytes, rel=OTHER_WEIGHTS)


@pytest.mark.parametrize(
    "family", ["EAGLE-3", "P-EAGLE", "DFlash", "DFlash 2", "MTP, speculators", "PARD"]
)
def test_head_step_bytes_include_the_shared_lm_head(family, tmp_path):
    head, target = KINDS[family](tmp_path)
    rounds, shared = (
        Rounds(head, target, random_texts([6], seed=1)),
        target.get_output_embeddings().weight,
    )
    with Products(weight for weight in target.parameters() if weight is not shared) as products:
        rounds.draft(1)
    assert head.num_step_bytes(target) == pytest.approx(products.num_bytes, rel=OTHER_WEIGHTS)
    prior = draft_prior(target, HeadSource(head))
    assert prior.step_ratio == pytest.approx(
        head.num_step_bytes(target) / step_weights(target).num_bytes
    )
    assert prior.is_parallel is (family in ("P-EAGLE", "DFlash", "DFlash 2", "PARD"))


class Quantised(nn.Parameter):
    """Weight class as in a library that packs numbers."""


def test_prior_follows_the_source_and_its_weights():
    target, draft = new_pair()
    quantised = make_model("llama")
    quantised.model.norm.weight = Quantised(quantised.model.norm.weight.data, requires_grad=False)
    assert draft_prior(target, AssistantModel(draft)) == DraftPrior(1.0)
    assert draft_prior(target, PromptLookup()) == DraftPrior(0.0)
    assert draft_prior(target, CustomSource(Repeats)) == DraftPrior(None)
    assert step_weights(quantised).is_quantised
    assert not step_weights(target).is_quantised
    for model, assistant in ((quantised, draft), (target, quantised)):
        prior = draft_prior(model, AssistantModel(assistant))
        assert (prior.is_verification_known, prior.never_pays) == (False, False)
    assert DraftPrior(1.0).never_pays


@pytest.mark.fallback("as large as its target")
@pytest.mark.parametrize("is_quantised", [False, True])
def test_draft_as_large_as_its_target_is_reported_useless(is_quantised):
    target, draft = new_pair()
    if is_quantised:
        target.model.norm.weight = Quantised(target.model.norm.weight.data, requires_grad=False)
    stats = hf_speculate.SpeculationStats()
    target.generate(
        **ragged_prompts(1), assistant_model=draft, max_new_tokens=24, speculation_stats=stats
    )
    assert bool(stats.fallbacks) is not is_quantised


@pytest.fixture
def schedules(monkeypatch):
    """Collect the memories of all adaptive schedules in a call."""
    memories, find = [], draft_length.memory_of

    def spy(plan, config):
        memories.append(find(plan, config))
        return memories[-1]

    monkeypatch.setattr(draft_length, "memory_of", spy)
    return memories


class Repeats:
    """Drafter that repeats the last token of each row."""

    def __init__(self, setup, number=0):
        self.number = number

    def draft(self, request):
        ids = request.query_token_ids[:, -1:].repeat(1, request.num_draft_tokens)
        return DraftOut(ids, torch.full((len(ids),), ids.shape[1], dtype=torch.int32), None, None)

    def rows(self, indices):
        """Do nothing, because rows have no state."""


def described(text):
    factory = partial(Repeats, number=1)
    factory.description = text
    return factory


@pytest.mark.fallback("a draft model as large as its target")
def test_calls_of_the_same_source_share_a_history(schedules):
    target, draft = new_pair(noise=0.1)
    second_target = make_model("llama", num_hidden_layers=1)
    sources = {
        "early exit 1": [lambda: {"assistant_early_exit": 1}] * 2,
        "another model": [lambda: {"assistant_model": second_target}] * 2,
        "a model": [lambda: {"assistant_model": draft}] * 2,
        "a model and lookup": [
            lambda: {"assistant_model": second_target, "prompt_lookup_num_tokens": 3}
        ]
        * 2,
        "lookup": [lambda: {"prompt_lookup_num_tokens": 3}] * 2,
        "a described drafter": [lambda: {"drafter": described("one")}] * 2,
        "another description": [lambda: {"drafter": described("two")}] * 2,
        "a drafter by its class": [
            lambda: {"drafter": partial(Repeats, number=2)},
            lambda: {"drafter": Repeats},
        ],
        "a candidate generator": [lambda: {"candidate_generator": lookup_generator()}] * 2,
    }
    memories = {}
    for name, calls in sources.items():
        for number, options in enumerate(calls):
            target.generate(**ragged_prompts(1, seed=3), max_new_tokens=NUM_NEW, **options())
            is_adaptive = name != "a candidate generator"
            assert len(schedules) == is_adaptive, (name, number)
            if is_adaptive:
                memory = schedules.pop()
                assert memories.setdefault(name, memory) is memory, name
    assert len(set(map(id, memories.values()))) == len(sources) - 1


def lookup_generator():
    return PromptLookupCandidateGenerator(
        num_output_tokens=3, max_matching_ngram_size=2, max_length=100
    )


def test_early_exits_of_different_layers_have_separate_histories():
    sources = [EarlyExit(2), EarlyExit(3), AssistantModel(object())]
    assert len({source.history_key().name for source in sources}) == 3
    target = make_model("llama", num_hidden_layers=4)
    # every call creates a new object
    assert EarlyExit(2).resolve(target, {}).history_key().draft is None


def test_cost_ratio_of_a_pair_is_that_of_step_bytes():
    target, short = (
        make_model("llama", num_hidden_layers=4),
        make_model("llama", num_hidden_layers=1),
    )
    head = target.get_output_embeddings().weight
    num_head = head.numel() * head.element_size()
    layers = step_weights(short).num_bytes - num_head, step_weights(target).num_bytes - num_head
    assert layers[1] == pytest.approx(4 * layers[0], rel=0.02)
    assert cost_ratio(target, short) == pytest.approx(
        step_weights(short).num_bytes / step_weights(target).num_bytes
    )
