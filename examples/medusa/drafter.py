"""Drafts with Medusa heads on the target's last hidden state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_speculate import DrafterSetup, DraftRequest
from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.triton_kernels import Draws
from hf_speculate.types import DraftOut, Kept, SampleStrategy
from medusa.heads import MedusaHeads


class MedusaDrafter:
    """A `Drafter` without a cache: one product of matrices a round gives the kept_logits of all drafted tokens.

    `generate(drafter=functools.partial(MedusaDrafter, heads))` makes one for every call. The heads guess each token
    without knowing the ones drafted before it, so acceptance falls faster with the position than a draft model's.

    Args:
        heads: trained for the target, whose head must be its output matrix and nothing more.
        request: of the call.
    """

    hidden_layers = (-1,)

    def __init__(self, heads: MedusaHeads, request: DrafterSetup):
        self.heads = heads
        self.max_draft_tokens = heads.num_heads
        self.output = request.target.get_output_embeddings()
        self.processors = request.processors
        self.stream = request.stream
        self.text: TokenBuffer | None = None  # what the processors read

    def draft(self, request: DraftRequest) -> DraftOut:
        """See `Drafter.draft`."""
        query, kept = request.query_token_ids, request.kept
        newest = kept.num_emitted.to(query.device, torch.int64) - 1  # [B]
        rows = torch.arange(len(newest), device=newest.device)
        states = kept.hidden_states[rows, newest.clamp_min(0)]  # [B, D]; a row that has ended may have none
        logits = self.output(self.heads(states, request.num_draft_tokens))  # [B, K, V]
        lens = torch.full((len(newest),), logits.shape[1], dtype=torch.int32, device=newest.device)
        if request.sample_strategy is SampleStrategy.GREEDY:
            return DraftOut(logits.argmax(-1), lens, None, None)
        self._follow(query, kept)
        draws = Draws(request.keys, self.stream, logits.shape[1])
        ids, kept_logits = [], []
        for step in range(logits.shape[1]):
            processed = self.processors(self.text.token_ids, logits[:, step, None], prefix_lens=self.text.lens)[
                :, 0
            ]  # [B, V]
            ids.append(draws.draw(processed))
            kept_logits.append(processed)
            self.text.append(ids[-1][:, None])
        self.text.truncate([length - len(ids) for length in self.text.lens])
        return DraftOut(torch.stack(ids, 1), lens, torch.stack(kept_logits, 1), draws.logsumexps())

    def rows(self, indices: Sequence[int]) -> None:
        """See `Drafter.rows`."""
        self.processors = self.processors.rows(indices)
        if self.text is not None:
            self.text.rows(indices)

    def _follow(self, query_token_ids: Tensor, kept: Kept) -> None:
        if self.text is None:
            self.text = TokenBuffer(query_token_ids)
        else:
            self.text.append(kept.token_ids, kept.num_emitted.tolist())
