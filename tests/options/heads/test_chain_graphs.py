"""Test that chains from graphs draft the tokens of eager chains, with simulated device graphs."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_speculate
from hf_speculate.models.runner import CompiledUnits
from hf_speculate.options.compiled.graphs import Graphing
from hf_speculate.options.heads.head import DraftHead
from hf_speculate.options.heads.load import load_drafter
from hf_speculate.types import SampleStrategy
from tests.cases import assert_equal_ids
from tests.options.compiled.conftest import backend  # noqa: F401
from tests.options.heads.designs import VOCAB_SIZE
from tests.options.heads.kinds import KINDS, Loaded
from tests.options.heads.rounds import Rounds, random_texts
from tests.options.heads.test_mtp import make_checkpoint
from tests.support.tiny import ragged_prompts

MAX_NEW = 6  # most new tokens of a row in a round from graphs
# accepted tokens of each row by round; a row with None has ended
ACCEPTED = ([0, 2, 1], [1, None, 0], [3, None, 2], [0, None, 1])


def two_layers(folder: Path) -> Loaded:
    """Load two MTP layers whose experts do not read the host, unlike "eager" experts."""
    target = make_checkpoint(folder, "deepseek_v3", 2, seed=5, vocab_size=VOCAB_SIZE)
    target.set_experts_implementation("batched_mm")
    return load_drafter(folder, target), target


CHAINS: dict[str, Callable[[Path], Loaded]] = {
    "EAGLE-3": KINDS["EAGLE-3, two layers"],
    "MTP, speculators": KINDS["MTP, speculators"],
    "MTP, two layers of a checkpoint": two_layers,
}


def from_graphs(head: DraftHead, target: PreTrainedModel, texts: list[list[int]]) -> Rounds:
    rounds = Rounds(head, target, texts)
    setup: Any = SimpleNamespace(max_length=512)
    runners: Any = SimpleNamespace(
        head_graphs=lambda network, key: Graphing(
            network, CompiledUnits(), pytest.fail, False, key
        ),
        lens=(2, 4, MAX_NEW - 1),
        at_end=lambda function: None,
    )
    drafter: Any = rounds.drafter
    drafter.capture(setup, runners)
    return rounds


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("strategy", SampleStrategy)
def test_tokens_are_those_of_eager_chains(
    backend: Any,  # noqa: F811
    tmp_path: Path,
    kind: str,
    strategy: SampleStrategy,
) -> None:
    head, target = CHAINS[kind](tmp_path)
    texts = random_texts([9, 4, 14])
    eager, captured = Rounds(head, target, texts), from_graphs(head, target, texts)
    for number, counts in enumerate(ACCEPTED):
        num_tokens = 3 + number % 2
        expected, draft = (rounds.draft(num_tokens, strategy) for rounds in (eager, captured))
        assert backend.num_replays == number  # the first draft reads the prompt
        assert torch.equal(draft.token_ids, expected.token_ids)
        assert torch.equal(draft.lens, expected.lens)
        torch.testing.assert_close(draft.token_logits, expected.token_logits)
        assert (draft.token_logits is None) == (strategy is SampleStrategy.GREEDY)
        draft = draft._replace(token_ids=draft.token_ids.clone())
        eager.accept(draft, counts, number)
        captured.accept(draft, counts, number)
    assert backend.num_captures == 1  # drafts of three tokens are cut from longer ones


def test_longer_rounds_and_moved_rows_are_drafted_eagerly(
    backend: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    head, target = CHAINS["EAGLE-3"](tmp_path)
    texts = random_texts([9, 4, 14])
    eager, captured = Rounds(head, target, texts), from_graphs(head, target, texts)
    for number, num_more in enumerate((0, MAX_NEW + 1, 1, 1)):
        if number == 3:
            eager.rows([2, 0])
            captured.rows([2, 0])
        for row, more in enumerate(random_texts([num_more] * len(eager.texts), seed=number)):
            eager.texts[row] += more
            captured.texts[row] += more
        expected, draft = eager.draft(3), captured.draft(3)
        assert torch.equal(draft.token_ids, expected.token_ids)
    assert backend.num_replays == 1


def decode(head: DraftHead, target: PreTrainedModel, batch_size: int, **options: Any) -> Any:
    stats = hf_speculate.SpeculationStats()
    inputs = ragged_prompts(batch_size, seed=0, vocab_size=target.config.vocab_size)
    options = {"max_new_tokens": 24, "num_assistant_tokens": 3, **options}
    ids = target.generate(**inputs, assistant_model=head, **options, speculation_stats=stats)
    assert_equal_ids(target.generate(**inputs, max_new_tokens=24), ids)
    return stats


@pytest.mark.parametrize("graphs", ["on", "auto"])
def test_later_calls_replay_graphs_of_the_first(
    backend: Any,  # noqa: F811
    tmp_path: Path,
    graphs: str,
) -> None:
    head, target = without_hooks(CHAINS["EAGLE-3"](tmp_path))
    for batch_size in (1, 3):
        stats = decode(head, target, batch_size, speculation_graphs=graphs)
        num_captures, num_replays = backend.num_captures, backend.num_replays
        stats = decode(head, target, batch_size, speculation_graphs=graphs)
        assert (stats.graphed, stats.fallbacks) == (["target", "draft"], [])
        assert "from graphs: target, draft" in stats.plan
        assert backend.num_captures == num_captures
        # the first draft reads the prompt, and the last token is not drafted
        assert backend.num_replays >= num_replays + 2 * stats.num_batch_rounds - 2


def test_calls_with_other_lengths_share_no_inputs(
    backend: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    head, target = without_hooks(CHAINS["MTP, speculators"](tmp_path))
    num_captures = []
    for num_tokens in (3, 5, 3, 5, 17):
        options = {"num_assistant_tokens": num_tokens, "speculation_graphs": "on"}
        stats = decode(head, target, 2, **options)
        assert (stats.graphed, stats.fallbacks) == (["target", "draft"], [])
        num_captures.append(backend.num_captures)
    assert num_captures[3] == num_captures[2]


@pytest.mark.fallback("NaN")
def test_captured_drafts_report_logits_that_are_not_finite(
    backend: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    head, target = without_hooks(CHAINS["EAGLE-3"](tmp_path))
    head.network.norm.weight.fill_(torch.nan)
    stats = decode(head, target, 2, speculation_graphs="on")
    assert any("NaN" in reason for reason in stats.fallbacks)


def test_hooks_of_a_head_are_left_alone_by_default(
    backend: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    head, target = without_hooks(CHAINS["EAGLE-3"](tmp_path))
    calls: list[int] = []
    head.network.layers[0].register_forward_hook(lambda *args: calls.append(1))
    for _ in range(2):
        calls.clear()
        stats = decode(head, target, 1, speculation_graphs="auto")
        assert (stats.graphed, stats.fallbacks) == (["target"], [])
        assert len(calls) >= stats.num_batch_rounds - 1


def test_drafts_that_no_graph_can_choose_are_not_called_captured(
    backend: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    head, target = without_hooks(CHAINS["EAGLE-3"](tmp_path))
    options = {"assistant_confidence_threshold": 0.5, "speculation_graphs": "on"}
    stats = decode(head, target, 2, **options)
    assert (stats.graphed, stats.fallbacks) == (["target"], [])


@pytest.mark.fallback("draft: eager forwards", "target: eager forwards")
def test_wrong_replays_end_graphs_of_the_head(
    backend: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, target = without_hooks(CHAINS["EAGLE-3"](tmp_path))
    monkeypatch.setattr(backend, "is_wrong", True)
    stats = decode(head, target, 2, speculation_graphs="auto")
    assert stats.graphed == []
    assert any("draft" in reason and "differs" in reason for reason in stats.fallbacks)


def test_new_embeddings_of_the_target_are_captured_again(
    backend: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    head, target = without_hooks(CHAINS["MTP, speculators"](tmp_path))
    decode(head, target, 1, speculation_graphs="on")
    embeddings = target.get_input_embeddings()
    embeddings.weight = torch.nn.Parameter(embeddings.weight.flip(1), requires_grad=False)
    # graphs that read the old table would raise an error
    assert decode(head, target, 1, speculation_graphs="on").graphed == ["target", "draft"]


def without_hooks(loaded: Loaded) -> Loaded:
    """Copy the target, which tests share, without the hooks that tests install."""
    head, target = copy.deepcopy(loaded)
    for module in target.modules():
        module._forward_pre_hooks.clear()
    return head, hf_speculate.enable(target)
