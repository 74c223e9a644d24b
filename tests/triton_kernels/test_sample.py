"""`sample` draws from the distribution of its logits."""

import operator

import pytest
import torch

from hf_speculate.triton_kernels import NoiseKeys, Sampled, Stream, sample
from tests.triton_kernels.distributions import PASS_P_VALUE, chunks, make_keys, p_value

NUM_TRIALS = 250_000
# Float32 against float64 log-sum-exp of values near 10: a few units in the last place.
LOGSUMEXP_TOLERANCE = 4e-6


@pytest.mark.parametrize("stream", [Stream.DRAFT, Stream.RACE])
@pytest.mark.parametrize(("vocab_size", "temperature"), [(64, 1.0), (12, 0.7)])
def test_tokens_are_drawn_from_the_softmax_of_what_temperature_and_cutoff_leave(
    vocab_size: int, temperature: float, stream: Stream
) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    logits[3] = -torch.inf
    scaled = logits / temperature
    cutoff = scaled.sort().values[4]
    left = scaled.masked_fill(scaled < cutoff, -torch.inf).double()
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for keys in chunks(NUM_TRIALS):
        rows = logits.expand(keys.seeds.shape[0], -1)
        cutoffs = cutoff.expand(len(rows))
        drawn = sample(rows, keys=keys, stream=stream, temperature=temperature, row_cutoffs=cutoffs)
        counts += torch.bincount(drawn.token_ids, minlength=vocab_size)
        expected = left.logsumexp(-1).expand(len(rows))
        torch.testing.assert_close(drawn.logsumexp.double(), expected, atol=LOGSUMEXP_TOLERANCE, rtol=0)
    assert p_value(counts, left.softmax(-1)) > PASS_P_VALUE


def draw(logits: torch.Tensor, keys: NoiseKeys) -> Sampled:
    return sample(logits, keys=keys, stream=Stream.DRAFT, backend="torch")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("vocab_size", [64, 8192])
def test_compiled_code_draws_the_same_tokens(vocab_size: int) -> None:
    keys, logits = make_keys(3, positions=9), torch.randn(3, vocab_size)
    logits[:, 40:] = -torch.inf  # of wide rows the eager twin then looks at pieces
    eager, compiled = draw(logits, keys), torch.compile(draw, fullgraph=True)(logits, keys)
    assert torch.equal(eager.token_ids, compiled.token_ids)
    torch.testing.assert_close(eager.logsumexp, compiled.logsumexp)


def test_a_compiled_draw_is_not_tied_to_its_batch_size() -> None:
    """torch 2.11 compiles anew for every batch size if a slice in the graph ends at that number."""
    bounds: list[object] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            keys = node.args[1] if node.target is operator.getitem else ()
            slices = [key for key in (keys if isinstance(keys, tuple) else (keys,)) if isinstance(key, slice)]
            bounds.extend(bound for key in slices for bound in (key.start, key.stop))
        return graph

    logits, keys = torch.randn(4, 50), make_keys(4)
    torch.compiler.reset()  # after other vocabularies, V would be dynamic, and slices may end there
    for tensor in (logits, *keys):
        torch._dynamo.mark_dynamic(tensor, 0)
    torch.compile(draw, backend=keep, fullgraph=True)(logits, keys)
    assert bounds
    assert not any(isinstance(bound, torch.fx.Node) for bound in bounds)
