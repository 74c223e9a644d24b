"""A target split over processes decodes as one process would, and no process ever chooses otherwise than the others."""

import functools
import os
import random
import socket
import types

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.generation import stopping_criteria

import hf_speculate
from hf_speculate.engine import builder as build
from hf_speculate.engine.distributed import tensor_parallel_group
from hf_speculate.engine.plan import cost_ratio
from hf_speculate.engine.stage_clock import StageClock
from hf_speculate.errors import UnsupportedModelError
from hf_speculate.generation import decoding_method
from hf_speculate.models import folded_attention as attention
from tests.cases import Unchanged
from tests.generation.test_compiled import compile_config
from tests.tiny import make_model, noisy_copy, ragged_prompts

NUM_RANKS = 2
NUM_NEW = 16
KINDS = ("llama", "mistral_window", "qwen2_moe")
SMALL = {"num_hidden_layers": 1, "intermediate_size": 16}  # below half of the target, which is what a process holds
STATE_TOLERANCE = 1e-9  # float64 round-off between sums of different order
SEED = {"do_sample": True, "seed": 3}
K = {"num_assistant_tokens": 3}
ADAPTIVE = {"num_assistant_tokens_schedule": "adaptive", "num_assistant_tokens": 5}

# What a call is given beside its prompt. Names that begin with "is_" or say whose they are belong to the test:
# "draft" names a model, "ends" whether rows end by an EOS.
CALLS = {
    "one row": {**K, "num_rows": 1},
    "a batch": {**K, "ends": True},
    "dynamic": {**K, "speculation_cache": "dynamic", "ends": True},
    "preallocated": {**K, "speculation_cache": "preallocated", "ends": True},
    "window": {**K, "kind": "mistral_window", "ends": True},
    "experts": {**K, "kind": "qwen2_moe"},
    "rejection": {**K, **SEED},
    "block": {**K, **SEED, "verifier": "block"},
    "typical": {**K, **SEED, "verifier": "typical"},
    "coupled": {**K, **SEED, "verifier": "coupled"},
    "alone": {**SEED, "verifier": "coupled", "draft": None},
    "adaptive": {**ADAPTIVE, "draft": "small", "ends": True},
    "lock step": {**K, "logits_processor": [Unchanged()], "ends": True},
    "early exit": {**K, "draft": None, "assistant_early_exit": 1},
    "copying": {"draft": None, "prompt_lookup_num_tokens": 4},
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


class Noted:
    """Stands in for a class of `build`, and notes what its objects and the processes chose."""

    def __init__(self, name, monkeypatch, choice):
        self.own, self.first = [], []
        plain = getattr(build, name)

        class Noting(plain):
            def __init__(noting, inner, group):
                class Listening:
                    def broadcast(_, numbers):
                        chosen = group.broadcast(numbers)
                        self.own.append(choice(numbers))
                        self.first.append(choice(chosen))
                        return chosen

                super().__init__(inner, Listening())

        monkeypatch.setattr(build, name, Noting)

    @property
    def differ(self):
        return self.own != self.first


def loaded(folder, kind):
    """The split model, and the whole one."""
    options = {"experts_implementation": "eager"} if kind == "qwen2_moe" else {}  # as in tests/tiny.py
    model = AutoModelForCausalLM.from_pretrained(folder / kind, tp_plan="auto", dtype=torch.float64, **options)
    return hf_speculate.enable(model), hf_speculate.enable(make_model(kind))


def draft_of(target, draft, rank):
    match draft:
        case "noisy":
            return {"assistant_model": noisy_copy(target)}
        case "small":
            return {"assistant_model": make_model("llama", **SMALL)}
        case "each its own":
            return {"assistant_model": noisy_copy(target, seed=1 + rank)}
    return {}


def run_call(models, kind="llama", draft="noisy", ends=False, num_rows=3, **options):
    """One call, on the split model and on the whole one."""
    target, whole = models[kind]
    inputs = ragged_prompts(num_rows, seed=1)
    options |= {"max_new_tokens": NUM_NEW, "return_dict_in_generate": True, **draft_of(whole, draft, 0)}
    if ends:
        free = whole.generate(**inputs, max_new_tokens=NUM_NEW)
        options["eos_token_id"] = free[:, 5 - NUM_NEW].tolist()
    alone = whole.generate(**inputs, **options)
    ours = target.generate(**inputs, **options)
    # Its heads are among all heads; rank r holds the r-th half of them.
    rank = dist.get_rank()
    num_heads = [layer.keys.shape[1] for layer in ours.past_key_values.layers]
    is_same_cache = all(
        torch.allclose(
            getattr(one, name).chunk(NUM_RANKS, dim=1)[rank], getattr(other, name), atol=STATE_TOLERANCE, rtol=0
        )
        for one, other in zip(alone.past_key_values.layers, ours.past_key_values.layers, strict=True)
        for name in ("keys", "values")
    )
    return {
        "sequences": ours.sequences,
        "is_same_text": torch.equal(alone.sequences, ours.sequences),
        "is_same_cache": is_same_cache,
        "num_heads": num_heads,
        "num_accepted": ours.speculation.num_accepted,
        "num_drafted": ours.speculation.num_drafted,
        "cache": ours.speculation.cache,
        "lock_step": ours.speculation.lock_step,
    }


def run_plain(models):
    """What transformers decodes by itself on the split model."""
    target, whole = models["llama"]
    inputs = ragged_prompts(3, seed=1)
    return torch.equal(*(model.generate(**inputs, max_new_tokens=NUM_NEW) for model in (target, whole)))


def run_apart(models, rank, **options):
    """A call in which the processes would choose differently, if each had its way."""
    target, _ = models["llama"]
    return target.generate(**ragged_prompts(3, seed=1), max_new_tokens=NUM_NEW, **options)


def skewed_clocks(models, rank):
    whole = models["llama"][1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding_method, "StageClock", functools.partial(StageClock, Jumping(rank)))
        noted, stats = Noted("BroadcastSchedule", patch, int), hf_speculate.SpeculationStats()
        options = {**ADAPTIVE, **draft_of(whole, "small", rank), "speculation_stats": stats}
        ids = run_apart(models, rank, **options)
    inputs = ragged_prompts(3, seed=1)
    return {
        "ids": ids,
        "is_same_text": torch.equal(ids, whole.generate(**inputs, max_new_tokens=NUM_NEW)),
        "lens": stats.rounds_by_draft_len,
        "differ": noted.differ,
        "chosen": noted.first,
    }


def own_seeds(models, rank):
    torch.manual_seed(rank)
    own = int(torch.randint(2**62, ()))
    torch.manual_seed(rank)
    ids = run_apart(models, rank, **K, **draft_of(models["llama"][1], "noisy", rank), do_sample=True)
    return {"ids": ids, "differ": own}


def own_drafts(models, rank):
    """Models that differ: sampled drafts of each are judged by the first's verifier."""
    whole = models["llama"][1]
    with pytest.MonkeyPatch.context() as patch:
        drafts = Noted("BroadcastDrafter", patch, lambda numbers: numbers.tolist())
        verdicts = Noted("BroadcastVerifier", patch, lambda numbers: numbers.tolist())
        ids = run_apart(models, rank, **K, **SEED, **draft_of(whole, "each its own", rank))
    inputs = ragged_prompts(3, seed=1)
    first = whole.generate(**inputs, max_new_tokens=NUM_NEW, **K, **SEED, **draft_of(whole, "each its own", 0))
    return {"ids": ids, "is_same_text": torch.equal(ids, first), "differ": [drafts.differ, verdicts.differ]}


def own_times(models, rank, first_is_due):
    """`max_time` is over in one process only; there it would leave the others alone in the next forward."""
    is_due = first_is_due == (rank == 0)
    late = types.SimpleNamespace(time=functools.partial(next, iter([0.0] + [1e6 * is_due] * 1000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping_criteria, "time", late)
        draft = draft_of(models["llama"][1], "noisy", rank)
        return {"ids": run_apart(models, rank, **K, **draft, max_time=100.0)}


def own_criteria(models, rank):
    draft = draft_of(models["llama"][1], "noisy", rank)
    return {"ids": run_apart(models, rank, **K, **draft, stopping_criteria=[Until(6 if rank == 0 else 2)])}


def refusal(models):
    """What a pipeline-parallel model would be told."""
    target, _ = models["llama"]
    config = target.config.distributed_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "pp_size", 2)
        try:
            target.generate(**ragged_prompts(1), max_new_tokens=2, **K, assistant_model=models["llama"][1])
        except UnsupportedModelError as error:
            return str(error)
    return "nothing"


def run_compiled(models):
    """Fixed buffers: the draft's rounds are compiled, the split target's are not."""
    whole, stats = models["llama"][1], hf_speculate.SpeculationStats()
    options = {**K, **draft_of(whole, "small", 0), "compile_config": compile_config(), "speculation_stats": stats}
    ids = run_apart(models, 0, **options)
    plain = whole.generate(**ragged_prompts(3, seed=1), max_new_tokens=NUM_NEW)
    return {"is_same_text": torch.equal(ids, plain), "compiled": stats.compiled, "fallbacks": stats.fallbacks}


def count_folds(models):
    """How often attention was folded in a call on the split model."""
    num, plain = [0], attention.scaled_dot_product_attention

    def counting(*args, **kwargs):
        num[0] += 1
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "scaled_dot_product_attention", counting)
        run_apart(models, 0, **K, **draft_of(models["llama"][1], "noisy", 0))
    return num[0]


def run_rank(rank, port, folder):
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo")
    models = {kind: loaded(folder, kind) for kind in KINDS}
    target, whole = models["llama"]
    results = {
        "calls": {name: run_call(models, **call) for name, call in CALLS.items()},
        "plain": run_plain(models),
        "clocks": skewed_clocks(models, rank),
        "seeds": own_seeds(models, rank),
        "drafts": own_drafts(models, rank),
        "times": [own_times(models, rank, first_is_due) for first_is_due in (False, True)],
        "criteria": own_criteria(models, rank),
        "compiled": run_compiled(models),
        "num_folds": count_folds(models),
        "refusal": refusal(models),
        "cost_ratios": [cost_ratio(one, make_model("llama", num_hidden_layers=1)) for one in (target, whole)],
    }
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process found."""
    folder = tmp_path_factory.mktemp("ranks")
    for kind in KINDS:
        make_model(kind).save_pretrained(folder / kind)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run_rank, args=(port, folder), nprocs=NUM_RANKS, join=True)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.slow
def test_the_target_is_split_and_plain_decoding_agrees(results):
    assert all(found["plain"] for found in results)
    for found in results:
        assert set(found["calls"]["one row"]["num_heads"]) == {1}  # of the two that share the four query heads


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_process_decodes_what_one_would(results, name):
    one, other = (found["calls"][name] for found in results)
    assert torch.equal(one["sequences"], other["sequences"])
    for found in (one, other):
        assert found["is_same_text"]
        assert found["is_same_cache"]
        assert found["num_drafted"] > 0 or name == "alone"
        assert found["lock_step"] == (name == "lock step")
    assert one["num_accepted"] == other["num_accepted"]
    if name in ("dynamic", "preallocated"):
        assert one["cache"] == name


@pytest.mark.slow
def test_processes_with_clocks_of_their_own_draft_the_same_numbers(results):
    one, other = (found["clocks"] for found in results)
    assert other["differ"]  # the second would have chosen otherwise
    assert not one["differ"]
    assert one["chosen"] == other["chosen"]
    assert one["lens"] == other["lens"]
    assert len(one["lens"]) > 1
    assert one["is_same_text"] and other["is_same_text"]


@pytest.mark.slow
def test_a_seed_that_nobody_gave_is_the_first_process_s(results):
    one, other = (found["seeds"] for found in results)
    assert one["differ"] != other["differ"]
    assert torch.equal(one["ids"], other["ids"])


@pytest.mark.slow
def test_drafts_that_differ_are_the_first_process_s(results):
    one, other = (found["drafts"] for found in results)
    assert one["differ"] == [False, False]
    assert other["differ"] == [True, True]
    assert torch.equal(one["ids"], other["ids"])
    assert one["is_same_text"] and other["is_same_text"]


@pytest.mark.slow
def test_the_time_is_up_for_all_when_it_is_for_the_first(results):
    (never, at_once), (other_never, other_at_once) = ([found["ids"] for found in one["times"]] for one in results)
    prompt_len = ragged_prompts(3, seed=1)["input_ids"].shape[1]
    assert torch.equal(never, other_never)
    assert torch.equal(at_once, other_at_once)
    assert never.shape[1] == prompt_len + NUM_NEW
    assert at_once.shape[1] < prompt_len + NUM_NEW


@pytest.mark.slow
def test_users_criteria_fire_for_all_when_they_do_for_the_first(results):
    one, other = (found["criteria"]["ids"] for found in results)
    assert torch.equal(one, other)
    assert one.shape[1] == ragged_prompts(3, seed=1)["input_ids"].shape[1] + 7  # asked once a token, the seventh fires


@pytest.mark.slow
def test_attention_is_folded_over_the_heads_of_a_process(results):
    assert all(found["num_folds"] > 0 for found in results)


@pytest.mark.slow
def test_the_draft_may_run_compiled_and_the_split_target_does_not(results):
    for found in results:
        assert found["compiled"]["is_same_text"]
        assert found["compiled"]["compiled"] == ["draft"]
        assert found["compiled"]["fallbacks"] == ["eager forwards of the target, which is split over processes"]


@pytest.mark.slow
def test_a_split_target_costs_its_part(results):
    for found in results:
        split, whole = found["cost_ratios"]
        assert split == pytest.approx(NUM_RANKS * whole, rel=0.01)


@pytest.mark.slow
def test_pipeline_parallel_targets_are_refused(results):
    for found in results:
        assert found["refusal"].startswith("models must lie whole in every process or be split by tensor parallelism")


@pytest.mark.parametrize(
    ("dim_names", "found"), [([("fsdp",), ("fsdp", "tp")], 1), ([("tp",)], 0), ([None], 0), ([("fsdp",)], None)]
)
def test_the_processes_are_those_of_the_parts_and_not_those_of_fsdp(dim_names, found):
    meshes = [types.SimpleNamespace(mesh_dim_names=names, get_group=lambda dim: dim) for names in dim_names]
    weights = [torch.zeros(2), *(types.SimpleNamespace(device_mesh=mesh) for mesh in meshes)]
    model = types.SimpleNamespace(tp_size=2, parameters=lambda: weights)
    shards = tensor_parallel_group([model], torch.device("cpu"))
    assert (None if shards is None else shards.group) == found
