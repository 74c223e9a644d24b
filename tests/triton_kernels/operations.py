"""Every operation behind one signature, so that one test can run them all."""

from typing import Any, Protocol

import torch
from torch import Tensor

from hf_speculate.triton_kernels import (
    NoiseKeys,
    Stream,
    Verdict,
    sample,
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_rejection,
    verify_typical,
)


class Operation(Protocol):
    """A verifier of one round: target [B, K+1, V], ids [B, K], draft [B, K, V], keys, lengths [B] or None."""

    def __call__(
        self,
        target: Tensor,
        ids: Tensor,
        draft: Tensor,
        keys: NoiseKeys,
        lens: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> Verdict: ...


def warp_of(target: Tensor, keys: NoiseKeys) -> dict[str, Tensor]:
    """A temperature of 0, 0.5 or 1 by each row's seed, and cutoffs 3 below the top of every row."""
    temperature = (keys.seeds % 3).float() / 2
    tops = target.float().amax(-1) / temperature.masked_fill(temperature == 0, 1.0).unsqueeze(-1)
    return {"temperature": temperature, "row_cutoffs": tops - 3.0}


def sums_of(draft: Tensor, keys: NoiseKeys, backend: str) -> Tensor:
    """Log-sum-exps [B, K] of the drafts, as a drafter keeps them."""
    sums = [
        sample(draft[:, j], keys=keys, stream=Stream.DRAFT, backend=backend).logsumexp for j in range(draft.shape[1])
    ]
    return torch.stack(sums, dim=-1) if sums else draft.new_empty(draft.shape[:2], dtype=torch.float32)


def _greedy(
    target: Tensor, ids: Tensor, draft: Tensor, keys: NoiseKeys, lens: Tensor | None = None, *, backend: str = "auto"
) -> Verdict:
    return verify_greedy(target, ids, draft_lens=lens, backend=backend)


def _dense(verify: Any, *, with_sums: bool = False, warped: bool = False) -> Operation:
    """A verifier that reads the draft's logits."""

    def run(
        target: Tensor,
        ids: Tensor,
        draft: Tensor,
        keys: NoiseKeys,
        lens: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> Verdict:
        options: dict[str, Any] = warp_of(target, keys) if warped else {}
        if with_sums:
            options["draft_logsumexp"] = sums_of(draft, keys, backend)
        return verify(target, ids, draft, keys=keys, draft_lens=lens, backend=backend, **options)

    return run


def _draftless(verify: Any, *, warped: bool = False, **settings: Any) -> Operation:
    """A verifier that reads no logits of the draft."""

    def run(
        target: Tensor,
        ids: Tensor,
        draft: Tensor,
        keys: NoiseKeys,
        lens: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> Verdict:
        options = settings | (warp_of(target, keys) if warped else {})
        return verify(target, ids, keys=keys, draft_lens=lens, backend=backend, **options)

    return run


OPERATIONS: dict[str, Operation] = {
    "greedy": _greedy,
    "rejection": _dense(verify_rejection),
    "rejection with draft sums": _dense(verify_rejection, with_sums=True),
    "rejection, warped": _dense(verify_rejection, warped=True),
    "point mass": _draftless(verify_rejection),
    "block": _dense(verify_block),
    "block with draft sums": _dense(verify_block, with_sums=True),
    "block, warped": _dense(verify_block, warped=True),
    "coupled": _draftless(verify_coupled),
    "coupled, warped": _draftless(verify_coupled, warped=True),
    "typical": _draftless(verify_typical),
    "typical, sampled": _draftless(verify_typical, correction="sample", entropy_epsilon=1e-5),
}
DENSE = ["rejection", "rejection with draft sums", "block", "block with draft sums"]
# Whose last token is drawn, whatever the temperature of the row.
SAMPLING = [*DENSE, "point mass", "coupled", "typical, sampled"]


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


def make_contested_round(
    num_rows: int, num_draft_tokens: int, vocab_size: int, *, distance: float = 0.7
) -> tuple[Tensor, Tensor, Tensor]:
    """Target, ids and draft of which every position rejects some: the ids are drawn from the draft."""
    generator = torch.Generator().manual_seed(vocab_size)
    target = 2 * torch.randn(num_rows, num_draft_tokens + 1, vocab_size, generator=generator)
    draft = target[:, :-1] + distance * torch.randn(num_rows, num_draft_tokens, vocab_size, generator=generator)
    ids = torch.multinomial(draft.softmax(-1).flatten(0, 1), 1, generator=generator).view(num_rows, -1)
    return target, ids, draft


def assert_well_formed(verdict: Verdict, vocab_size: int, lens: Tensor) -> None:
    """Ids in range up to the last one, -1 beyond, counts within the lengths, dtypes as promised."""
    assert verdict.token_ids.dtype == torch.int64
    assert verdict.num_accepted.dtype == verdict.status.dtype == torch.int32
    columns = torch.arange(verdict.token_ids.shape[1])
    emitted = columns <= verdict.num_accepted.unsqueeze(-1)
    in_range = (verdict.token_ids >= 0) & (verdict.token_ids < vocab_size)
    assert torch.where(emitted, in_range, verdict.token_ids == -1).all()
    assert ((verdict.num_accepted >= 0) & (verdict.num_accepted <= lens)).all()
