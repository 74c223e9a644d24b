"""Candidate-generator adapter: drafts with a transformers `CandidateGenerator`."""

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    DFlashTokenCandidateGenerator,
    EarlyExitCandidateGenerator,
    MTPCandidateGenerator,
)

from hf_speculate.cache.layers import attention_layers
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.errors import ShapeError, UnsupportedGenerationError
from hf_speculate.models.recurrent_layers import recurrent_cache
from hf_speculate.options.candidates.to_candidate_generator import DraftModelCandidateGenerator
from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.rows.per_row import PerRow
from hf_speculate.types import DraftOut, Kept, SampleStrategy

GeneratorFactory = Callable[..., CandidateGenerator]


def make_generator(
    source: CandidateGenerator | GeneratorFactory, **prepared: Any
) -> CandidateGenerator:
    """Return the call's generator; call a factory with its arguments from `prepared`.

    transformers passes `prepared` to its own generators.

    Raises:
        UnsupportedGenerationError: this kind of generator is not supported.
    """
    # Other processors follow the text and must not see drafts.
    prepared["logits_processor"] = BlockLogitsProcessorList(
        prepared["logits_processor"]
    ).row_wise_part()
    generator = (
        source if isinstance(source, CandidateGenerator) else source(**_taken(source, prepared))
    )
    if not isinstance(generator, CandidateGenerator):
        raise UnsupportedGenerationError(
            "candidate_generator must make a transformers CandidateGenerator, got "
            f"{type(generator).__name__}; "
            "return an instance of a subclass"
        )
    name = type(generator).__name__
    # transformers 5.17's MTP generator has no processors
    draft = getattr(generator, "assistant_model", None)
    if isinstance(generator, AssistedCandidateGenerator) and draft is not None:
        cache = recurrent_cache(draft)
        # its cache length is unknown to transformers
        if cache is not None and not attention_layers(cache.layers):
            raise UnsupportedGenerationError(
                "candidate_generator must draft with a model that has attention layers, got "
                f"{name} with "
                f"{type(draft).__name__}; pass the model as assistant_model"
            )
    if layers_read(generator) is None:
        return generator
    if generator is source:
        raise UnsupportedGenerationError(
            "candidate_generator must be what makes a generator that reads hidden states, got a "
            f"{name}, which "
            f"remembers its text; pass a functools.partial of {name}"
        )
    if prepared["generation_config"].output_hidden_states:
        raise UnsupportedGenerationError(
            f"output_hidden_states must be left out with {name}, got True; it reads the states of "
            "some layers only"
        )
    return generator


def layers_read(generator: CandidateGenerator) -> list[int] | None:
    """Return the ids of the layers whose states a generator reads; None if it reads no states.

    The ids count the layers of the target's forward.

    Raises:
        UnsupportedGenerationError: the generator reads other outputs, or all layers.
    """
    if not getattr(generator, "requires_model_outputs", False):
        return None
    asked = dict(getattr(generator, "model_kwargs_overrides", {}))
    layers = asked.pop("output_hidden_states", True)
    if asked or isinstance(layers, bool):
        outputs = ", ".join(sorted(asked)) or "the hidden states of all layers"
        raise UnsupportedGenerationError(
            f"candidate_generator must read the text or hidden states of layers that it names, got "
            f"{type(generator).__name__}, which reads {outputs}; decode without enabling the model"
        )
    return [layers] if isinstance(layers, int) else list(layers)


def _taken(source: GeneratorFactory, prepared: dict[str, Any]) -> dict[str, Any]:
    """Select a factory's arguments from `prepared`.

    As in transformers, MTP generators get no text, and only prompt lookup gets `vocab_size`.
    """
    usual = {name: value for name, value in prepared.items() if name != "vocab_size"}
    try:
        parameters = inspect.signature(source).parameters
    except (TypeError, ValueError):  # no signature
        return usual
    named = {name: value for name, value in prepared.items() if name in parameters}
    takes_all = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return usual | named if takes_all else named


def samples_its_logits(generator: CandidateGenerator) -> bool:
    """Return whether a generator's logits are known to be its sampling distribution.

    Otherwise, its proposals are treated as point masses.
    """
    # Compare exact types, since a subclass may translate or otherwise change ids and logits.
    if type(generator) is DraftModelCandidateGenerator:
        return generator.sample_strategy is SampleStrategy.RANDOM
    known: Any = generator
    if type(generator) in (AssistedCandidateGenerator, EarlyExitCandidateGenerator):
        return bool(known.generation_config.do_sample)
    return type(generator) in (DFlashTokenCandidateGenerator, MTPCandidateGenerator) and bool(
        known.do_sample
    )


class CandidateGeneratorDrafter(PerRow, Drafter):
    """A `Drafter` for one row over a `CandidateGenerator`.

    The generator sees the arguments of transformers' own loop. It chooses the draft length, up to
    `num_draft_tokens`, and samples with its own randomness. After each round it gets empty scores
    [1, K+1, 0], of which only the number of columns counts.
    """

    def __init__(self, generator: CandidateGenerator):
        self.generator, self.hidden_layers = generator, layers_read(generator)
        self._returns_distribution = samples_its_logits(generator)
        self._text: Tensor | None = None  # [1, T], sequence at the last call
        self._shown_len = 0  # length of the last prefix passed to the generator
        self._num_proposed = 0  # number of candidates after the last prefix

    def draft(self, request: DraftRequest) -> DraftOut:
        """Draft up to K tokens; K is 0 if the generator proposes nothing."""
        request.check()
        query, kept, num_draft_tokens = (
            request.query_token_ids,
            request.kept,
            request.num_draft_tokens,
        )
        if query.shape[0] != 1:
            raise ShapeError(
                f"query_token_ids must be [1, Q] for candidates, got {list(query.shape)}"
            )
        if self.hidden_layers is not None:
            return self._draft_with_states(self.hidden_layers, query, kept, num_draft_tokens)
        if self._text is None:
            return self._first_draft(query, num_draft_tokens)
        if kept is None:
            raise ShapeError(
                "kept must be given after the first call, got None; pass the tokens emitted since"
            )
        new_ids = kept.token_ids[:, : int(kept.num_emitted[0])]
        return self._draft(
            torch.cat([self._text, new_ids.to(self._text.device)], dim=1), num_draft_tokens
        )

    def _first_draft(self, text: Tensor, num_draft_tokens: int) -> DraftOut:
        """Draft after the prompt without its last token; drop the first candidate if it matches.

        If the first candidate is another token, draft after the whole prompt.
        """
        if text.shape[1] > 1:
            first = self._draft(text[:, :-1], num_draft_tokens + 1)
            if first.token_ids.shape[1] > 1 and int(first.token_ids[0, 0]) == int(text[0, -1]):
                self._text = text
                logits, sums = (
                    None if values is None else values[:, 1:]
                    for values in (first.token_logits, first.logsumexp)
                )
                return first._replace(
                    token_ids=first.token_ids[:, 1:],
                    lens=first.lens - 1,
                    token_logits=logits,
                    logsumexp=sums,
                )
        return self._draft(text, num_draft_tokens)

    def _draft(self, text: Any, num_draft_tokens: int, **outputs: Any) -> DraftOut:
        """Propose tokens after a sequence [1, T] int64; drop candidates beyond K."""
        if self._text is not None:  # report the previous round
            num_matches = min(text.shape[1] - self._shown_len - 1, self._num_proposed)
            scores = torch.empty(1, self._num_proposed + 1, 0, device=text.device)
            self.generator.update_candidate_strategy(text, scores, num_matches)
        with torch.no_grad():
            candidate_ids, logits = self.generator.get_candidates(text, **outputs)
        # [1, K]
        token_ids = candidate_ids[:, text.shape[1] :][:, :num_draft_tokens].to(
            text.device, torch.int64
        )
        self._text, self._shown_len = text, text.shape[1]
        self._num_proposed = candidate_ids.shape[1] - text.shape[1]
        num_drafted = token_ids.shape[1]
        lens = torch.full((1,), num_drafted, dtype=torch.int32, device=text.device)
        if logits is None or not self._returns_distribution or not num_drafted:
            return DraftOut(token_ids, lens, None, None)
        draft_logits = logits[:, :num_drafted].to(text.device)  # [1, K, V]
        return DraftOut(token_ids, lens, draft_logits, draft_logits.float().logsumexp(-1))

    def _draft_with_states(
        self, layers: Sequence[int], query: Tensor, kept: Kept | None, num_draft_tokens: int
    ) -> DraftOut:
        """Propose tokens after the tokens read by the target in this call, with their states.

        Prompts must not be padded.
        """
        if kept is None or kept.hidden_states is None:
            raise ShapeError(
                "kept must hold hidden states, got none; pass the emitted tokens with them"
            )
        num_emitted, is_first = int(kept.num_emitted[0]), self._text is None
        before = query[:, -num_emitted - 1 : -num_emitted] if self._text is None else self._text
        # [1, T]
        text = torch.cat([before, kept.token_ids[:, :num_emitted].to(before.device)], dim=1)
        states = kept.hidden_states[:, :num_emitted].chunk(len(layers), dim=-1)
        by_layer = dict(zip(layers, states, strict=True))
        by_layer[-1] = states[-1]  # transformers 5.17 reads the last layer by its number
        columns = torch.arange(text.shape[1], device=text.device)[None]  # [1, T]
        return self._draft(
            text,
            num_draft_tokens,
            model_kwargs={"position_ids": columns, "attention_mask": torch.ones_like(columns)},
            model_outputs=SimpleNamespace(hidden_states=by_layer),
            is_first_iteration=False,  # transformers' first round has no states and drafts nothing
            n_last_matches=0 if is_first else num_emitted - 1,
        )
