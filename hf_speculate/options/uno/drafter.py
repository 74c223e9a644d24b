"""The drafter over a Uno adapter: one forward of the target over the newest token and noise.

For a row whose newest token is t, at position C, a draft of K tokens is

    logits = target(t, n_1 .. n_{K-1}),    n_i uniform over the ids 1 .. end - 1

over the target's cache, at the positions C .. C+K-1, with the adapter in the rows of the noise.
Row j predicts the token at C+j+1, so the first one is the target's own. The tokens of a draft are
chosen without regard to each other. The cache then drops all rows, and the verification reads t and
the drafted tokens with the adapter off.

The noise has random numbers of its own. The verifier gets the distribution of a draft given the
noise, so its output has the target's distribution.

Source:
    Uno (arXiv:2609.04010).
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.token_choice import DraftSettings, TokenChooser
from hf_speculate.draft.vocab_mapping import DraftVocabulary
from hf_speculate.errors import ShapeError
from hf_speculate.kernels import uniforms
from hf_speculate.options.uno.low_rank import LowRankLayers
from hf_speculate.rows.per_row import PerRow
from hf_speculate.transfers import upload
from hf_speculate.types import DraftOut, NoiseKeys, Stream


class UnoDrafter(PerRow, Drafter):
    """A `Drafter` without states of its own.

    Args:
        layers: The adapter.
        noise_end: The id after the largest one of noise tokens, >= 2.
        setup: The setup of the call.
    """

    reads_prompt = False
    PARTS = ("chooser",)

    def __init__(self, layers: LowRankLayers, noise_end: int, setup: DrafterSetup):
        self.layers, self.noise_end, self.target = layers, noise_end, setup.target
        eos = upload(sorted(setup.eos_token_ids), setup.device) if setup.eos_token_ids else None
        settings = DraftSettings(
            eos, setup.confidence_threshold, setup.keeps_logits, setup.stream, setup.backend
        )
        self.chooser = TokenChooser(setup.processors, settings, setup.device, DraftVocabulary())

    @property
    def can_join(self) -> bool:  # type: ignore[override]
        return self.chooser.can_join

    @property
    def reads_kept(self) -> bool:  # type: ignore[override]
        return self.chooser.reads_kept

    def is_callers(self, error: Exception) -> bool:
        return error is self.chooser.processor_error

    def has_numbers(self) -> Tensor | None:
        return self.chooser.has_numbers()

    def begin(self, token_ids: Tensor) -> None:
        self.chooser.begin(token_ids)

    @torch.no_grad()
    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        if request.run_target is None or request.keys is None:
            raise ShapeError(
                "a request to a Uno adapter must hold noise keys and a way to run the target, got "
                "none; pass both"
            )
        query, num_tokens = request.query_token_ids, request.num_draft_tokens
        self.chooser.read(query, request.kept)
        noise = noise_ids(request.keys, num_tokens - 1, self.noise_end).to(query.device)
        adapted = self.layers.added_after_first(self.target) if num_tokens > 1 else nullcontext()
        with adapted:
            logits = request.run_target(torch.cat([query[:, -1:], noise], dim=1))  # [B, K, V]
        draft = self.chooser.start(num_tokens, request.sample_strategy, request.keys)
        draft.choose_all(logits)
        return draft.finish(query.device)


def noise_ids(keys: NoiseKeys, num_tokens: int, end: int) -> Tensor:
    """Draw ids [B, num_tokens] int64, uniform over 1 .. end - 1 and new in each round.

    A float32 holds more than 2^24 / end of its steps for each id.
    """
    offsets = torch.arange(num_tokens, device=keys.seeds.device)[None]  # [1, N]
    drawn = uniforms(keys, Stream.NOISE, offsets, torch.zeros_like(offsets))  # [B, N]
    return (drawn * (end - 1)).to(torch.int64).clamp_max(end - 2) + 1
