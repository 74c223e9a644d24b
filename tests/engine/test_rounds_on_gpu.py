"""Count the operations in a round outside the models' forwards, on a simulated GPU."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.draft.base import DraftRequest
from hf_speculate.engine.batch import Batch
from hf_speculate.engine.draft_session import DraftSession
from hf_speculate.options.compiled.drafter import CompiledDrafter
from hf_speculate.options.heads.head import DraftHead
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.stats import SpeculationStats
from hf_speculate.types import DraftOut
from tests.cases import new_pair
from tests.compatibility_rows import CHARACTERS
from tests.options.heads.designs import (
    EAGLE3,
    NUM_TARGET_LAYERS,
    TARGET_WIDTH,
    VOCAB_SIZE,
    make_weights,
    write_speculators,
)
from tests.support.gpu_rounds import Enough, Rounds, counted, on_gpu
from tests.support.tiny import make_model, ragged_prompts
from tests.support.tiny_tokenizers import letters_tokenizer

pytest.importorskip("triton", reason="needs Triton")

K = 5
SHORT = 2  # draft length for many sampled rows, which are slow in the Triton interpreter
NEVER = 500  # EOS id outside every vocabulary
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 1}
TOP_P: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9, "seed": 1}
# Maximum number of the library's operators in a round, by drafter, cache, mode and number of rows.
# Drafts for eight sampled rows have SHORT tokens.
MOST = {
    ("model", "preallocated", "greedy", 1): 18,
    ("model", "preallocated", "top_p", 1): 37,
    ("model", "preallocated", "top_p", 8): 39,
    ("model", "dynamic", "greedy", 1): 16,
    ("model", "dynamic", "greedy", 8): 37,
    ("lookup", "preallocated", "greedy", 8): 12,
    ("lookup", "dynamic", "top_p", 1): 17,
}
# Sampling is slow in the interpreter, so only the most common case runs by default.
SLOW = {
    ("model", "preallocated", "top_p", 8),
    ("model", "dynamic", "greedy", 8),
    ("lookup", "dynamic", "top_p", 1),
}
CASES = [pytest.param(*case, marks=pytest.mark.slow if case in SLOW else ()) for case in MOST]
# the target's states of a round are projected, joined and copied; rows of other lengths are masked
MOST_WITH_A_HEAD = 18
MOST_NEAR_THE_END = 36  # eight greedy rows whose drafts are cut to the remaining length
MODES = {"greedy": GREEDY, "top_p": TOP_P}


@cache
def models(dtype: torch.dtype, family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    return new_pair(family, 0.1, dtype=dtype)


@pytest.fixture
def half() -> Iterator[tuple[Rounds, PreTrainedModel, PreTrainedModel]]:
    """Yield counted rounds and a bfloat16 pair on the device."""
    target, draft = models(torch.bfloat16)
    with counted(target, draft) as rounds:
        yield rounds, target, draft


def repeated_prompts(batch_size: int) -> dict[str, torch.Tensor]:
    """Return prompts of two lengths that repeat a text, so prompt lookup finds drafts."""
    texts = [list(range(3 + row, 12 + row - row % 2)) * 2 for row in range(batch_size)]
    ids = torch.tensor([[0] * (18 - len(text)) + text for text in texts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def run(
    pair: Any,
    drafter: str,
    batch_size: int,
    num_draft: int = K,
    most: int | None = 4,
    **options: Any,
) -> Rounds:
    """Run the first rounds of a call."""
    rounds, target, draft = pair
    rounds.clear()
    rounds.gpu.log.clear()
    rounds.most = most
    source: dict[str, Any] = {"prompt_lookup_num_tokens": num_draft}
    if drafter == "model":
        source = {"assistant_model": draft, "num_assistant_tokens": num_draft}
    # measured times would change the draft lengths between runs
    constant = {"num_assistant_tokens_schedule": "constant"}
    options = {
        "max_new_tokens": 64,
        "eos_token_id": NEVER,
        "speculation_graphs": "off",
        **constant,
        **options,
    }
    with suppress(Enough):
        target.generate(
            **on_gpu(repeated_prompts(batch_size)),
            **source,
            **options,
            speculation_callback=rounds.end,
        )
    return rounds


@pytest.mark.parametrize(("drafter", "cache", "mode", "batch_size"), CASES)
def test_round_takes_few_operators_one_sync_and_no_upload(
    half: Any, drafter: str, cache: str, mode: str, batch_size: int
) -> None:
    num_draft = SHORT if (mode, batch_size) == ("top_p", 8) else K
    steady = run(
        half, drafter, batch_size, num_draft, speculation_cache=cache, **MODES[mode]
    ).steady()
    assert steady
    for cost in steady:
        assert cost.num_launches <= MOST[drafter, cache, mode, batch_size], cost.launches
        assert cost.waits == ["event"]
        assert cost.num_uploads == (0 if drafter == "model" else 1)  # matching runs on the host
        assert cost.num_plans == 0


@pytest.mark.parametrize("batch_size", [1, 8])
def test_round_from_graphs_takes_four_launches(half: Any, batch_size: int) -> None:
    options = {**GREEDY, "speculation_graphs": "on", "most": 6}
    run(half, "model", batch_size, **options)  # captures a graph for each draft length
    for cost in run(half, "model", batch_size, **options).steady()[1:]:
        assert cost.launches["graph"] == 2
        assert cost.num_launches <= 4, cost.launches
        assert (cost.waits, cost.num_uploads) == (["event"], 0)


def target_of_heads() -> PreTrainedModel:
    sizes = {"hidden_size": TARGET_WIDTH, "head_dim": TARGET_WIDTH // 4, "vocab_size": VOCAB_SIZE}
    target = make_model("llama", dtype=torch.float32, num_hidden_layers=NUM_TARGET_LAYERS, **sizes)
    return hf_speculate.enable(target)


def head_for(target: PreTrainedModel, folder: Path) -> DraftHead:
    return load_drafter(write_speculators(folder, EAGLE3, make_weights(EAGLE3)), target)


@pytest.mark.parametrize(("mode", "batch_size"), [("greedy", 1), ("greedy", 8), ("top_p", 1)])
def test_head_drafts_in_one_graph(tmp_path: Path, mode: str, batch_size: int) -> None:
    target = target_of_heads()
    options = {**MODES[mode], "speculation_graphs": "on", "num_draft": SHORT}
    with counted(target, None) as rounds:
        pair = rounds, target, head_for(target, tmp_path)
        run(pair, "model", batch_size, **options)  # captures
        steady = run(pair, "model", batch_size, **options).steady()[1:]
    assert steady
    for cost in steady:
        assert cost.launches["graph"] == 2
        assert cost.num_launches <= MOST_WITH_A_HEAD, cost.launches
        assert cost.waits == ["event"]


@pytest.mark.parametrize(
    ("mode", "batch_size"), [("greedy", 1), ("greedy", 8), ("top_p", 1), ("top_p", 8)]
)
def test_target_scores_and_verifies_in_one_graph(half: Any, mode: str, batch_size: int) -> None:
    """Use prompt lookup, which drafts on the host, so all launches belong to the target."""
    options = {**MODES[mode], "speculation_graphs": "on", "most": 6, "verifier_backend": "torch"}
    run(half, "lookup", batch_size, **options)  # captures
    steady = run(half, "lookup", batch_size, **options).steady()[1:]
    assert steady
    for cost in steady:
        # the drafts are uploaded, split into ids and lengths, and copied to the graph's inputs
        assert cost.launches == {"graph": 1, "_to_copy": 1, "copy_": 2}
        assert (cost.waits, cost.num_uploads) == (["event"], 1)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_round_without_a_draft_takes_one_launch(
    half: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    def propose(drafts: DraftSession, batch: Batch, *args: Any, **options: Any) -> DraftOut:
        drafts.num_fed = 0
        return batch.no_draft()

    monkeypatch.setattr(DraftSession, "propose", propose)
    options = {**GREEDY, "speculation_graphs": "on", "verifier_backend": "torch"}
    for cost in run(half, "model", batch_size, **options, most=7)[3:]:
        assert cost.launches == {"graph": 1}
        assert (cost.waits, cost.num_uploads) == (["event"], 0)


@pytest.mark.parametrize(
    ("batch_size", "mode"), [(1, GREEDY), (8, GREEDY), (1, SAMPLED), (1, TOP_P)], ids=str
)
def test_draft_from_a_graph_takes_one_launch_beside_it(
    half: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int, mode: dict[str, Any]
) -> None:
    gpu, draft, costs = half[0].gpu, CompiledDrafter.draft, []

    def counted_draft(drafter: CompiledDrafter, request: DraftRequest) -> DraftOut:
        num_uploads, gpu.stage = len(gpu.log.uploads), "drafter"
        drafted, gpu.stage = draft(drafter, request), ""
        launches, waits = (part.pop("drafter", None) for part in (gpu.log.launches, gpu.log.waits))
        costs.append((dict(launches), waits, len(gpu.log.uploads) - num_uploads))
        return drafted

    monkeypatch.setattr(CompiledDrafter, "draft", counted_draft)
    num_draft = SHORT if mode is TOP_P else K
    run(half, "model", batch_size, num_draft, **mode, speculation_graphs="on")
    # the first draft reads the prompt and captures; the second may upload the row lengths
    assert costs[2:] and costs[2:] == [({"cat": 1, "graph": 1}, None, 0)] * (len(costs) - 2)


@pytest.mark.parametrize("has_head", [False, True])
def test_tokens_of_a_graph_equal_those_chosen_between_forwards(
    tmp_path: Path, has_head: bool
) -> None:
    draft: Any
    target, draft = (target_of_heads(), None) if has_head else models(torch.float32)
    ids, rates = [], []
    with counted(target, draft):
        options = {**TOP_P, "num_assistant_tokens": 2, "max_new_tokens": 7}
        options["assistant_model"] = head_for(target, tmp_path) if has_head else draft
        for graphs in ("off", "on"):
            stats = SpeculationStats()
            own = {"speculation_graphs": graphs, "speculation_stats": stats}
            output = target.generate(**on_gpu(repeated_prompts(1)), **options, **own)
            ids.append(output.cpu())
            rates.append(stats.accepted_per_position)
    assert torch.equal(*ids)
    assert rates[0] == rates[1]


def test_draft_with_another_vocabulary_reads_text_on_the_host(half: Any) -> None:
    """Encode missing tokens with one upload and no further synchronisation."""
    ours, theirs = letters_tokenizer(CHARACTERS), letters_tokenizer(CHARACTERS[:60][::-1] + "?!;:")
    for cost in run(
        half, "model", 1, **GREEDY, tokenizer=ours, assistant_tokenizer=theirs
    ).steady():
        assert cost.num_launches <= 33, cost.launches
        assert cost.waits == ["event"]
        assert cost.num_uploads == 1


def test_rounds_near_the_end_of_rows_upload_nothing(half: Any) -> None:
    for cost in run(half, "model", 8, **GREEDY, max_new_tokens=K + 2, most=3).steady():
        assert min(cost.report.num_drafted) < K
        assert cost.num_launches <= MOST_NEAR_THE_END, cost.launches
        assert cost.waits == ["event"]
        assert cost.num_uploads == 0


def test_ended_rows_cost_no_upload_in_later_rounds(half: Any) -> None:
    # finished rows stay in the batch
    options = {
        "max_new_tokens": 24,
        "eos_token_id": list(range(10, 20)),
        "return_dict_in_generate": True,
    }
    steady = run(half, "model", 3, 3, most=None, verifier_backend="torch", **options).steady()[1:]
    assert {name for cost in steady for name in cost.waits} == {"event"}
    num_ended = 3 - len(steady[-1].report.row_ids)
    # When a row finishes, the round uploads its finished state and the start of its padding. The
    # next round uploads the padding-only state.
    assert 0 < num_ended < 3
    assert (
        max(cost.num_uploads for cost in steady) <= 2
        and sum(cost.num_uploads for cost in steady) <= 3 * num_ended
    )


def test_flash_attention_serves_forwards_without_masks(half: Any) -> None:
    results = []
    for batch_size in (1, 8):
        calls = [call for cost in run(half, "model", batch_size, most=2) for call in cost.attention]
        results.append({(call.backend, call.has_mask) for call in calls})
    assert results == [{("flash", False), ("efficient", True)}, {("efficient", True)}]


@pytest.mark.fallback("no graphs")  # hooks of the test model prevent graphs
def test_texts_on_a_gpu_equal_plain_generate() -> None:
    """Compare in float32, where lengths on the device determine positions, masks and indices."""
    target, draft = models(torch.float32, "mistral_window")
    prompts = ragged_prompts(4, seed=3, max_len=20)
    # finished rows stay in the batch
    ends = {"max_new_tokens": 20, "eos_token_id": [17, 3, 40, 9], "return_dict_in_generate": True}
    # Triton is slow here
    own = {"assistant_model": draft, "num_assistant_tokens": 3, "verifier_backend": "torch"}
    with counted(target, draft):
        plain = target.generate(**on_gpu(prompts), **ends).sequences.cpu()
        for cache_kind in ("auto", "dynamic"):
            ours = target.generate(**on_gpu(prompts), **ends, **own, speculation_cache=cache_kind)
            assert torch.equal(ours.sequences.cpu(), plain)
