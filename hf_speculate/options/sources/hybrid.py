"""Draft with prompt lookup or a draft model, whichever each row prefers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.acceptance_rates import RowRates, model_buckets, model_rates
from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.prompt_lookup import PromptLookup
from hf_speculate.draft.source import DraftSource, HistoryKey
from hf_speculate.draft.source import make_source as make_part
from hf_speculate.draft.suffix import RowText, SuffixDrafter, SuffixSettings, not_fed
from hf_speculate.engine.runners import Runners
from hf_speculate.rows.per_row import PerRow
from hf_speculate.transfers import send, upload
from hf_speculate.types import CachedDraft, DraftNames, DraftOut, Kept

_HOST = torch.device("cpu")


class RowChoice:
    """A row's choice between two drafts.

    It compares the expected number of tokens from a free proposal and from a draft model or head.
    """

    def __init__(self) -> None:
        self.model_rates = RowRates(model_rates())
        self.num_model = 0  # number of the model's tokens in the last draft
        self.is_live = False  # whether the last round emitted tokens

    def prefers(self, probabilities: Sequence[float], num_model: int) -> bool:
        """Return whether a proposal is expected to gain at least as much as `num_model` tokens.

        Args:
            probabilities: per proposed token, the probability of accepting it and all before it.
            num_model: draft length of the model; 0 if it cannot draft.
        """
        if not probabilities or not num_model:
            return bool(probabilities)
        return sum(probabilities) >= self.model_rates.expected(model_buckets(num_model))

    def learn(self, ids: Sequence[int]) -> None:
        """Learn from the emitted tokens of a round; a finished row has none."""
        self.is_live = bool(ids)
        if ids and self.num_model:
            num_accepted = min(len(ids) - 1, self.num_model)
            num_verified = min(num_accepted + 1, self.num_model)
            self.model_rates.observe(model_buckets(num_verified), num_accepted)
        self.num_model = 0


class HybridRow(RowChoice):
    """One row of the hybrid drafter, with the tokens that the model has not read."""

    def __init__(self) -> None:
        super().__init__()
        self.unread: list[int] = []  # tokens emitted since the model last ran

    def prefers_match(self, text: RowText, num_match: int, num_model: int) -> bool:
        """Return whether the match should gain at least as much as `num_model` model tokens."""
        return self.prefers(text.probabilities()[:num_match], num_model)

    def learn(self, ids: Sequence[int]) -> None:
        self.unread += ids
        super().learn(ids)


class HybridDrafter(PerRow, Drafter):
    """A `Drafter` of suffix matches or a draft model.

    Each row chooses by the expected number of tokens. The choice depends only on the row's past
    tokens, so each row's proposal keeps its distribution.

    Source:
        Oliaro et al., "SuffixDecoding" (arXiv:2411.04975), section 4.
    """

    BY_ROW = ("_rows",)
    PARTS = ("matches", "model")
    reads_host_tokens = True
    reads_kept = False
    proposes = True
    drafts_fewer = True

    def __init__(
        self,
        model: ModelDrafter,
        settings: SuffixSettings,
        max_model_tokens: int,
        device: torch.device,
    ):
        self.model, self.matches = model, SuffixDrafter(settings, device)
        self.min_query_len, self.can_join = model.min_query_len, model.can_join
        self.awaits_prompt = model.awaits_prompt
        self.max_model_tokens, self.device = max_model_tokens, device
        self.context_len, self.counts_padding = model.context_len, model.counts_padding
        self.shares_columns = model.shares_columns
        self.drafts_past_context = not (model.counts_padding or model.shares_columns)
        self._rows: list[HybridRow] = []  # [B], once the prompts were read

    def begin(self, token_ids: Tensor) -> None:
        self.matches.begin(token_ids)
        self._rows = [HybridRow() for _ in token_ids]
        self.model.begin(token_ids)

    def look_up(self, new_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        for row, ids in zip(self._rows, new_ids, strict=True):
            row.learn(ids)
        return self.matches.look_up(new_ids)

    def cut_proposal(self, num_draft_tokens: int) -> DraftOut:
        return self.matches.cut_proposal(num_draft_tokens)

    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        num_draft_tokens = request.num_draft_tokens
        num_model = min(num_draft_tokens, self.max_model_tokens)
        matched = self.matches.cut_proposal(num_draft_tokens)
        uses_match, max_model_lens = (
            [],
            [self._max_model_len(text, num_model) for text in self.matches.texts],
        )
        for row, text, model_len in zip(
            self._rows, self.matches.texts, max_model_lens, strict=True
        ):
            num_match = min(len(text.proposal.token_ids), num_draft_tokens)
            uses_match.append(row.prefers_match(text, num_match, model_len))
            row.num_model = model_len if row.is_live and not uses_match[-1] else 0
        if not any(row.num_model for row in self._rows):
            return matched._replace(cached=not_fed(request.query_token_ids))
        drafted = self._run_model(request, num_model)
        if min(max_model_lens) < num_model:
            lens = drafted.lens.minimum(upload(max_model_lens, self.device, torch.int32))
            drafted = drafted._replace(lens=lens)
        if not any(uses_match):
            return drafted
        cached = CachedDraft(drafted.token_ids.shape[1] - 1, [not match for match in uses_match])
        return mixed_draft(matched, drafted, upload(uses_match, self.device, torch.bool))._replace(
            cached=cached
        )

    def is_callers(self, error: Exception) -> bool:
        return self.matches.is_callers(error) or self.model.is_callers(error)

    def has_numbers(self) -> Tensor | None:
        return self.model.has_numbers()

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        self.model.read(token_ids, kv_cache)

    def _max_model_len(self, text: RowText, num_model: int) -> int:
        """Return the number of tokens, at most `num_model`, that fit in the model's context."""
        context_len = self.model.context_len
        if context_len is None:
            return num_model
        return max(min(num_model, context_len - len(text.token_ids) + 1), 0)

    def _run_model(self, request: DraftRequest, num_draft_tokens: int) -> DraftOut:
        """Draft with the model after feeding it the tokens emitted since its last run."""
        counts = [len(row.unread) for row in self._rows]
        pairs = zip(self._rows, counts, strict=True)
        ids = [row.unread + [-1] * (max(counts) - count) for row, count in pairs]
        kept = Kept(upload(ids, _HOST), upload(counts, _HOST, torch.int32))
        query = request.query_token_ids
        if not self.model.reads_host_tokens:
            query = send(query, self.device)
        model_request = request._replace(
            query_token_ids=query, num_draft_tokens=num_draft_tokens, kept=kept
        )
        drafted = self.model.draft(model_request)
        for row in self._rows:
            row.unread = []
        return drafted


def mixed_draft(matched: DraftOut, drafted: DraftOut, uses_match: Tensor) -> DraftOut:
    """Merge two drafts by `uses_match` [B] bool.

    Logits for matched tokens are 0 at the token and -inf elsewhere.
    """
    num_drafted = drafted.token_ids.shape[1]
    width = max(matched.token_ids.shape[1], num_drafted)
    matched_ids, drafted_ids = (
        torch.nn.functional.pad(draft.token_ids, (0, width - draft.token_ids.shape[1]))
        for draft in (matched, drafted)
    )
    token_ids = torch.where(uses_match[:, None], matched_ids, drafted_ids)  # [B, K]
    lens = torch.where(uses_match, matched.lens, drafted.lens)
    if drafted.token_logits is None or drafted.logsumexp is None:
        return drafted._replace(token_ids=token_ids, lens=lens, token_logits=None, logsumexp=None)
    model_logits = drafted.token_logits
    # [B, K, V]
    logits = model_logits.new_full((*token_ids.shape, model_logits.shape[-1]), -torch.inf)
    logits.scatter_(-1, token_ids.clamp(0, model_logits.shape[-1] - 1)[..., None], 0.0)
    logits[:, :num_drafted] = torch.where(
        uses_match[:, None, None], logits[:, :num_drafted], model_logits
    )
    logsumexp = drafted.logsumexp.masked_fill(uses_match[:, None], 0.0)
    logsumexp = torch.nn.functional.pad(logsumexp, (0, width - num_drafted))
    return drafted._replace(
        token_ids=token_ids, lens=lens, token_logits=logits, logsumexp=logsumexp
    )


class HybridSource(DraftSource):
    """Draft source for a draft model combined with prompt lookup."""

    varies_len = True
    unsynced = "prompt_lookup_num_tokens"

    def __init__(self, with_model: Any, lookup: PromptLookup):
        self.lookup = lookup
        self._use(with_model)

    def _use(self, with_model: Any) -> None:
        """Draft with the model of another source."""
        self.with_model, self.argument, self.hint = with_model, with_model.argument, with_model.hint
        self.model, self.generation_config = with_model.model, with_model.generation_config
        self.vocabulary, self.eager_reason = with_model.vocabulary, with_model.eager_reason

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"{self.with_model.description} and {self.lookup.description}"

    @property
    def names(self) -> DraftNames:
        return DraftNames(self.with_model.description, self.lookup.description)

    def settings(self, config: SpeculationConfig) -> SpeculationConfig:
        settings: SpeculationConfig = self.with_model.settings(config)
        return settings

    def resolve(self, target: PreTrainedModel, arguments: Mapping[str, Any]) -> "HybridSource":
        resolved = copy.copy(self)
        resolved._use(self.with_model.resolve(target, arguments))
        return resolved

    def without_model(self) -> DraftSource:
        return self.lookup

    def history_key(self) -> HistoryKey:
        draft, (name, _) = self.with_model.history_key()
        return HistoryKey(draft, (name, True))

    def make_drafter(
        self, setup: DrafterSetup, runners: Runners, meet: Callable[[], None] | None = None
    ) -> Drafter:
        model, settings = (
            self.with_model.make_drafter(setup, runners, meet),
            self.lookup.suffix_settings(setup),
        )
        return HybridDrafter(model, settings, setup.config.max_model_tokens, setup.device)

    def keep_row(self, token_ids: Sequence[int], prompt_ids: Callable[[], Sequence[int]]) -> None:
        self.lookup.keep_row(token_ids, prompt_ids)


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> HybridSource:
    """Return the draft source for a model or early exit with `prompt_lookup_num_tokens`."""
    name = "assistant_early_exit" if values.get("assistant_model") is None else "assistant_model"
    return HybridSource(
        make_part(name, target, values), make_part("prompt_lookup_num_tokens", target, values)
    )
