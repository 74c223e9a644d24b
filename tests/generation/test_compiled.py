"""Compiled rounds over fixed buffers give the eager text, compile nothing twice, and say where they cannot be."""

import copy
import logging
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig, StaticCache

import hf_speculate
from hf_speculate.cache.preallocated import PreallocatedKVCache
from hf_speculate.models import compiled
from hf_speculate.models.cache_selection import CacheRequest
from hf_speculate.models.compilation import Compilation
from tests.cases import assert_equal_ids, each_value, pair
from tests.tiny import make_model, noisy_copy, ragged_prompts

K = 2
ENDS = [17, 3, 40, 9]


LAYERS = {  # few, because compiling takes the more time the more there are
    "llama": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2},  # one with a window, one without
    "gpt2": {"n_layer": 1},
}


@cache
def small_pair(kind):
    """As `tests.cases.pair`; what one test compiles for it serves the others."""
    target = hf_speculate.enable(make_model(kind, **LAYERS[kind]))
    return target, noisy_copy(target)


def fresh_pair():
    """Models of whose buffers none are kept yet; one layer each."""
    target = hf_speculate.enable(make_model("llama", num_hidden_layers=1))
    return target, noisy_copy(target)


def compile_config(backend="eager", **options):
    """transformers compiles on a CPU only with this flag, which its own tests set too."""
    config = CompileConfig(backend=backend, mode=options.pop("mode", "default"), **options)
    config._compile_all_devices = True
    return config


def compiled_and_eager(target, draft, inputs, config, **options):
    """Ids by compiled rounds and by eager ones, and the statistics of the first."""
    options = {"max_new_tokens": 24, "num_assistant_tokens": K, "assistant_model": draft, **options}
    eager = target.generate(**inputs, **options)
    stats = hf_speculate.SpeculationStats()
    ids = target.generate(**inputs, **options, compile_config=config, speculation_stats=stats)
    return ids, eager, stats


@pytest.fixture
def runs(monkeypatch):
    """What ran compiled, run by run, with the number of graphs there were after it."""
    seen = []
    run = Compilation.run

    def watched(self, name, *args):
        result = run(self, name, *args)
        seen.append((name, counters["stats"]["unique_graphs"]))
        return result

    monkeypatch.setattr(Compilation, "run", watched)
    return seen


@pytest.mark.parametrize(
    ("kind", "batch_size"),
    [
        ("llama", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", 1), ("gemma2", 3), ("gpt2", 3))),
    ],
)
def test_text_equals_plain_and_rows_that_end_stay(kind, batch_size):
    target, draft = small_pair(kind)
    inputs = ragged_prompts(batch_size, max_len=20)
    plain = target.generate(**inputs, max_new_tokens=24, eos_token_id=ENDS)
    ids, _, stats = compiled_and_eager(target, draft, inputs, compile_config(), eos_token_id=ENDS)
    assert_equal_ids(plain, ids)
    assert (stats.cache, stats.compiled, stats.fallbacks) == ("preallocated", ["target", "draft"], [])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"do_sample": True, "top_k": 0}, marks=pytest.mark.slow),  # all steps in one unit
        pytest.param(  # one by one
            {"do_sample": True, "top_k": 10, "assistant_confidence_threshold": 0.2}, marks=pytest.mark.slow
        ),
        {"do_sample": True, "verifier": "coupled", "top_k": 0},
    ],
)
def test_sampling_equals_the_eager_path(options):
    target, draft = small_pair("llama")
    ids, eager, stats = compiled_and_eager(
        target, draft, ragged_prompts(3, max_len=20), compile_config(), seed=5, eos_token_id=ENDS, **options
    )
    assert_equal_ids(eager, ids)
    assert stats.compiled == ["target", "draft"]


@pytest.mark.slow
def test_the_shortest_prompt_may_be_one_token():
    target, draft = small_pair("llama")
    inputs = {"input_ids": torch.tensor([[7]])}
    ids, eager, stats = compiled_and_eager(target, draft, inputs, compile_config())
    assert_equal_ids(eager, ids)
    assert stats.compiled == ["target", "draft"]


@pytest.mark.slow
@pytest.mark.compiler
def test_inductor_compiles_every_shape_once_while_the_text_outgrows_its_width(runs):
    target, draft = small_pair("llama")
    ids, eager, stats = compiled_and_eager(
        target, draft, ragged_prompts(3), compile_config("inductor"), max_new_tokens=300
    )
    assert_equal_ids(eager, ids)
    assert stats.compiled == ["target", "draft"]
    assert stats.num_batch_rounds > 60
    assert {name for name, _ in runs} == {"draft step, greedy", "forward"}
    assert runs[-1][1] == next(num for name, num in runs if name == "forward")
    num_graphs = counters["stats"]["unique_graphs"]
    again, _, _ = compiled_and_eager(target, draft, ragged_prompts(3), compile_config("inductor"), max_new_tokens=300)
    assert_equal_ids(ids, again)
    assert counters["stats"]["unique_graphs"] == num_graphs  # nor does the next call compile anything


@pytest.mark.parametrize("mode", [{}, pytest.param({"do_sample": True, "top_k": 0, "seed": 3}, marks=pytest.mark.slow)])
def test_four_graphs_serve_every_batch_size_draft_length_and_length(mode):
    """The target's forward and the draft's step, each for one row and for several."""
    target, draft = fresh_pair()
    torch._dynamo.reset()
    counters.clear()
    calls = [(3, 6, {"num_assistant_tokens": 2}), (2, 250, {"num_assistant_tokens": 5}), (1, 6, {})]
    for batch_size, prompt_len, own in [*calls, (1, 300, {"num_assistant_tokens": 3}), calls[0]]:
        inputs = ragged_prompts(batch_size, min_len=prompt_len, max_len=prompt_len)
        schedule = {} if own else {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": None}
        ids, eager, stats = compiled_and_eager(
            target, draft, inputs, compile_config(), **{"max_new_tokens": 16, **schedule, **own, **mode}
        )
        assert_equal_ids(eager, ids)
        assert (stats.compiled, stats.fallbacks) == (["target", "draft"], [])
    assert counters["stats"]["unique_graphs"] == 4


def test_a_draft_that_follows_plain_steps_compiles_no_further_graph(scripted):
    target, draft = fresh_pair()
    torch._dynamo.reset()
    counters.clear()
    inputs = ragged_prompts(3)
    ids, _, stats = compiled_and_eager(target, draft, inputs, compile_config(), num_assistant_tokens=5)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    assert (stats.compiled, stats.fallbacks) == (["target", "draft"], [])
    assert counters["stats"]["unique_graphs"] == 2


@each_value(kind=["llama", "gemma2", "gpt2"], batch_size=[1, 3])
def test_a_static_cache_without_a_compiler_means_fixed_buffers(kind, batch_size, monkeypatch):
    target, draft = small_pair(kind)
    inputs = ragged_prompts(batch_size, max_len=20)
    plain = target.generate(**inputs, max_new_tokens=30, eos_token_id=ENDS)
    caches = []
    make = CacheRequest.make
    monkeypatch.setattr(CacheRequest, "make", lambda self, *args: caches.append(make(self, *args)) or caches[-1])
    stats = hf_speculate.SpeculationStats()
    config = GenerationConfig(cache_implementation="static", max_new_tokens=30, eos_token_id=ENDS, pad_token_id=0)
    before = copy.deepcopy(config)
    own = {"assistant_model": draft, "num_assistant_tokens": K, "speculation_stats": stats}
    ids = target.generate(**inputs, **own, generation_config=config)
    assert_equal_ids(plain, ids)
    assert (stats.cache, stats.compiled, stats.fallbacks) == ("preallocated", [], [])
    assert config.to_dict() == before.to_dict()
    capacities = {layer.capacity for cache in caches for layer in cache.cache.layers}
    assert capacities <= {128} if batch_size == 1 else max(capacities) <= 128  # ended rows take their padding along


def test_output_and_cache_are_handed_back_as_ever():
    target, draft = small_pair("llama")
    inputs = ragged_prompts(2)
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    ids, plain = (
        target.generate(**inputs, **options, **own)
        for own in ({"assistant_model": draft, "num_assistant_tokens": K, "compile_config": compile_config()}, {})
    )
    assert_equal_ids(plain.sequences, ids.sequences)
    assert type(ids.past_key_values) is type(plain.past_key_values)
    assert ids.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    for one, other in zip(ids.logits, plain.logits, strict=True):
        torch.testing.assert_close(one, other)


def test_where_plain_generate_would_not_compile_we_do_not_and_say_so():
    target, draft = small_pair("llama")
    inputs = ragged_prompts(2)
    ids, eager, stats = compiled_and_eager(target, draft, inputs, CompileConfig())
    assert_equal_ids(eager, ids)
    assert stats.cache == "preallocated"
    assert (stats.compiled, len(stats.fallbacks)) == ([], 1)
    assert "plain generate() would not compile" in stats.fallbacks[0]
    ids, _, stats = compiled_and_eager(target, draft, inputs, compile_config(), disable_compile=True)
    assert_equal_ids(eager, ids)
    assert stats.compiled == []


def test_states_that_cannot_be_preallocated_run_eagerly():
    target, draft = pair("bloom")
    ids, eager, stats = compiled_and_eager(target, draft, ragged_prompts(2), compile_config())
    assert_equal_ids(eager, ids)
    assert (stats.cache, stats.compiled) == ("dynamic", [])
    assert len(stats.fallbacks) == 2
    assert "whose states are not preallocated" in stats.fallbacks[0]


def test_a_static_cache_of_the_users_own_means_fixed_buffers():
    target, draft = small_pair("llama")
    inputs, stats = ragged_prompts(2), hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 12, "past_key_values": StaticCache(config=target.config, max_cache_len=64)}
    own = {"assistant_model": draft, "num_assistant_tokens": K, "speculation_stats": stats}
    ids = target.generate(**inputs, **options, **own, compile_config=compile_config())
    assert_equal_ids(target.generate(**inputs, max_new_tokens=12), ids)
    assert (stats.cache, stats.compiled, stats.fallbacks) == ("preallocated", ["target", "draft"], [])
    target.generate(**inputs, **{**options, "past_key_values": StaticCache(target.config, 64)}, **own)
    assert (stats.cache, stats.compiled) == ("preallocated", [])  # on a CPU plain generate() would not compile either


@pytest.mark.slow
def test_coupled_sampling_without_an_assistant_compiles_single_steps():
    target, _ = small_pair("llama")
    options = {"do_sample": True, "verifier": "coupled", "seed": 2, "max_new_tokens": 10, "top_k": 0}
    eager = target.generate(**ragged_prompts(2), **options)
    stats = hf_speculate.SpeculationStats()
    ids = target.generate(**ragged_prompts(2), **options, compile_config=compile_config(), speculation_stats=stats)
    assert_equal_ids(eager, ids)
    assert stats.compiled == ["target"]


def breaks_graphs(module, args):
    torch._dynamo.graph_break()


def test_a_model_that_cannot_be_compiled_says_so_once_and_decodes_eagerly(caplog):
    target = hf_speculate.enable(make_model("llama", num_hidden_layers=1))
    draft = noisy_copy(target)
    target.model.register_forward_pre_hook(breaks_graphs)
    inputs = ragged_prompts(3)
    with caplog.at_level(logging.WARNING, logger="hf_speculate"):
        for _ in range(2):
            ids, eager, stats = compiled_and_eager(target, draft, inputs, compile_config())
            assert_equal_ids(eager, ids)
            assert stats.compiled == ["draft"]
            assert len(stats.fallbacks) == 1
            assert "LlamaForCausalLM, which cannot be compiled" in stats.fallbacks[0]
    assert [record.message for record in caplog.records].count(stats.fallbacks[0].removeprefix("target: ")) == 1


@pytest.mark.slow
def test_a_backend_that_fails_leaves_all_rounds_eager():
    def fails(graph, inputs):
        raise NotImplementedError("no such instruction")

    target = hf_speculate.enable(make_model("llama", num_hidden_layers=1))
    draft = noisy_copy(target)
    ids, eager, stats = compiled_and_eager(target, draft, ragged_prompts(3), compile_config(fails))
    assert_equal_ids(eager, ids)
    assert stats.compiled == []
    assert len(stats.fallbacks) == 2


@pytest.mark.parametrize(("num_steps", "most", "num_widths"), [(2, 1.5, 10), (4, 1.25, 18)])
def test_widths_leave_a_part_unused_at_most(num_steps, most, num_widths):
    for num_columns in range(257, 5000):
        width = compiled.width_for(num_columns, 1 << 20, num_steps)
        assert num_columns <= width <= most * num_columns + 1
    assert compiled.width_for(10, 128, num_steps) == 120
    assert len({compiled.width_for(num, 1 << 20, num_steps) for num in range(5000)}) == num_widths


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 3])
def test_cuda_graphs_replay_the_eager_text(batch_size):
    target = hf_speculate.enable(make_model("llama", dtype=torch.float32).cuda())
    draft = noisy_copy(target)
    inputs = {name: value.cuda() for name, value in ragged_prompts(batch_size, max_len=20).items()}
    options = {"max_new_tokens": 60, "num_assistant_tokens": K, "assistant_model": draft, "eos_token_id": ENDS}
    eager = target.generate(**inputs, **options)
    counters["inductor"].clear()
    for _ in range(3):  # a static cache alone compiles on a GPU, with graphs
        stats = hf_speculate.SpeculationStats()
        ids = target.generate(**inputs, **options, cache_implementation="static", speculation_stats=stats)
        assert_equal_ids(eager, ids)
        assert stats.compiled == ["target", "draft"]
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.fixture
def addresses(monkeypatch):
    """The address of every buffer, by call and model, as it is when the states are let go."""
    seen = []
    release = PreallocatedKVCache.release

    def watched(self):
        seen.append([buffer.data_ptr() for layer in self.cache.layers for buffer in layer.buffers])
        release(self)

    monkeypatch.setattr(PreallocatedKVCache, "release", watched)
    return seen


@pytest.mark.slow
def test_a_second_call_finds_its_buffers_where_they_were(addresses, runs):
    target, draft = fresh_pair()
    inputs = ragged_prompts(3, max_len=20)
    options = {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": 20}
    eager = target.generate(**inputs, **options)
    addresses.clear()
    first = target.generate(**inputs, **options, compile_config=compile_config())
    num_graphs = runs[-1][1]
    others = ragged_prompts(3, max_len=16)
    assert_equal_ids(
        target.generate(**others, **options), target.generate(**others, **options, compile_config=compile_config())
    )
    again = target.generate(**inputs, **options, compile_config=compile_config())
    assert_equal_ids(eager, first)
    assert_equal_ids(eager, again)
    (target_addresses, draft_addresses), (_, _), second, third = (addresses[at : at + 2] for at in range(0, 8, 2))
    assert [target_addresses, draft_addresses] == second == third
    assert not set(target_addresses) & set(draft_addresses)
    assert runs[-1][1] == num_graphs


@pytest.mark.slow
def test_buffers_of_another_length_are_others(addresses):
    target, draft = fresh_pair()
    options = {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": 12}
    for length in (60, 300):
        config = GenerationConfig(max_cache_len=length, pad_token_id=0)
        target.generate(
            **ragged_prompts(2, max_len=20), **options, generation_config=config, compile_config=compile_config()
        )
    assert not set(addresses[0]) & set(addresses[2])


@pytest.mark.slow
def test_states_that_are_handed_back_are_not_the_buffers(addresses):
    target, draft = fresh_pair()
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, "assistant_model": draft}
    output = target.generate(**ragged_prompts(2), **options, num_assistant_tokens=K, compile_config=compile_config())
    states = [part for layer in output.past_key_values.layers for part in (layer.keys, layer.values)]
    before = [part.clone() for part in states]
    assert not {part.data_ptr() for part in states} & set(addresses[0])
    target.generate(**ragged_prompts(2), **options, num_assistant_tokens=K, compile_config=compile_config())
    assert all(torch.equal(one, other) for one, other in zip(states, before, strict=True))


def test_a_call_that_fails_gives_its_buffers_back(addresses):
    target, draft = fresh_pair()
    inputs = ragged_prompts(2, max_len=20)
    options = {"assistant_model": draft, "num_assistant_tokens": K, "max_new_tokens": 12}
    fails = iter([False, True])

    def criterion(ids, scores, **kwargs):
        if next(fails):
            raise KeyError("the user's")
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyError):
        target.generate(**inputs, **options, compile_config=compile_config(), stopping_criteria=[criterion])
    plain = target.generate(**inputs, **options)
    ids = target.generate(**inputs, **options, compile_config=compile_config())
    assert_equal_ids(plain, ids)
    assert addresses[0] == addresses[-2]
