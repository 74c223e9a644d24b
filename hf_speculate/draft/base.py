"""What every drafter does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.errors import ConfigError, ShapeError
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.types import DraftOut, Kept, NoiseKeys, SampleStrategy, Stream


@dataclass(frozen=True)
class DrafterRequest:
    """What the maker of a drafter is told of the call.

    Args:
        target: the model that judges, to share its embeddings and its head; it stays as it is.
        batch_size: B.
        num_pads: [B] columns of padding before each prompt; rows that leave before the first call take theirs along.
        max_length: columns of the output at most, the prompt's and its padding included.
        max_draft_tokens: the most tokens that a round may ask for.
        vocab_size: the target's V.
        eos_token_ids: ids after which a row needs no further token.
        device: where tokens and hidden states are handed over and drafts are expected.
        processors: the call's pure and row-wise ones; a drafter whose logits go through them draws from a law near the
            target's.
        stream: the noise that RANDOM draws with.
    """

    target: PreTrainedModel
    batch_size: int
    num_pads: tuple[int, ...]
    max_length: int
    max_draft_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    device: torch.device
    processors: BlockLogitsProcessorList
    stream: Stream


class Drafter(Protocol):
    """Proposes the next tokens of every row.

    One that callers bring (`generate(drafter=...)`) may have two attributes more. `reads_hidden_states: bool`: whether
    `kept` is to hold the target's last hidden states; missing means no. `max_draft_tokens: int`: the most that it
    proposes, as a round then asks for no more; missing means any number.

    A drafter with heads on the last state, as Medusa, needs no cache: `examples/medusa` is a whole one. A drafter that
    goes on from the states by itself, as EAGLE, makes its own cache when it is made. In each call it reads all of
    `kept`, one token with the state that it was chosen from at a time, which is what its layer takes; then it drafts
    from its own states, one token at a time, and in the next call first drops what it had cached for those drafts:
    what was kept of them comes again, with the target's states. Rows advance by different counts (`kept.num_emitted`),
    so its cache keeps a length per row, or it reads masked rows.
    """

    def draft(
        self,
        query_token_ids: Tensor,
        kv_cache: KVCache | None,
        num_draft_tokens: int,
        sample_strategy: SampleStrategy,
        *,
        keys: NoiseKeys | None = None,
        kept: Kept | None = None,
    ) -> DraftOut:
        """Propose up to `num_draft_tokens` tokens per row.

        Args:
            query_token_ids: [B, Q] int64, the tokens of each row that `kv_cache` does not hold yet, the newest last;
                at the first call the whole text. A shorter row, one that has ended and stays, repeats its first token
                in front of it.
            kv_cache: the draft model's states, advanced in place by Q + K - 1 tokens; None for drafters without one,
                and for those that callers bring.
            num_draft_tokens: K at most, >= 1.
            sample_strategy: GREEDY proposes the argmax, a point mass; RANDOM draws.
            keys: noise of the round; required for RANDOM.
            kept: what was emitted since the last call, in plain steps too. In the first call it is None, but for
                drafters that read hidden states: see `Kept`.

        Returns:
            The proposal. K may be smaller than asked when every row needs no further token; drafters that callers
            bring may return fewer tokens whenever they know no more.

        Raises:
            ConfigError: `num_draft_tokens` is below 1, or RANDOM lacks keys.
            ShapeError: the query is empty.
        """

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`, in that order; a row may leave before the first call.

        The caller does the same to `kv_cache`.
        """


def check_request(
    query_token_ids: Tensor, num_draft_tokens: int, sample_strategy: SampleStrategy, keys: NoiseKeys | None
) -> None:
    """Raise what `Drafter.draft` promises to raise."""
    if num_draft_tokens < 1:
        raise ConfigError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}; skip the drafter for none")
    if query_token_ids.dim() != 2 or query_token_ids.size(1) < 1:
        raise ShapeError(f"query_token_ids must be [B, Q] with Q >= 1, got {list(query_token_ids.shape)}")
    if sample_strategy is SampleStrategy.RANDOM and keys is None:
        raise ConfigError("keys must be given for SampleStrategy.RANDOM, got None; pass NoiseKeys of the round")
