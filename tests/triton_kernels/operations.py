"""Every operation behind one signature, so that one test can run them all."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_speculate.triton_kernels import (
    NoiseKeys,
    Stream,
    Verdict,
    sample,
    verify_greedy,
    verify_rejection,
    verify_typical,
)

Operation = Callable[[Tensor, Tensor, Tensor, NoiseKeys, Tensor | None], Verdict]


def _greedy(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None) -> Verdict:
    return verify_greedy(target, ids, draft_lens=lens)


def _rejection(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None) -> Verdict:
    return verify_rejection(target, ids, draft, keys=keys, draft_lens=lens)


def _rejection_with_sums(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None) -> Verdict:
    sums = [sample(draft[:, j], keys=keys, stream=Stream.DRAFT).logsumexp for j in range(draft.shape[1])]
    logsumexp = torch.stack(sums, dim=-1) if sums else torch.empty(draft.shape[:2])
    return verify_rejection(target, ids, draft, keys=keys, draft_lens=lens, draft_logsumexp=logsumexp)


def _point_mass(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None) -> Verdict:
    return verify_rejection(target, ids, keys=keys, draft_lens=lens)


def _warped(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None) -> Verdict:
    temperature = (keys.seeds % 3).float() / 2
    tops = target.float().amax(-1) / temperature.masked_fill(temperature == 0, 1.0).unsqueeze(-1)
    return verify_rejection(
        target, ids, draft, keys=keys, draft_lens=lens, temperature=temperature, row_cutoffs=tops - 3.0
    )


def _typical(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None) -> Verdict:
    return verify_typical(target, ids, draft_lens=lens)


def _typical_sampled(target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None) -> Verdict:
    return verify_typical(target, ids, draft_lens=lens, correction="sample", keys=keys, entropy_epsilon=1e-5)


OPERATIONS: dict[str, Operation] = {
    "greedy": _greedy,
    "rejection": _rejection,
    "rejection with draft sums": _rejection_with_sums,
    "point mass": _point_mass,
    "rejection, warped": _warped,
    "typical": _typical,
    "typical, sampled": _typical_sampled,
}


def make_round(
    num_rows: int, num_draft_tokens: int, vocab_size: int, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Target [B, K+1, V], ids [B, K] of which most are likely, and a draft near the target [B, K, V]."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(num_rows, num_draft_tokens + 1, vocab_size, generator=generator) * 2
    draft = target[:, :-1] + 0.3 * torch.randn(num_rows, num_draft_tokens, vocab_size, generator=generator)
    ids = target[:, :-1].argmax(-1)
    strays = torch.randint(0, vocab_size, ids.shape, generator=generator)
    return target, torch.where(torch.rand(ids.shape, generator=generator) < 0.2, strays, ids), draft


def assert_well_formed(verdict: Verdict, vocab_size: int, lens: Tensor) -> None:
    """Ids in range up to the last one, -1 beyond, counts within the lengths, dtypes as promised."""
    assert verdict.token_ids.dtype == torch.int64
    assert verdict.num_accepted.dtype == verdict.status.dtype == torch.int32
    columns = torch.arange(verdict.token_ids.shape[1])
    emitted = columns <= verdict.num_accepted.unsqueeze(-1)
    in_range = (verdict.token_ids >= 0) & (verdict.token_ids < vocab_size)
    assert torch.where(emitted, in_range, verdict.token_ids == -1).all()
    assert ((verdict.num_accepted >= 0) & (verdict.num_accepted <= lens)).all()
