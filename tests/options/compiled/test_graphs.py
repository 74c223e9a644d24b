"""Test that rounds from graphs give the text of plain decoding, with simulated device graphs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.options.compiled.compilation import Steps
from hf_speculate.options.compiled.drafter import split_steps
from hf_speculate.options.compiled.graphs import CudaGraphs, Graphing
from hf_speculate.options.compiled.language_model import Numbers
from tests.cases import assert_equal_ids, each_value, new_pair, pair
from tests.options.heads.kinds import KINDS
from tests.support.fake_cuda import FakeCuda
from tests.support.tiny import make_model, noisy_copy, ragged_prompts

ENDS = [17, 3, 40, 9]
GRAPHS: dict[str, Any] = {"speculation_graphs": "on", "num_assistant_tokens": 3}
# otherwise, measured times would decide on lengths
CONSTANT = {"num_assistant_tokens": None, "num_assistant_tokens_schedule": "constant"}

VARYING = {"num_assistant_tokens": None, "num_assistant_tokens_schedule": "heuristic"}


def decode(
    target: PreTrainedModel, inputs: dict[str, Tensor], **options: Any
) -> tuple[Tensor, Any]:
    stats = hf_speculate.SpeculationStats()
    options = {"max_new_tokens": 24, **GRAPHS, **options}
    return target.generate(**inputs, **options, speculation_stats=stats), stats


@each_value(family=["llama", "gemma2"], batch_size=[1, 3])
def test_draft_model_gives_plain_text_and_captures_once(
    backend: Any, family: str, batch_size: int
) -> None:
    target, draft = new_pair(family, 0.1)
    num_rounds = 0
    for seed, max_len in ((0, 20), (3, 17)):
        inputs = ragged_prompts(batch_size, seed=seed, max_len=max_len)
        ids, stats = decode(target, inputs, assistant_model=draft, eos_token_id=ENDS)
        assert_equal_ids(target.generate(**inputs, max_new_tokens=24, eos_token_id=ENDS), ids)
        assert (stats.graphed, stats.fallbacks, stats.cache) == (
            ["target", "draft"],
            [],
            "preallocated",
        )
        num_rounds += stats.num_batch_rounds
        # a verification and the steps of a draft
        assert (backend.num_captures, backend.num_replays) == (2, 2 * num_rounds)
    assert "from graphs: target, draft" in stats.plan


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 10, "temperature": 0.7},
        {"top_k": 0, "verifier": "coupled"},
        {"top_k": 0, "verifier": "rejection", **VARYING},
        {"do_sample": False, "prompt_lookup_num_tokens": 4, **VARYING},
        {"assistant_model": None, "prompt_lookup_num_tokens": 4, **CONSTANT},
    ],
)
def test_sampled_text_is_that_of_eager_rounds(backend: Any, options: dict[str, Any]) -> None:
    target, draft = pair("llama")
    options = {
        "assistant_model": draft,
        "do_sample": True,
        "seed": 5,
        "eos_token_id": ENDS,
        **options,
    }
    inputs = ragged_prompts(3, max_len=20)
    ids, stats = decode(target, inputs, **options)
    assert_equal_ids(decode(target, inputs, **options, speculation_graphs="off")[0], ids)
    assert (stats.graphed, stats.fallbacks) == (
        ["target", "draft"][: 1 + bool(options["assistant_model"])],
        [],
    )
    assert backend.num_replays >= stats.num_batch_rounds


def test_steps_are_split_into_captured_lengths() -> None:
    assert [split_steps(num, (1, 2, 4, 6)) for num in (1, 3, 5, 6, 13)] == [
        [1],
        [2, 1],
        [4, 1],
        [6],
        [6, 6, 1],
    ]
    assert [split_steps(num, (4,)) for num in (3, 4, 5)] == [[4], [4], [4, 4]]
    assert split_steps(3, ()) == [3]


def next_ids(model: PreTrainedModel, carry: Numbers, weights: Tensor) -> tuple[Tensor, Numbers]:
    following = carry.by_row * 3 % 64
    return following.T, Numbers(following)


def test_steps_of_two_calls_in_turn_share_their_memory(backend: Any) -> None:
    """Check that replays overwrite the outputs of the graph, and that inputs are not copied."""
    model = make_model("llama", num_hidden_layers=1)
    runner = Graphing(model, CompiledUnits(), pytest.fail, is_tried=False)
    runner.bind(SimpleNamespace(graphs={}))  # type: ignore[arg-type]
    steps = Steps(next_ids, lambda results, weights: torch.cat(results, 1))
    carry, weights, drafts = Numbers(torch.tensor([[1, 2]])), torch.ones(2), []
    for first in (1, 2, 1):
        carry.by_row.fill_(first)
        token_ids, last = runner.repeat("steps", steps, 3, carry, weights)
        drafts.append(token_ids)
        expected = torch.tensor([first * 3, first * 9, first * 27 % 64])
        assert torch.equal(token_ids, expected.expand(2, -1))
        assert torch.equal(last.by_row, token_ids[:, -1:].T)
    assert len(set(map(id, drafts))) == backend.num_captures == 1


def test_a_head_reads_the_states_of_graphs(backend: Any, tmp_path: Path) -> None:
    head, target = KINDS["EAGLE-3, two layers"](tmp_path)
    hf_speculate.enable(target)
    inputs = ragged_prompts(3, seed=0, vocab_size=target.config.vocab_size)
    ids, stats = decode(target, inputs, assistant_model=head)
    eager_ids, eager = decode(target, inputs, assistant_model=head, speculation_graphs="off")
    assert_equal_ids(eager_ids, ids)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    assert (stats.graphed, stats.fallbacks) == (["target", "draft"], [])
    assert stats.draft_lens == eager.draft_lens  # wrong states would draft other tokens
    assert stats.accepted_per_position == eager.accepted_per_position


@pytest.mark.parametrize("num_wrong", [2, 3])
def test_steps_that_differ_twice_are_compared_again(
    backend: Any, monkeypatch: pytest.MonkeyPatch, num_wrong: int
) -> None:
    model, reasons = make_model("llama", num_hidden_layers=1), list[str]()
    runner = Graphing(model, CompiledUnits(), reasons.append, is_tried=True)
    runner.bind(SimpleNamespace(graphs={}))  # type: ignore[arg-type]
    steps = Steps(next_ids, lambda results, weights: torch.cat(results, 1))
    carry, weights = Numbers(torch.tensor([[1, 2]])), torch.ones(2)
    for number in range(num_wrong):
        monkeypatch.setattr(backend, "is_wrong", True)
        token_ids, _ = runner.repeat("steps", steps, 5, carry, weights)
        assert token_ids[0].tolist() == [3, 9, 27, 17, 51], number  # the ids of the eager steps
    assert [bool(reasons), runner.is_working] == [num_wrong == 3, num_wrong == 2]


def reads_host(module: Any, args: Any) -> None:
    next(module.parameters()).sum().item()


@pytest.mark.fallback("eager forwards")
def test_new_weights_are_recaptured_and_host_reads_run_eagerly(
    backend: Any,
) -> None:
    target, draft = new_pair("llama", 0.1)
    inputs, stranger = ragged_prompts(2, max_len=20), make_model("llama", seed=7)
    decode(target, inputs, assistant_model=draft)
    for weight, new in zip(target.parameters(), stranger.parameters(), strict=True):
        weight.data = new.data  # moves the weight
    ids, stats = decode(target, inputs, assistant_model=draft)
    assert_equal_ids(stranger.generate(**inputs, max_new_tokens=24), ids)
    assert (stats.graphed, backend.num_captures) == (["target", "draft"], 3)
    target, draft = new_pair("llama", 0.1)
    target.model.register_forward_pre_hook(reads_host)
    for _ in range(2):  # the second call does not try again
        ids, stats = decode(target, inputs, assistant_model=draft)
        assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
        assert (stats.graphed, backend.num_captures) == (["draft"], 4)
        (fallback,) = stats.fallbacks
        assert "LlamaForCausalLM, which cannot be captured: the host was read" in fallback


@pytest.mark.fallback("no graphs")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculation_cache": "dynamic"}, "its states are not preallocated"),
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "hidden states or attentions are returned",
        ),
    ],
)
def test_what_cannot_be_captured_says_why(
    backend: Any, options: dict[str, Any], reason: str
) -> None:
    target, draft = pair("llama")
    stats = decode(target, ragged_prompts(1), assistant_model=draft, max_new_tokens=4, **options)[1]
    assert "target" not in stats.graphed
    assert f"no graphs of the target LlamaForCausalLM: {reason}" in stats.fallbacks


READS: dict[str, Any] = {
    "a number": lambda ids: ids.sum().item(),
    "a mask of unknown size": lambda ids: ids[ids > 3],
    "a copy to the host": lambda ids: ids.cpu(),
}


@pytest.mark.parametrize("what", READS)
def test_what_reads_the_host_is_found_before_a_capture(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeCuda():
        ids = torch.arange(8).to("cuda:0")
        monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: pytest.fail("captured"))
        with pytest.raises(RuntimeError, match="the host was read in a forward"):
            CudaGraphs(ids.device).capture(lambda: READS[what](ids))


@pytest.mark.fallback("no graphs")
def test_on_a_cpu_rounds_are_eager() -> None:
    target, draft = pair("llama")
    for graphs, num_reasons in (("auto", 0), ("on", 2)):
        stats = decode(target, ragged_prompts(2), assistant_model=draft, speculation_graphs=graphs)[
            1
        ]
        assert stats.graphed == []
        assert ["graphs need a CUDA device" in reason for reason in stats.fallbacks] == [
            True
        ] * num_reasons


def test_a_graph_has_workspaces_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: seen.append("dropped"), raising=False
    )
    with FakeCuda():
        CudaGraphs(torch.device("cuda", 0)).capture(lambda: seen.append("run"))
    # the first run looks for reads on the host
    assert seen == ["run", "run", "dropped", "run", "dropped"]


def test_graphs_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda():
        capture, streams = torch.cuda.graph, []

        def captured(*args: Any, stream: Any, **options: Any) -> Any:
            streams.append(stream)
            return capture(*args, stream=stream, **options)

        monkeypatch.setattr(torch.cuda, "graph", captured)
        graphs = CudaGraphs(torch.device("cuda", 0))
        for _ in range(2):
            graphs.capture(lambda: None)
    assert streams[0] is streams[1]


@pytest.mark.gpu
def test_graphs_outlive_the_workspaces_that_others_drop() -> None:
    target, draft = (model.to("cuda", torch.bfloat16) for model in new_pair("llama", 0.1))
    inputs = {name: value.cuda() for name, value in ragged_prompts(1, seed=4, min_len=8).items()}
    ids, stats = decode(target, inputs, assistant_model=draft, max_new_tokens=40)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    again, stats = decode(target, inputs, assistant_model=draft, max_new_tokens=40)
    assert stats.graphed == ["target", "draft"]
    assert_equal_ids(ids, again)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0, "seed": 1}])
def test_graphs_on_a_device_give_the_eager_text(batch_size: int, options: dict[str, Any]) -> None:
    """Use float32; half precision is tested in test_half_precision_on_gpu.py."""
    target = hf_speculate.enable(make_model("llama", dtype=torch.float32).cuda())
    options = {**options, "assistant_model": noisy_copy(target, 0.1), "max_new_tokens": 40}
    for seed in (4, 5, 4):
        prompts = ragged_prompts(batch_size, seed=seed, min_len=8, max_len=24)
        inputs = {name: value.cuda() for name, value in prompts.items()}
        ids, stats = decode(target, inputs, **options)
        assert (stats.graphed, stats.fallbacks) == (["target", "draft"], [])
        assert_equal_ids(decode(target, inputs, **options, speculation_graphs="off")[0], ids)
