"""With `synced_gpus` all ranks run equally many forwards of each model, and each gets the text it would get alone."""

import datetime
import os
import socket
from contextlib import contextmanager

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
from tests.generation.test_passed_caches import STATE_TOLERANCE, assert_same_contents, cache_contents
from tests.tiny import make_model, noisy_copy, ragged_prompts

NUM_RANKS = 2
NUM_NEW = 16
TIMEOUT_S = 60  # a rank that waits so long for another waits for a forward that never comes
K = {"num_assistant_tokens": 3}
SAMPLED = {"do_sample": True, "seed": 3}


def join(rank, port):
    """Make this process one of the group."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
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
COUPLED = {**SAMPLED, "verifier": "coupled"}
# What a call is given beside its prompt; "draft" names a model, "ends" which token of each row of rank 1 ends it.
CALLS = {
    "constant": {"num_assistant_tokens": 4, "ends": (3, 3)},
    "window": {"kind": "mistral_window", "num_assistant_tokens": 4, "speculation_cache": "dynamic", "ends": (3, 3)},
    "rows of rank 1 end apart": {"num_assistant_tokens": NUM_NEW, "draft": "same", "ends": (3, 7)},
    "rank 1 ends at its first token": {**K, "most": 1},
    "adaptive": {"draft": "small", "num_assistant_tokens_schedule": "adaptive", "ends": (3, 3)},
    "heuristic, unsure": {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.6},
    "lock step": {**K, "logits_processor": [Unchanged()], "ends": (3, 3)},
    "early exit": {**K, "draft": None, "assistant_early_exit": 1},
    "copying": {"draft": None, "prompt_lookup_num_tokens": 4, "ends": (3, 3)},
    "alone": {"draft": None, **COUPLED, "ends": (3, 3)},
    "unknown type": {**K, "model_class": Own},
    "draft state": {**K, "draft_state": hf_speculate.DraftState(), "ends": (3, 3)},
}
REFUSED = {
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "cache_implementation and compile_config": {"cache_implementation": "static"},
    "candidate_generator": {"candidate_generator": PromptLookupCandidateGenerator(), "assistant_model": None},
    "drafter": {"drafter": str, "assistant_model": None},
}


@contextmanager
def gathering(*models):
    """Forwards that wait for the same forward of all ranks, as with sharded weights; how many each model ran."""
    num_forwards = [0] * len(models)

    def wait_for(code):
        def hook(module, args):
            total = torch.tensor(code)
            dist.all_reduce(total)
            assert int(total) == NUM_RANKS * code
            num_forwards[code - 1] += 1

        return hook

    handles = [model.register_forward_pre_hook(wait_for(code)) for code, model in enumerate(models, 1)]
    yield num_forwards
    for handle in handles:
        handle.remove()


def prompts_of(rank):
    """One short prompt, or two longer ones."""
    return ragged_prompts(rank + 1, seed=rank + 1, min_len=4 + 5 * rank, max_len=6 + 9 * rank)


def run_call(rank, name):
    """One call of one rank: its text and cache are those of a call alone, and its forwards those of the other rank."""
    own = {"kind": "llama", "draft": "noisy", "ends": (), "most": NUM_NEW, "model_class": None, **CALLS[name]}
    kind, draft, ends, most, model_class = map(own.pop, ("kind", "draft", "ends", "most", "model_class"))
    target = make_model(kind)
    target.__class__ = model_class or type(target)
    hf_speculate.enable(target)
    noise = {"noisy": DRAFT_NOISE, "same": ACCEPTED_ALL}
    assistant = noisy_copy(target, noise[draft]) if draft in noise else make_model(kind, num_hidden_layers=1)
    inputs = prompts_of(rank)
    shared = {key: own.pop(key) for key in list(own) if key in COUPLED or key == "logits_processor"}
    shared |= {"max_new_tokens": most if rank else NUM_NEW, "return_dict_in_generate": True}
    if ends and rank:
        free = target.generate(**inputs, **shared).sequences
        shared["eos_token_id"] = [int(row[end - NUM_NEW]) for row, end in zip(free, ends, strict=True)]
    alone = target.generate(**inputs, **shared)
    if draft is not None:
        own["assistant_model"] = assistant
    for _ in range(1 + ("draft_state" in own)):  # in the second call the draft has read its prompt
        with gathering(target, assistant) as num_forwards:
            ours = target.generate(**inputs, **shared, **own, synced_gpus=True)
    assert torch.equal(alone.sequences, ours.sequences), name
    assert_same_contents(*(cache_contents(one.past_key_values) for one in (alone, ours)), STATE_TOLERANCE)
    stats = ours.speculation
    num_rounds = of_all_ranks(stats.num_batch_rounds)
    if name != "early exit":  # its draft is a copy of the target, which is counted as such
        num_more = NUM_TEST_FORWARDS * (name == "unknown type")
        num_more += name == "rows of rank 1 end apart"  # all in one round, so that one lacks what follows its end
        assert num_forwards[0] == 1 + max(num_rounds) + num_more, name
    assert (num_forwards[1] > 0) == (draft is not None), name
    assert rank or stats.num_drafted > 0 or name == "alone", name
    if name != "rows of rank 1 end apart" and (ends or most < NUM_NEW):
        assert num_rounds[1] < num_rounds[0], name  # rank 1 went on for the sake of rank 0


def run_rank(rank, port):
    join(rank, port)
    for name in CALLS:
        run_call(rank, name)
    target, draft = pair("llama")
    for name, options in REFUSED.items():  # no rank may have waited for another by then
        with pytest.raises(UnsupportedGenerationError, match=f"^{name} must be left out with synced_gpus and "):
            target.generate(torch.tensor([[5, 6, 7]]), **{"assistant_model": draft, **options}, synced_gpus=True)
    other = make_model("llama")
    other.__class__ = FailsInBatches
    words = "on another rank; leave" if rank == 0 else "FailsInBatches must give the same logits"
    with pytest.raises(UnsupportedModelError, match=words):
        hf_speculate.generate(other, **prompts_of(rank), assistant_model=draft, max_new_tokens=6, synced_gpus=True)
    dist.destroy_process_group()


@pytest.mark.slow
def test_synced_ranks_run_the_same_forwards_and_get_their_own_texts():
    run_in_every_rank(run_rank)


@pytest.mark.parametrize("has_group", [False, True])
def test_a_rank_without_others_decodes_as_ever(has_group):
    target, draft = pair("llama")
    inputs = ragged_prompts(2, seed=1)
    options = {"prompt_lookup_num_tokens": 3, "prefill_chunk_size": 4, "assistant_model": draft, "synced_gpus": True}
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = target.generate(**inputs, max_new_tokens=NUM_NEW, num_assistant_tokens=3, **options)
    finally:
        if has_group:
            dist.destroy_process_group()
    assert_equal_ids(target.generate(**inputs, max_new_tokens=NUM_NEW), ours)
