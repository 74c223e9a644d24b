"""With `synced_gpus` all ranks run equally many forwards of each model, and each gets the text it would get alone."""

import datetime
import socket

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from transformers import LlamaForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_speculate
from hf_speculate.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_speculate.generation.self_test import NUM_TOKENS
from tests.cases import ACCEPTED_ALL, DRAFT_NOISE, Unchanged, assert_equal_ids, pair
from tests.tiny import make_model, noisy_copy, ragged_prompts

NUM_RANKS = 2
NUM_NEW = 12
TIMEOUT_S = 60  # a rank that waits so long for another waits for a forward that never comes
STATE_TOLERANCE = 1e-9  # float64 round-off between a forward of one token and one of several


class Own(LlamaForCausalLM):
    """Of an unknown type, so that it is compared with plain decoding first."""


class FailsInBatches(LlamaForCausalLM):
    """Several tokens together give something else where there are several rows."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        output = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        if len(input_ids) > 1 and input_ids.shape[1] > 1:
            output.logits[..., ::2] += 5
        return output


NUM_TEST_FORWARDS = 1 + NUM_TOKENS + 3
SAMPLED = {"do_sample": True, "seed": 3, "verifier": "coupled"}
# What a call is given beside its prompt; "draft" names a model, "ends" which token of each row of rank 1 ends it.
CALLS = {
    "constant": {"num_assistant_tokens": 4, "ends": (3, 3)},
    "window": {"kind": "mistral_window", "num_assistant_tokens": 4, "speculation_cache": "dynamic", "ends": (3, 3)},
    "rows of rank 1 end apart": {"num_assistant_tokens": NUM_NEW, "draft": "same", "ends": (3, 7)},
    "rank 1 ends at its first token": {"num_assistant_tokens": 3, "one_token": True},
    "adaptive": {"draft": "small", "num_assistant_tokens_schedule": "adaptive", "ends": (3, 3)},
    "heuristic, unsure": {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.6},
    "sampled": {"num_assistant_tokens": 3, **SAMPLED},
    "lock step": {"num_assistant_tokens": 3, "logits_processor": [Unchanged()], "ends": (3, 3)},
    "early exit": {"draft": None, "assistant_early_exit": 1, "num_assistant_tokens": 3},
    "copying": {"draft": None, "prompt_lookup_num_tokens": 4, "ends": (3, 3)},
    "alone": {"draft": None, **SAMPLED, "ends": (3, 3)},
    "unknown type": {"num_assistant_tokens": 3, "model_class": Own},
}
REFUSED = {
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "cache_implementation and compile_config": {"cache_implementation": "static"},
    "candidate_generator": {"candidate_generator": PromptLookupCandidateGenerator(), "assistant_model": None},
    "drafter": {"drafter": str, "assistant_model": None},
}


class Gathering:
    """Forwards that wait for the same forward of all ranks, as with sharded weights."""

    def __init__(self, *models):
        self.models, self.num_forwards, self.is_same = models, [0] * len(models), True

    def __enter__(self):
        def wait_for(code):
            def hook(module, args):
                total = torch.tensor(code)
                dist.all_reduce(total)
                self.is_same = self.is_same and int(total) == NUM_RANKS * code
                self.num_forwards[code - 1] += 1

            return hook

        self.handles = [model.register_forward_pre_hook(wait_for(code)) for code, model in enumerate(self.models, 1)]
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()


def prompts_of(rank):
    """One short prompt, or two longer ones."""
    return ragged_prompts(rank + 1, seed=rank + 1, min_len=4 + 5 * rank, max_len=6 + 9 * rank)


def run_call(rank, kind="llama", draft="noisy", ends=(), one_token=False, model_class=None, **own):
    """One call of one rank: whether its text and cache are those of a call alone, and how many forwards it ran."""
    target = make_model(kind)
    target.__class__ = model_class or type(target)
    hf_speculate.enable(target)
    noise = {"noisy": DRAFT_NOISE, "same": ACCEPTED_ALL}
    assistant = noisy_copy(target, noise[draft]) if draft in noise else make_model(kind, num_hidden_layers=1)
    inputs = prompts_of(rank)
    options = {"max_new_tokens": 1 if one_token and rank else NUM_NEW, "return_dict_in_generate": True}
    shared = {name: own.pop(name) for name in list(own) if name in SAMPLED or name == "logits_processor"}
    if ends and rank:
        free = target.generate(**inputs, **options, **shared).sequences
        places = [place - NUM_NEW for place in ends]  # each row ends there, or before
        options["eos_token_id"] = free[range(len(places)), places].tolist()
    alone = target.generate(**inputs, **options, **shared)
    if draft is not None:
        own["assistant_model"] = assistant
    with Gathering(target, assistant) as gathering:
        ours = target.generate(**inputs, **options, **shared, **own, synced_gpus=True)
    caches = zip(alone.past_key_values.layers, ours.past_key_values.layers, strict=True)
    is_same_cache = all(
        torch.allclose(getattr(one, name), getattr(other, name), atol=STATE_TOLERANCE, rtol=0)
        for one, other in caches
        for name in ("keys", "values")
    )
    return {
        "is_same_text": torch.equal(alone.sequences, ours.sequences),
        "is_same_cache": is_same_cache,
        "is_same_forward": gathering.is_same,
        "num_forwards": gathering.num_forwards,
        "num_rounds": ours.speculation.num_batch_rounds,
        "num_drafted": ours.speculation.num_drafted,
    }


def run_turns(rank):
    """Two turns of a chat with a `DraftState`."""
    target, draft = pair("llama")
    inputs, state, is_same, num_forwards = prompts_of(rank), hf_speculate.DraftState(), True, []
    for _ in range(2):
        alone = target.generate(**inputs, max_new_tokens=NUM_NEW - 4 * rank)
        with Gathering(target, draft) as gathering:
            options = {"assistant_model": draft, "num_assistant_tokens": 3, "draft_state": state}
            ours = target.generate(**inputs, max_new_tokens=NUM_NEW - 4 * rank, **options, synced_gpus=True)
        is_same = is_same and torch.equal(alone, ours) and gathering.is_same
        num_forwards.append(gathering.num_forwards)
        mask = torch.ones_like(ours)
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        inputs = {"input_ids": ours, "attention_mask": mask}
    return {"is_same_text": is_same, "num_forwards": num_forwards, "num_tokens": state.num_tokens}


def refusal(options):
    """What a call that cannot hold is told; no rank may have waited for another by then."""
    target, draft = pair("llama")
    options = {"assistant_model": draft, **options}
    try:
        target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, synced_gpus=True, **options)
    except UnsupportedGenerationError as error:
        return str(error)
    return "nothing"


def refusal_of_class(rank):
    """What a rank is told of a class that decodes otherwise on rank 1 alone; then both go on."""
    target = make_model("llama")
    target.__class__ = FailsInBatches
    hf_speculate.enable(target)
    try:
        target.generate(**prompts_of(rank), max_new_tokens=6, assistant_model=target, synced_gpus=True)
    except UnsupportedModelError as error:
        return str(error)
    return "nothing"


def run_rank(rank, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    results = {name: run_call(rank, **call) for name, call in CALLS.items()}
    results["turns"] = run_turns(rank)
    results["refusals"] = {name: refusal(options) for name, options in REFUSED.items()}
    results["class"] = refusal_of_class(rank)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank found, by the name of the call."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run_rank, args=(port, folder), nprocs=NUM_RANKS, join=True)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_ranks_run_the_same_forwards_and_get_their_own_texts(results, name):
    one, other = (found[name] for found in results)
    assert one["num_forwards"] == other["num_forwards"]
    for found in (one, other):
        assert found["is_same_text"]
        assert found["is_same_cache"]
        assert found["is_same_forward"]
    num_target, num_draft = one["num_forwards"]
    if name != "early exit":  # its draft is a copy of the target, which is counted as such
        num_more = NUM_TEST_FORWARDS if name == "unknown type" else 0
        num_more += name == "rows of rank 1 end apart"  # all in one round, so that one lacks what follows its end
        assert num_target == 1 + max(one["num_rounds"], other["num_rounds"]) + num_more
    assert (num_draft > 0) == (CALLS[name].get("draft", "noisy") is not None)
    assert one["num_drafted"] > 0 or name == "alone"
    if name != "rows of rank 1 end apart" and (CALLS[name].get("ends") or CALLS[name].get("one_token")):
        assert other["num_rounds"] < one["num_rounds"]  # rank 1 went on for the sake of rank 0


@pytest.mark.slow
def test_a_draft_state_is_carried_though_ranks_end_apart(results):
    one, other = (found["turns"] for found in results)
    assert one["num_forwards"] == other["num_forwards"]
    for found in (one, other):
        assert found["is_same_text"]
        assert found["num_tokens"] > 2 * (NUM_NEW - 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_run_other_numbers_of_forwards_is_refused(results, name):
    for found in results:
        assert found["refusals"][name].startswith(f"{name} must be left out with synced_gpus and ")


@pytest.mark.slow
def test_all_ranks_refuse_a_model_that_decodes_otherwise_on_one(results):
    assert all(found["class"].startswith("FailsInBatches must give the same logits") for found in results)
    assert [" on another rank; leave" in found["class"] for found in results] == [True, False]


@pytest.mark.parametrize("has_group", [False, True])
def test_a_rank_without_others_decodes_as_ever(has_group):
    target, draft = pair("llama")
    inputs = ragged_prompts(2, seed=1)
    plain = target.generate(**inputs, max_new_tokens=NUM_NEW)
    options = {"prompt_lookup_num_tokens": 3, "prefill_chunk_size": 4, "num_assistant_tokens": 3}
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = target.generate(**inputs, max_new_tokens=NUM_NEW, assistant_model=draft, synced_gpus=True, **options)
    finally:
        if has_group:
            dist.destroy_process_group()
    assert_equal_ids(plain, ours)
