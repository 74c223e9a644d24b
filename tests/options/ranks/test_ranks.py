"""Test ranks in one call: same forwards with `synced_gpus`, same choices with a split target."""

import datetime
import functools
import itertools
import os
import random
import socket
import types
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LogitsProcessorList
from transformers.generation import stopping_criteria
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.engine.step_weights import cost_ratio
from hf_speculate.errors import OtherRankError, UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.options.ranks.tensor_parallel import tensor_parallel_group
from hf_speculate.options.self_test.compare import NUM_TOKENS
from tests.cases import ACCEPTED_ALL, DRAFT_NOISE, Unchanged, assert_equal_ids, pair
from tests.draft.test_custom import Repeats
from tests.generation.test_caches import (
    FLOAT32_TOLERANCE,
    STATE_TOLERANCE,
    assert_same_contents,
    cache_contents,
)
from tests.options.self_test.test_compare import Own
from tests.reliability.faults import Fault, Mistake, RowWiseProcessor, hook
from tests.support.compiled_calls import compile_config
from tests.support.fallbacks import PAST_CONTEXT, only_fallbacks, without_caches
from tests.support.nan_drafts import drafts_of_nan, embedding_is_nan, without_nan
from tests.support.tiny import make_model, noisy_copy, ragged_prompts, with_context

NUM_RANKS = 2
NUM_NEW = 16
TIMEOUT_S = 60  # a rank that waits this long waits for a forward that will never come
K = {"num_assistant_tokens": 3}
SAMPLED = {"do_sample": True, "seed": 3}


def join(rank, port):
    torch.set_num_threads(1)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_PORT": port}
    os.environ.update(
        {name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1"
    )
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))


def run_in_every_rank(run, *args):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, args=(port, *args), nprocs=NUM_RANKS, join=True)


def of_all_ranks(value):
    values = [None] * NUM_RANKS
    dist.all_gather_object(values, value)
    return values


class FailsInBatches(LlamaForCausalLM):
    """Llama with different logits for several tokens of several rows."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        output = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        if len(input_ids) > 1 and input_ids.shape[1] > 1:
            output.logits[..., ::2] += 5
        return output


NUM_TEST_FORWARDS = 1 + NUM_TOKENS + 3
COUPLED = {**SAMPLED, "verifier": "coupled"}
# Arguments of a call besides its prompt. "noise" is the noise in the draft. "ends" gives the token
# positions at which the rows of rank 1 end.
CALLS = {
    "window": {
        "family": "mistral_window",
        "num_assistant_tokens": 4,
        "speculation_cache": "dynamic",
        "ends": (3, 3),
    },
    "rows of rank 1 end apart": {
        "num_assistant_tokens": NUM_NEW,
        "noise": ACCEPTED_ALL,
        "ends": (3, 7),
    },
    "rank 1 ends at its first token": {**K, "most": 1},
    "adaptive": {
        "num_assistant_tokens_schedule": "adaptive",
        "num_assistant_tokens": 5,
        "ends": (3, 3),
    },
    "lock step": {**K, "logits_processor": [Unchanged()], "ends": (3, 3)},
    "copying": {"noise": None, "prompt_lookup_num_tokens": 4, "ends": (3, 3)},
    "alone": {"noise": None, **COUPLED, "ends": (3, 3)},
    "early exit": {
        "noise": None,
        **K,
        "assistant_early_exit": 1,
        "assistant_confidence_threshold": 0.2,
        "ends": (3, 3),
    },
    "unknown type": {**K, "model_class": Own},
    "draft state": {**K, "draft_state": hf_speculate.DraftState(), "ends": (3, 3)},
    # Rank 1 has little room, while rank 0 has room for drafts.
    "full table": {**K, "family": "gpt_neo", "most": 8},
    "drafts of NaN": {**K, "ends": (3, 3)},
    "sampled drafts of NaN": {**K, **SAMPLED, "verifier": "rejection", "ends": (3, 3)},
    "context": {**K, "noise": ACCEPTED_ALL, "context": 20},  # a row of rank 1 grows past it
    "context by columns": {**K, "family": "gpt_neo", "noise": ACCEPTED_ALL, "context": 24},
}
OF_NAN = ("drafts of NaN", "sampled drafts of NaN")
REFUSED = {
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "cache_implementation and compile_config": {"cache_implementation": "static"},
    "candidate_generator": {
        "candidate_generator": PromptLookupCandidateGenerator(),
        "assistant_model": None,
    },
    "drafter": {"drafter": Repeats, "assistant_model": None},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
}


@contextmanager
def gathering(*models):
    """Make forwards wait for the same forward in all ranks, as with sharded weights; count them."""
    num_forwards = [0] * len(models)

    def wait_for(code):
        total = torch.tensor(code)
        dist.all_reduce(total)
        assert int(total) == NUM_RANKS * code
        num_forwards[code - 1] += 1

    hooks = [lambda *_, code=code: wait_for(code) for code in range(1, 1 + len(models))]
    handles = [
        model.register_forward_pre_hook(hook) for model, hook in zip(models, hooks, strict=True)
    ]
    try:
        yield num_forwards
    finally:
        for handle in handles:
            handle.remove()


def prompts_of(rank):
    """Return one short prompt, or two longer ones."""
    return ragged_prompts(rank + 1, seed=rank + 1, min_len=4 + 5 * rank, max_len=6 + 9 * rank)


def run_call(rank, name):
    """Compare text and cache with a separate call, and the forwards with those of another rank."""
    draft_options = {
        "family": "llama",
        "noise": DRAFT_NOISE,
        "ends": (),
        "most": NUM_NEW,
        "model_class": None,
        **CALLS[name],
    }
    family, noise, ends, most, model_class = map(
        draft_options.pop, ("family", "noise", "ends", "most", "model_class")
    )
    context = draft_options.pop("context", None)
    fields = (
        {"max_position_embeddings": prompts_of(1)["input_ids"].shape[1] + most}
        if name == "full table"
        else {}
    )
    target = make_model(family, **fields)
    target.__class__ = model_class or type(target)
    hf_speculate.enable(target)
    inputs, draft = without_nan(prompts_of(rank)), noisy_copy(target, noise or 0.0)
    if name == "adaptive":
        draft = make_model(family, num_hidden_layers=1)
    if context is not None:
        draft = with_context(make_model(family), context)
    shared = {
        key: draft_options.pop(key)
        for key in list(draft_options)
        if key in COUPLED or key == "logits_processor"
    }
    shared |= {"max_new_tokens": most if rank else NUM_NEW, "return_dict_in_generate": True}
    draft_options |= {"assistant_model": draft} if noise is not None else {}
    plain = (
        draft_options if name == "sampled drafts of NaN" else {}
    )  # plain sampling draws other tokens
    with drafts_of_nan(target, draft, embedding_is_nan) if name in OF_NAN else nullcontext():
        if ends and rank:
            free = target.generate(**inputs, **shared, **plain).sequences
            shared["eos_token_id"] = [
                int(row[end - NUM_NEW]) for row, end in zip(free, ends, strict=True)
            ]
        alone = target.generate(**inputs, **shared, **plain)
        # In the second call, the draft has already read its prompt.
        for _ in range(1 + ("draft_state" in draft_options)):
            with gathering(target, draft) as num_forwards:
                ours = target.generate(**inputs, **shared, **draft_options, synced_gpus=True)
    assert torch.equal(alone.sequences, ours.sequences), name
    # GPT-Neo computes attention in float32.
    tolerance = FLOAT32_TOLERANCE if family == "gpt_neo" else STATE_TOLERANCE
    assert_same_contents(
        *(cache_contents(output[CACHE_NAME]) for output in (alone, ours)), tolerance
    )
    num_rounds = of_all_ranks(ours.speculation.num_batch_rounds)
    num_more = NUM_TEST_FORWARDS * (name == "unknown type")
    # All tokens come in one round, so the token after the end of one row is missing.
    num_more += name == "rows of rank 1 end apart"
    first, second = of_all_ranks(num_forwards[0] - (1 + max(num_rounds) + num_more))
    # With an early exit, draft forwards are forwards of the target.
    assert first == second and (first > 0) == (name == "early exit" or name in OF_NAN), name
    assert (num_forwards[1] > 0) == (noise is not None), name
    assert rank or ours.speculation.num_drafted > 0 or name == "alone", name
    assert (max(of_all_ranks(ours.speculation.num_rescored)) > 0) == (name in OF_NAN), name
    if name != "rows of rank 1 end apart" and (ends or most < NUM_NEW):
        assert num_rounds[1] < num_rounds[0], name  # rank 1 continued because of rank 0
    if context is not None:
        assert ours.speculation.num_accepted == ours.speculation.num_drafted, name
        has_ended = [
            bool(without_caches(reasons)) for reasons in of_all_ranks(ours.speculation.fallbacks)
        ]
        # Columns end drafting in all ranks, positions only in a row.
        assert has_ended == [family == "gpt_neo", True], name


def run_faults(rank):
    """Raise an error in the draft of one rank, which ends the call in all ranks."""
    target, draft = pair("llama")
    options = {**K, "assistant_model": draft, "max_new_tokens": NUM_NEW, "synced_gpus": True}
    modules = {"draft": draft, "layer": draft.model.layers[0]}
    for failing, at, part in itertools.product(
        range(NUM_RANKS), (1, 2, 5), (*modules, "processor")
    ):
        own, inside = dict(options), nullcontext()
        is_processor, fault = part == "processor", Fault(at, Mistake("on purpose"))
        if is_processor:  # the first call is for the prompt, and three are draft steps
            fault.at = 1 + min(at, 3) if rank == failing else 10**9
            own["logits_processor"] = LogitsProcessorList([RowWiseProcessor(fault)])
        elif rank == failing:
            inside = hook(modules[part], fault)
        with (
            inside,
            gathering(target, draft),
            pytest.raises(Mistake if rank == failing else OtherRankError),
        ):
            target.generate(**prompts_of(rank), **own)
    with gathering(target, draft):
        # The next call succeeds.
        assert target.generate(**prompts_of(rank), **options).shape[0] == rank + 1


def run_rank(rank, port):
    join(rank, port)
    for name in CALLS:
        with only_fallbacks("lock step", PAST_CONTEXT):
            run_call(rank, name)
    with only_fallbacks():
        run_faults(rank)
    target, draft = pair("llama")
    for name, options in REFUSED.items():  # no rank may be waiting for another by then
        with pytest.raises(
            UnsupportedGenerationError, match=f"^{name} must be left out with synced_gpus and "
        ):
            target.generate(
                torch.tensor([[5, 6, 7]]), **{"assistant_model": draft, **options}, synced_gpus=True
            )
    stranger = make_model("llama")
    stranger.__class__ = FailsInBatches
    words = "on another rank; leave" if rank == 0 else "FailsInBatches must give the same logits"
    with pytest.raises(UnsupportedModelError, match=words):
        hf_speculate.generate(
            stranger, **prompts_of(rank), assistant_model=draft, max_new_tokens=6, synced_gpus=True
        )
    dist.destroy_process_group()


@pytest.mark.slow
def test_synced_ranks_run_equal_forwards_for_their_texts():
    run_in_every_rank(run_rank)


@pytest.mark.parametrize("has_group", [False, True])
def test_single_rank_decodes_as_without_ranks(has_group):
    target, draft = pair("llama")
    inputs = ragged_prompts(2, seed=1)
    options = {
        "prompt_lookup_num_tokens": 3,
        "prefill_chunk_size": 4,
        "assistant_model": draft,
        "synced_gpus": True,
    }
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = target.generate(**inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=3, **options)
    finally:
        if has_group:
            dist.destroy_process_group()
    assert_equal_ids(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)


# The calls below split their targets by tensor parallelism.
TINY_FAMILIES = ("llama", "mistral_window", "qwen2_moe")
# Less than half of the target, which is the share of one process.
SMALL = {"num_hidden_layers": 1, "intermediate_size": 16}
ADAPTIVE = {"num_assistant_tokens_schedule": "adaptive", "num_assistant_tokens": 5}

# Arguments of a call besides its prompt. "small" selects a small draft. "ends" gives rows an EOS.
SPLIT_CALLS = {
    "one row": {**K, "num_rows": 1},
    "dynamic": {**K, "speculation_cache": "dynamic", "ends": True},
    "window": {**K, "family": "mistral_window", "ends": True},
    "experts": {**K, "family": "qwen2_moe"},
    "rejection": {**K, **SAMPLED},
    "coupled, lock step": {**K, **COUPLED, "logits_processor": [Unchanged()], "ends": True},
    "alone": {**COUPLED, "assistant_model": None},
    "adaptive": {**ADAPTIVE, "small": True, "ends": True},
    "synced": {**K, "synced_gpus": True, "ends": True},
    "drafts of NaN": {**K},
    "drafts of NaN that a processor hides": {**K, "remove_invalid_values": True},
    "drafts of NaN in lock step": {**K, "logits_processor": [Unchanged()]},
}


def jumping(seed):
    """Return a clock that advances by a random number of seconds at every reading."""
    draw = random.Random(seed)
    return functools.partial(next, itertools.accumulate(iter(lambda: draw.expovariate(1.0), None)))


def fires_after(num_calls):
    """Return a criterion that fires after `num_calls` calls."""
    asked = itertools.count()
    return lambda ids, scores, **kwargs: torch.full((len(ids),), next(asked) >= num_calls)


def clock(is_due):
    """Return the clock for `max_time`; time is up in only one process.

    In a wrong decoder, the other processes would wait in the next forward.
    """
    return types.SimpleNamespace(time=functools.partial(next, iter([0.0] + [1e6 * is_due] * 1000)))


# Calls whose arguments differ between ranks, so each process by itself would choose differently.
APART = {
    "clocks": lambda rank: {**ADAPTIVE, "small": True},
    "seeds": lambda rank: {**K, "do_sample": True},
    "drafts": lambda rank: {**K, **SAMPLED, "draft_seed": 1 + rank},
    "time at once": lambda rank: {**K, "max_time": 100.0, "time": clock(rank == 0)},
    "criteria": lambda rank: {**K, "stopping_criteria": [fires_after(6 if rank == 0 else 2)]},
    "compiled": lambda rank: {**K, "small": True, "compile_config": compile_config()},
}


def assert_equal_everywhere(ids, name):
    assert all(torch.equal(ids, ids_there) for ids_there in of_all_ranks(ids)), name


def draft_of(options, draft_seed=1):
    """Pop the draft's options and make the draft, which may differ between processes."""
    small = make_model("llama", **SMALL) if options.pop("small", False) else None
    return {
        "assistant_model": small
        or noisy_copy(make_model(options.pop("family", "llama")), seed=draft_seed)
    }


def run_apart(models, rank, name):
    """Run a call with different arguments in each process; all must follow the first process."""
    (target, whole), inputs, stats = (
        models["llama"],
        ragged_prompts(3, seed=1),
        hf_speculate.SpeculationStats(),
    )
    options, plain = (
        APART[name](rank),
        {"max_new_tokens": NUM_NEW, **(SAMPLED if name == "drafts" else {})},
    )
    time, drafts = options.pop("time", None), draft_of(options, options.pop("draft_seed", 1))
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as patch:
        if name == "clocks":
            patch.setattr("time.perf_counter", jumping(rank))
        if time:
            patch.setattr(stopping_criteria, "time", time)
        ids = target.generate(
            **inputs, max_new_tokens=NUM_NEW, **options, **drafts, speculation_stats=stats
        )
    assert_equal_everywhere(ids, name)
    assert_equal_everywhere(torch.tensor(sorted(stats.rounds_by_draft_len.items())), name)
    if name in ("clocks", "drafts", "compiled"):
        assert torch.equal(ids, whole.generate(**inputs, **plain, **K, **draft_of({}))), name
    num_new = ids.shape[1] - inputs["input_ids"].shape[1]
    assert name != "time at once" or num_new < NUM_NEW
    assert name != "criteria" or num_new == 7  # called once per token, fires in the seventh call
    assert name != "clocks" or len(stats.rounds_by_draft_len) > 1
    assert name != "compiled" or stats.compiled == ["draft"]  # not the target, which is split


def loaded(folder, family):
    """Return the split model and the whole model."""
    # As in tests/support/tiny.py.
    options = {"experts_implementation": "eager"} if family == "qwen2_moe" else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder / family, tp_plan="auto", dtype=torch.float64, **options
    )
    return hf_speculate.enable(model), hf_speculate.enable(make_model(family))


def run_split_call(models, name):
    """Run the same call on the split model and on the whole model."""
    draft_options = {
        "family": "llama",
        "max_new_tokens": NUM_NEW,
        "return_dict_in_generate": True,
        **SPLIT_CALLS[name],
    }
    target, whole = models[draft_options["family"]]
    ends, inputs = (
        draft_options.pop("ends", False),
        without_nan(ragged_prompts(draft_options.pop("num_rows", 3), seed=1)),
    )
    draft_options = {**draft_of(draft_options), **draft_options}
    draft_options.pop("family", None)
    if ends:
        draft_options["eos_token_id"] = whole.generate(**inputs, max_new_tokens=NUM_NEW)[
            :, 5 - NUM_NEW
        ].tolist()
    is_nan = name.startswith("drafts of NaN")
    with ExitStack() as stack:
        for model, draft in (
            ((target, draft_options["assistant_model"]), (whole, None)) if is_nan else ()
        ):
            stack.enter_context(drafts_of_nan(model, draft, embedding_is_nan))
        alone, ours = (
            whole.generate(**inputs, **draft_options),
            target.generate(**inputs, **draft_options),
        )
    assert_equal_everywhere(ours.sequences, name)
    assert torch.equal(alone.sequences, ours.sequences), name
    for layer, our_layer in zip(alone[CACHE_NAME].layers, ours[CACHE_NAME].layers, strict=True):
        for states, local_states in (
            (layer.keys, our_layer.keys),
            (layer.values, our_layer.values),
        ):
            of_rank = states.chunk(NUM_RANKS, dim=1)[dist.get_rank()]
            assert torch.allclose(of_rank, local_states, atol=STATE_TOLERANCE, rtol=0), name
    assert ours.speculation.num_accepted == alone.speculation.num_accepted or "adaptive" in name, (
        name
    )
    assert ours.speculation.num_drafted > 0 or name == "alone", name
    assert ours.speculation.lock_step == ("lock step" in name), name
    assert (ours.speculation.num_rescored > 0) == is_nan, name


def run_split_fault(target, rank, failing):
    """Raise an error in the whole draft of one process; no process may wait for another's draft."""
    draft = noisy_copy(make_model("llama"))
    fault = Fault(4 if rank == failing else 10**9, Mistake("on purpose"))
    with hook(draft, fault), pytest.raises(Mistake if rank == failing else OtherRankError):
        target.generate(
            **ragged_prompts(3, seed=1), **K, max_new_tokens=NUM_NEW, assistant_model=draft
        )


def run_split_rank(rank, port, folder):
    join(rank, port)
    models = {family: loaded(folder, family) for family in TINY_FAMILIES}
    with only_fallbacks("lock step", "eager forwards of the target"):
        for name in SPLIT_CALLS:
            run_split_call(models, name)
        for name in APART:
            run_apart(models, rank, name)
    for failing in range(NUM_RANKS):
        run_split_fault(models["llama"][0], rank, failing)
    split, whole = (
        cost_ratio(model, make_model("llama", num_hidden_layers=1)) for model in models["llama"]
    )
    # a split target costs only the share of one process
    assert split == pytest.approx(NUM_RANKS * whole, rel=0.01)
    dist.destroy_process_group()


@pytest.mark.slow
def test_tensor_parallel_ranks_decode_as_one_process(tmp_path):
    for family in TINY_FAMILIES:
        make_model(family).save_pretrained(tmp_path / family)
    run_in_every_rank(run_split_rank, tmp_path)


@pytest.mark.parametrize(
    ("dim_names", "found"),
    [([("fsdp",), ("fsdp", "tp")], 1), ([("tp",)], 0), ([None], 0), ([("fsdp",)], None)],
)
def test_process_group_is_that_of_tensor_parallel_not_fsdp(dim_names, found):
    meshes = [
        types.SimpleNamespace(mesh_dim_names=names, get_group=lambda dim: dim)
        for names in dim_names
    ]
    weights = [torch.zeros(2), *(types.SimpleNamespace(device_mesh=mesh) for mesh in meshes)]
    model = types.SimpleNamespace(tp_size=2, parameters=lambda: weights)
    shards = tensor_parallel_group([model], torch.device("cpu"))
    assert (None if shards is None else shards.group) == found
