"""`greedy_match` and `speculative_sampling` of one sequence keep the meaning of their signatures."""

import pytest
import torch

from hf_speculate.triton_kernels import ConfigError, ShapeError, greedy_match, speculative_sampling
from tests.triton_kernels.distributions import PASS_P_VALUE, p_value

NUM_CALLS = 1500


def test_greedy_match_names_the_first_difference_and_the_best_token_there() -> None:
    dists = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.5, 0.5]])
    for candidates, expected in [([1, 0], (2, 0)), ([1, 1], (1, 0)), ([0, 0], (0, 1))]:
        rejected_idx, token = greedy_match(dists, torch.tensor(candidates))
        assert (int(rejected_idx), int(token)) == expected


def test_greedy_match_sees_differences_that_a_logarithm_would_round_away() -> None:
    close = 0.5 + 2.0**-24
    dists = torch.tensor([[1 - close, close]], dtype=torch.float64).float()
    assert int(greedy_match(dists, torch.zeros(0, dtype=torch.int64))[1]) == int(dists[0].argmax())


def test_speculative_sampling_has_the_exact_joint_distribution() -> None:
    target = torch.tensor([[0.6, 0.3, 0.1, 0.0], [0.25, 0.25, 0.25, 0.25]])
    proposal = torch.tensor([[0.1, 0.3, 0.3, 0.3]])
    candidates = torch.multinomial(proposal[0], NUM_CALLS, True, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(2, 4, 4, dtype=torch.int64)
    for candidate in candidates:
        at, token = speculative_sampling(target, proposal, candidate.view(1), generator=generator)
        counts[at, candidate if at == 1 else token, token] += 1
    exact = torch.zeros(2, 4, 4, dtype=torch.float64)
    exact[0] = torch.diag((target[0] - proposal[0]).clamp(min=0).double())
    exact[1] = torch.minimum(target[0], proposal[0]).double().unsqueeze(-1) * target[1].double()
    assert p_value(counts.flatten(), exact.flatten()) > PASS_P_VALUE


def test_a_generator_repeats_a_call_and_the_global_one_serves_without() -> None:
    dists = torch.full((3, 1000), 1e-3)
    candidates = torch.tensor([1, 2])

    def tokens(**options: torch.Generator) -> list[int]:
        return [int(speculative_sampling(dists, dists[:2], candidates, **options)[1]) for _ in range(3)]

    assert tokens(generator=torch.Generator().manual_seed(4)) == tokens(generator=torch.Generator().manual_seed(4))
    torch.manual_seed(4)
    first = tokens()
    assert len(set(first)) == 3
    torch.manual_seed(4)
    assert tokens() == first


@pytest.mark.parametrize(("candidate", "expected"), [(0, (0, 1)), (1, (1, 0)), (-1, (0, 1)), (2, (0, 1))], ids=str)
def test_impossible_candidates_are_rejected_and_certain_ones_kept(candidate: int, expected: tuple[int, int]) -> None:
    target, ids = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([candidate])
    for at, token in (greedy_match(target, ids), speculative_sampling(target, torch.tensor([[0.5, 0.5]]), ids)):
        assert (int(at), int(token)) == expected
        assert at.dtype == token.dtype == torch.int64
        assert at.shape == token.shape == ()


@pytest.mark.parametrize("hostile", [torch.nan, torch.inf, 0.0])
def test_a_row_without_a_distribution_gives_no_token(hostile: float) -> None:
    dists, ids = torch.tensor([[0.25, 0.75], [hostile, hostile]]), torch.tensor([1])
    assert [int(part) for part in speculative_sampling(dists, dists[:1], ids)] == [1, -1]
    if hostile:
        assert [int(part) for part in greedy_match(dists, ids)] == [1, -1]


def test_an_argument_that_does_not_fit_is_named() -> None:
    dists, ids = torch.full((3, 4), 0.25), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="candidate_tokens must be"):
        greedy_match(dists, ids[:1])
    with pytest.raises(ShapeError, match="proposal_dists must be"):
        speculative_sampling(dists, dists, ids)
    with pytest.raises(ConfigError, match="backend must be one of"):
        greedy_match(dists, ids, backend="a")
