"""A target split over processes decodes as one process would, and no process ever chooses otherwise than the others."""

import functools
import random
import types

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.generation import stopping_criteria

import hf_speculate
from hf_speculate.engine.distributed import tensor_parallel_group
from hf_speculate.engine.plan import cost_ratio
from hf_speculate.engine.stage_clock import StageClock
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.generation import decoding_method
from tests.cases import Unchanged
from tests.generation.test_compiled import compile_config
from tests.generation.test_passed_caches import STATE_TOLERANCE
from tests.generation.test_synced import COUPLED, NUM_NEW, NUM_RANKS, SAMPLED, K, join, of_all_ranks, run_in_every_rank
from tests.tiny import make_model, noisy_copy, ragged_prompts

KINDS = ("llama", "mistral_window", "qwen2_moe")
SMALL = {"num_hidden_layers": 1, "intermediate_size": 16}  # below half of the target, which is what a process holds
ADAPTIVE = {"num_assistant_tokens_schedule": "adaptive", "num_assistant_tokens": 5}

# What a call is given beside its prompt. Names that begin with "is_" or say whose they are belong to the test:
# "draft" names a model, "ends" whether rows end by an EOS.
CALLS = {
    "one row": {**K, "num_rows": 1},
    "a batch": {**K, "ends": True},
    "dynamic": {**K, "speculation_cache": "dynamic", "ends": True},
    "window": {**K, "kind": "mistral_window", "ends": True},
    "experts": {**K, "kind": "qwen2_moe"},
    "rejection": {**K, **SAMPLED},
    "block": {**K, **SAMPLED, "verifier": "block"},
    "typical": {**K, **SAMPLED, "verifier": "typical"},
    "coupled": {**K, **COUPLED},
    "alone": {**COUPLED, "draft": None},
    "adaptive": {**ADAPTIVE, "draft": "small", "ends": True},
    "lock step": {**K, "logits_processor": [Unchanged()], "ends": True},
    "early exit": {**K, "draft": None, "assistant_early_exit": 1},
    "copying beside a draft": {**K, "prompt_lookup_num_tokens": 4},
    "heuristic, unsure": {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.6},
}


class Jumping:
    """A clock whose every reading is some seconds later, by a generator of its own."""

    def __init__(self, seed):
        self.random, self.now_s = random.Random(seed), 0.0

    def __call__(self):
        self.now_s += self.random.expovariate(1.0)
        return self.now_s


class Until(StoppingCriteria):
    """Fires once it was asked often enough."""

    def __init__(self, num_calls):
        self.num_left = num_calls

    def __call__(self, input_ids, scores, **kwargs):
        self.num_left -= 1
        return torch.full((input_ids.shape[0],), self.num_left < 0)


def clock(rank, is_due):
    """What `max_time` reads; it is over in one process only, which would leave the others alone in the next forward."""
    return types.SimpleNamespace(time=functools.partial(next, iter([0.0] + [1e6 * is_due] * 1000)))


# Calls in which each process would choose for itself: what it is given there, by its rank.
APART = {
    "clocks": lambda rank: {**ADAPTIVE, "draft": "small"},
    "seeds": lambda rank: {**K, "do_sample": True},
    "drafts": lambda rank: {**K, **SAMPLED, "draft": "each its own"},
    "time never": lambda rank: {**K, "max_time": 100.0, "time": clock(rank, rank == 1)},
    "time at once": lambda rank: {**K, "max_time": 100.0, "time": clock(rank, rank == 0)},
    "criteria": lambda rank: {**K, "stopping_criteria": [Until(6 if rank == 0 else 2)]},
    "compiled": lambda rank: {**K, "draft": "small", "compile_config": compile_config()},
}


def assert_equal_everywhere(ids, name):
    assert all(torch.equal(ids, other) for other in of_all_ranks(ids)), name


def run_apart(models, rank, name):
    """A call in which each process would choose for itself: all do what the first one chose."""
    target, whole = models["llama"]
    inputs, options, stats = ragged_prompts(3, seed=1), APART[name](rank), hf_speculate.SpeculationStats()
    drafts, time = draft_of(whole, options.pop("draft", "noisy"), rank), options.pop("time", None)
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as patch:
        if name == "clocks":
            patch.setattr(decoding_method, "StageClock", functools.partial(StageClock, Jumping(rank)))
        if time:
            patch.setattr(stopping_criteria, "time", time)
        ids = target.generate(**inputs, max_new_tokens=NUM_NEW, **options, **drafts, speculation_stats=stats)
    assert_equal_everywhere(ids, name)
    assert_equal_everywhere(torch.tensor(sorted(stats.rounds_by_draft_len.items())), name)
    first = draft_of(whole, "each its own" if name == "drafts" else "noisy", 0)
    alone = whole.generate(**inputs, max_new_tokens=NUM_NEW, **K, **(SAMPLED if name == "drafts" else {}), **first)
    if name in ("clocks", "drafts", "time never", "compiled"):
        assert torch.equal(ids, alone), name
    num_new = ids.shape[1] - inputs["input_ids"].shape[1]
    assert name != "time at once" or num_new < NUM_NEW
    assert name != "criteria" or num_new == 7  # asked once a token, the seventh fires
    assert name != "clocks" or len(stats.rounds_by_draft_len) > 1
    assert name != "compiled" or stats.compiled == ["draft"]  # and not the split target


def loaded(folder, kind):
    """The split model, and the whole one."""
    options = {"experts_implementation": "eager"} if kind == "qwen2_moe" else {}  # as in tests/tiny.py
    model = AutoModelForCausalLM.from_pretrained(folder / kind, tp_plan="auto", dtype=torch.float64, **options)
    return hf_speculate.enable(model), hf_speculate.enable(make_model(kind))


def draft_of(target, draft, rank):
    if draft == "small":
        return {"assistant_model": make_model("llama", **SMALL)}
    return {"assistant_model": noisy_copy(target, seed=1 + rank * (draft == "each its own"))} if draft else {}


def run_call(models, name):
    """One call, on the split model and on the whole one."""
    own = {"kind": "llama", "draft": "noisy", "ends": False, "num_rows": 3, **CALLS[name]}
    kind, draft, ends, num_rows = map(own.pop, ("kind", "draft", "ends", "num_rows"))
    (target, whole), inputs = models[kind], ragged_prompts(num_rows, seed=1)
    own |= {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, **draft_of(whole, draft, 0)}
    if ends:
        own["eos_token_id"] = whole.generate(**inputs, max_new_tokens=NUM_NEW)[:, 5 - NUM_NEW].tolist()
    alone, ours = whole.generate(**inputs, **own), target.generate(**inputs, **own)
    assert_equal_everywhere(ours.sequences, name)
    assert torch.equal(alone.sequences, ours.sequences), name
    for one, other in zip(alone.past_key_values.layers, ours.past_key_values.layers, strict=True):
        for states, part in ((one.keys, other.keys), (one.values, other.values)):
            of_rank = states.chunk(NUM_RANKS, dim=1)[dist.get_rank()]
            assert torch.allclose(of_rank, part, atol=STATE_TOLERANCE, rtol=0), name
    assert ours.speculation.num_accepted == alone.speculation.num_accepted or "adaptive" in name, name
    assert ours.speculation.num_drafted > 0 or name == "alone", name
    assert ours.speculation.lock_step == (name == "lock step"), name


def run_rank(rank, port, folder):
    join(rank, port)
    models = {kind: loaded(folder, kind) for kind in KINDS}
    for name in CALLS:
        run_call(models, name)
    for name in APART:
        run_apart(models, rank, name)
    split, whole = (cost_ratio(one, make_model("llama", num_hidden_layers=1)) for one in models["llama"])
    assert split == pytest.approx(NUM_RANKS * whole, rel=0.01)  # a split target costs its part
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_of_a_split_target_decode_what_one_would_and_do_what_the_first_one_chose(tmp_path):
    for kind in KINDS:
        make_model(kind).save_pretrained(tmp_path / kind)
    run_in_every_rank(run_rank, tmp_path)


def test_a_target_in_stages_is_not_supported():
    target, draft = make_model("llama"), make_model("llama", seed=1)
    target.config.distributed_config = types.SimpleNamespace(pp_size=2)
    with pytest.raises(UnsupportedModelError, match="must lie whole in every process or be split by tensor parallel"):
        hf_speculate.generate(target, **ragged_prompts(1), max_new_tokens=2, assistant_model=draft)


@pytest.mark.parametrize(
    ("dim_names", "found"), [([("fsdp",), ("fsdp", "tp")], 1), ([("tp",)], 0), ([None], 0), ([("fsdp",)], None)]
)
def test_the_processes_are_those_of_the_parts_and_not_those_of_fsdp(dim_names, found):
    meshes = [types.SimpleNamespace(mesh_dim_names=names, get_group=lambda dim: dim) for names in dim_names]
    weights = [torch.zeros(2), *(types.SimpleNamespace(device_mesh=mesh) for mesh in meshes)]
    model = types.SimpleNamespace(tp_size=2, parameters=lambda: weights)
    shards = tensor_parallel_group([model], torch.device("cpu"))
    assert (None if shards is None else shards.group) == found
