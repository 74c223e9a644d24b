"""Test that compiled rounds over fixed buffers give the eager text and compile nothing twice."""

import logging

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

import hf_speculate
from hf_speculate.compat import CACHE_NAME
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.options.compiled.buffer_pool import BufferPool
from hf_speculate.options.compiled.compilation import Compilation
from tests.cases import assert_equal_ids, new_pair, pair
from tests.reliability.faults import Fault, FaultyCriterion
from tests.support.compiled_calls import K, compile_config, compiled_and_eager, small_pair
from tests.support.tiny import make_model, noisy_copy, ragged_prompts
from tests.support.tiny_encoders import make_llava, picture_prompts, text_draft

ENDS = [17, 3, 40, 9]
COUPLED = {"do_sample": True, "verifier": "coupled", "top_k": 0, "seed": 5}


@pytest.mark.parametrize(
    ("family", "batch_size", "options"),
    [
        ("llama", 3, {}),
        # the last steps run one by one
        ("llama", 3, {**COUPLED, "assistant_confidence_threshold": 0.2}),
        *(
            pytest.param(*case, {}, marks=pytest.mark.slow)
            for case in (("llama", 1), ("gemma2", 3), ("gpt2", 3))
        ),
        pytest.param("llama", 3, {**COUPLED, "assistant_model": None}, marks=pytest.mark.slow),
    ],
)
def test_text_equals_the_eager_one_and_rows_that_end_stay(family, batch_size, options):
    options = {"eos_token_id": ENDS, **options}
    if "assistant_model" in options:
        options["num_assistant_tokens"] = None
    arguments = *small_pair(family), ragged_prompts(batch_size, max_len=20), compile_config()
    ids, eager, stats = compiled_and_eager(*arguments, **options)
    assert_equal_ids(eager, ids)
    compiled = ["target", "draft"][: 1 + ("assistant_model" not in options)]
    assert (stats.cache, stats.compiled, stats.fallbacks) == ("preallocated", compiled, [])


@pytest.mark.slow
@pytest.mark.compiler
def test_inductor_compiles_once_while_text_outgrows_its_width():
    target, draft = small_pair("llama")
    arguments = target, draft, ragged_prompts(3), compile_config("inductor")
    num_graphs = []
    for num_new in (8, 300, 300):
        ids, eager, stats = compiled_and_eager(*arguments, max_new_tokens=num_new)
        assert_equal_ids(eager, ids)
        assert stats.compiled == ["target", "draft"]
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] == num_graphs[1] == num_graphs[2]


@pytest.mark.parametrize(
    "mode", [{}, pytest.param({"do_sample": True, "top_k": 0, "seed": 3}, marks=pytest.mark.slow)]
)
def test_four_graphs_serve_all_batch_sizes_and_lengths(mode):
    """Expect two graphs per model, one for a single row and one for several rows."""
    target, draft = new_pair(num_hidden_layers=1)
    torch._dynamo.reset()
    counters.clear()
    calls = [(3, 6, {"num_assistant_tokens": 2}), (2, 250, {"num_assistant_tokens": 5}), (1, 6, {})]
    for batch_size, prompt_len, own in [*calls, (1, 300, {"num_assistant_tokens": 3}), calls[0]]:
        inputs = ragged_prompts(batch_size, min_len=prompt_len, max_len=prompt_len)
        schedule = (
            {}
            if own
            else {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": None}
        )
        ids, eager, stats = compiled_and_eager(
            target,
            draft,
            inputs,
            compile_config(),
            **{"max_new_tokens": 16, **schedule, **own, **mode},
        )
        assert_equal_ids(eager, ids)
        assert (stats.compiled, stats.fallbacks) == (["target", "draft"], [])
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.fallback("eager forwards")
def test_call_stays_eager_where_plain_would_not_compile():
    for family, config, more, cache_kind, reasons in (
        ("llama", CompileConfig(), {}, "preallocated", ["plain generate() would not compile"]),
        ("llama", compile_config(), {"disable_compile": True}, "preallocated", [""]),
        (
            "bloom",
            compile_config(),
            {},
            "dynamic",
            ["target cache", "draft cache", *["states are not preallocated"] * 2],
        ),
    ):
        target, draft = pair(family)
        ids, eager, stats = compiled_and_eager(target, draft, ragged_prompts(2), config, **more)
        assert_equal_ids(eager, ids)
        assert (stats.cache, stats.compiled) == (cache_kind, [])
        assert all(reason in said for reason, said in zip(reasons, stats.fallbacks, strict=True))


@pytest.mark.fallback("eager forwards")
def test_eager_target_beside_compiled_draft_reuses_no_buffers():
    target = hf_speculate.enable(make_llava())
    draft, inputs = text_draft(target), picture_prompts(target, 2)
    for _ in range(2):
        ids, eager, stats = compiled_and_eager(
            target, draft, inputs, compile_config(), max_new_tokens=8
        )
        assert_equal_ids(eager, ids)
        assert (stats.cache, stats.compiled) == ("preallocated", ["draft"])


def breaks_graphs(module, args):
    torch._dynamo.graph_break()


@pytest.mark.fallback("eager forwards")
def test_uncompilable_model_warns_once_and_decodes_eagerly(caplog):
    target, draft = new_pair(num_hidden_layers=1)
    target.model.register_forward_pre_hook(breaks_graphs)
    with caplog.at_level(logging.WARNING, logger="hf_speculate"):
        for _ in range(2):
            ids, eager, stats = compiled_and_eager(
                target, draft, ragged_prompts(3), compile_config()
            )
            assert_equal_ids(eager, ids)
            assert stats.compiled == ["draft"]
            (fallback,) = stats.fallbacks
            assert "LlamaForCausalLM, which cannot be compiled" in fallback
    assert [record.message for record in caplog.records].count(
        fallback.removeprefix("target: ")
    ) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 3])
def test_cuda_graphs_replay_the_eager_text(batch_size):
    target = hf_speculate.enable(make_model("llama", dtype=torch.float32).cuda())
    draft = noisy_copy(target)
    inputs = {name: value.cuda() for name, value in ragged_prompts(batch_size, max_len=20).items()}
    options = {
        "max_new_tokens": 60,
        "num_assistant_tokens": K,
        "assistant_model": draft,
        "eos_token_id": ENDS,
    }
    eager = target.generate(**inputs, **options, speculation_graphs="off")
    counters["inductor"].clear()
    for _ in range(3):  # on a GPU, a static cache alone enables compiling
        stats = hf_speculate.SpeculationStats()
        ids = target.generate(
            **inputs, **options, cache_implementation="static", speculation_stats=stats
        )
        assert_equal_ids(eager, ids)
        assert stats.compiled == ["target", "draft"]
    assert counters["inductor"]["cudagraph_skips"] == 0


def addresses_of(*models):
    pools = [BufferPool.of(model) for model in models]
    return {
        tensor.data_ptr()
        for pool in pools
        for kept in pool._idle.values()
        for tensor in kept.tensors
    }


@pytest.mark.fallback("lock step")
def test_buffers_are_returned_after_a_failed_call():
    target, draft = new_pair(num_hidden_layers=1)
    options = {
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_logits": True,
        **ragged_prompts(2),
    }
    own = {"assistant_model": draft, "num_assistant_tokens": K, "compile_config": compile_config()}
    ours, plain = target.generate(**options, **own), target.generate(**options)
    addresses = addresses_of(target, draft)
    assert addresses
    with pytest.raises(KeyboardInterrupt):  # in the same buffers
        target.generate(
            **options, **own, stopping_criteria=[FaultyCriterion(Fault(5, KeyboardInterrupt()))]
        )
    again = target.generate(**options, **own)
    assert (again.speculation.compiled, addresses_of(target, draft)) == (
        ["target", "draft"],
        addresses,
    )
    for sequences in (ours, again):
        assert_equal_ids(plain.sequences, sequences.sequences)
        torch.testing.assert_close(sequences.logits, plain.logits)
        assert type(sequences[CACHE_NAME]) is type(plain[CACHE_NAME])
        for layer, expected in zip(
            sequences[CACHE_NAME].layers, plain[CACHE_NAME].layers, strict=True
        ):
            torch.testing.assert_close(layer.keys, expected.keys)


def test_nested_and_shorter_calls_read_only_their_own_states():
    """Give both calls buffers of the same size, which later calls reuse alternately."""
    target, draft = new_pair(num_hidden_layers=1)
    prompts = [
        ragged_prompts(2, seed=length, min_len=length - 3, max_len=length) for length in (20, 9)
    ]
    options = {"max_new_tokens": 12, "assistant_model": draft, "num_assistant_tokens": K}
    eager = [target.generate(**inputs, **options) for inputs in prompts]
    options["compile_config"], inner = compile_config(), []

    def decode_inside(report):
        if report.num_round == 2:
            inner.append(target.generate(**prompts[1], **options))

    outer = target.generate(**prompts[0], **options, speculation_callback=decode_inside)
    assert_equal_ids(eager[0], outer)
    assert_equal_ids(eager[1], *inner)
    for index in (1, 0, 1):
        assert_equal_ids(eager[index], target.generate(**prompts[index], **options))


def doubled(model: torch.nn.Module, values: Tensor) -> Tensor:
    return 2 * values


def test_a_recompile_limit_holds_for_the_call_alone() -> None:
    model, reasons = make_model("llama", num_hidden_layers=1), []

    def compilation() -> Compilation:
        return Compilation(
            model,
            CompileConfig(backend="eager", mode=None),
            CompiledUnits.of(model),
            reasons.append,
        )

    first = compilation()
    # torch compiles two of the three numbers of dimensions
    with torch._dynamo.config.patch(recompile_limit=2):
        results = [first.run("double", doubled, torch.ones((1,) * num)) for num in (1, 2, 3)]
    assert [result is None for result in results] == [False, False, True]
    (reason,) = reasons
    assert "recompile limit" in reason
    assert first.run("double", doubled, torch.ones(1)) is None  # the rest of the call runs eagerly
    assert torch.equal(compilation().run("double", doubled, torch.ones(1)), torch.tensor([2.0]))
    assert reasons == [reason]
