"""The source of a draft model with prompt lookup: the hybrid drafter uses a suffix match or the model, row by row."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.cache.base import KVCache
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.acceptance_rates import (
    MODEL_PRIORS,
    AcceptanceRates,
    model_buckets,
    suffix_buckets,
)
from hf_speculate.draft.base import Drafter, DraftRequest
from hf_speculate.draft.draft_plan import DraftPlan
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.prompt_lookup import PromptLookup
from hf_speculate.draft.source import DraftSource, HistoryKey
from hf_speculate.draft.source import make_source as make_part
from hf_speculate.draft.suffix import NO_PROPOSAL, RowText, SuffixDrafter, SuffixSettings, point_masses
from hf_speculate.draft.suffix_index import Proposal
from hf_speculate.per_row import PerRow
from hf_speculate.transfers import send, upload
from hf_speculate.types import CachedDraft, DraftOut, Kept

_HOST = torch.device("cpu")
MAX_BEHIND = 64  # tokens that the draft model may lag behind before it runs in any case


class HybridRow:
    """One row of the hybrid drafter: the acceptance rates of the model, and what it has not read."""

    def __init__(self) -> None:
        self.model_rates = AcceptanceRates(MODEL_PRIORS)
        self.num_model = 0  # tokens of the model that were proposed
        self.unread: list[int] = []  # tokens emitted since the model ran

    def prefers_match(self, text: RowText, match: Proposal, num_model: int) -> bool:
        """Whether the suffix match is expected to gain at least as many tokens as the model with so many."""
        if not match.token_ids or not num_model:
            return bool(match.token_ids)
        buckets = suffix_buckets(match.match_len, len(match.token_ids))
        return text.rates.expected(buckets) >= self.model_rates.expected(model_buckets(num_model))

    def learn(self, ids: Sequence[int], num_rounds: int) -> None:
        """Learn from the model's last draft: the tokens emitted since, in one round and then plain ones."""
        self.unread += ids
        if ids and self.num_model:
            num_accepted = min(len(ids) - num_rounds, self.num_model)
            self.model_rates.observe(model_buckets(min(num_accepted + 1, self.num_model)), num_accepted)


class HybridDrafter(PerRow, Drafter):
    """A `Drafter` that uses suffix matches or a draft model, row by row, by expected accepted tokens.

    The choice depends on past tokens only, so each row's proposal keeps its distribution. The model does not run in a
    round in which every row uses a match: its cache catches up when it runs next.

    Source:
        Oliaro et al., "SuffixDecoding" (arXiv:2411.04975), section 4.
    """

    BY_ROW = ("_rows",)
    PARTS = ("matches", "model")
    reads_host_tokens = True
    drafts_fewer = True

    def __init__(self, model: ModelDrafter, settings: SuffixSettings, max_model_tokens: int, device: torch.device):
        self.model, self.matches = model, SuffixDrafter(settings)
        self.min_query_len, self.can_join, self.awaits_prompt = model.min_query_len, model.can_join, model.awaits_prompt
        self.max_model_tokens, self.device = max_model_tokens, device
        self.context_len, self.counts_padding = model.context_len, model.counts_padding
        self.shares_columns = model.shares_columns
        self.drafts_past_context = not (model.counts_padding or model.shares_columns)
        self._rows: list[HybridRow] = []  # [B], once the prompts were read
        self._has_run = False  # whether the model was shown the prompts, so that it lacks only what rows call unread

    def draft(self, request: DraftRequest) -> DraftOut:
        request.check()
        query, num_draft_tokens = request.query_token_ids, request.num_draft_tokens
        num_model = min(num_draft_tokens, self.max_model_tokens)
        is_live = self._follow(query, request.kept)
        # The model reads matched tokens later, the same number in every row: the shortest row must have as many.
        most = num_draft_tokens if len(is_live) == 1 else min(num_draft_tokens, max(self._shortest_len() - 1, 1))
        chosen, uses_match, can_ask = [], [], [self._model_room(text, num_model) for text in self.matches.texts]
        for row, text, num, live in zip(self._rows, self.matches.texts, can_ask, is_live, strict=True):
            match = self.matches.propose(text, most) if live else NO_PROPOSAL
            uses_match.append(row.prefers_match(text, match, num))
            chosen.append(match.token_ids if uses_match[-1] else [])
            row.num_model = num if live and not uses_match[-1] else 0
        asks_model, num_query = any(row.num_model for row in self._rows), query.shape[1]
        must_run = not self._has_run or self._is_far_behind(num_query + num_draft_tokens)
        if not asks_model and (not must_run or can_ask == [0]):  # a single row past the context never comes back
            cached = CachedDraft(-num_query, [False] * len(is_live))
            return point_masses(chosen, self.device)._replace(cached=cached)
        drafted = self._run_model(request, num_model if asks_model else 1)
        if min(can_ask) < num_model:
            drafted = drafted._replace(lens=drafted.lens.minimum(upload(can_ask, self.device, torch.int32)))
        if not any(uses_match):
            return drafted
        cached = CachedDraft(drafted.token_ids.shape[1] - 1, [not match for match in uses_match])
        matched = point_masses(chosen, self.device)
        if not asks_model:
            return matched._replace(cached=cached)
        return _mixed(matched, drafted, upload(uses_match, self.device, torch.bool))._replace(cached=cached)

    def is_callers(self, error: Exception) -> bool:
        return self.model.is_callers(error)

    def has_numbers(self) -> Tensor | None:
        return self.model.has_numbers()

    def begin(self, token_ids: Tensor) -> None:
        self.matches.begin(token_ids)
        self._rows, self._has_run = [HybridRow() for _ in token_ids], True
        self.model.begin(token_ids)

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        self.model.read(token_ids, kv_cache)

    def _follow(self, query: Tensor, kept: Kept | None) -> list[bool]:
        """Read the new tokens; [B] whether a row has any: one without new tokens is finished."""
        gained = self.matches.follow(query, kept)
        if kept is None:
            self._rows = [HybridRow() for _ in gained]
        else:
            for row, ids in zip(self._rows, gained, strict=True):
                row.learn(ids, kept.num_rounds)
        return [bool(ids) for ids in gained]

    def _model_room(self, text: RowText, num_model: int) -> int:
        """How many of so many tokens the model can draft in a row."""
        context_len = self.model.context_len
        return num_model if context_len is None else max(min(num_model, context_len - len(text.token_ids) + 1), 0)

    def _run_model(self, request: DraftRequest, num_draft_tokens: int) -> DraftOut:
        """Draft with the model, which is shown the tokens emitted since its last run."""
        kept = None  # in the first call
        if self._has_run:
            counts = [len(row.unread) for row in self._rows]
            ids = [row.unread + [-1] * (max(counts) - num) for row, num in zip(self._rows, counts, strict=True)]
            kept = Kept(upload(ids, _HOST), upload(counts, _HOST, torch.int32))
        query = request.query_token_ids
        if not self.model.reads_host_tokens:
            query = send(query, self.device)
        model_request = request._replace(query_token_ids=query, num_draft_tokens=num_draft_tokens, kept=kept)
        drafted = self.model.draft(model_request)
        self._has_run = True
        for row in self._rows:
            row.unread = []
        return drafted

    def _is_far_behind(self, num_query: int) -> bool:
        """Whether the next query could be so long that the draft model must run now."""
        # All rows are fed the same number of tokens, and slower rows drop states for it: they must have them.
        return num_query > MAX_BEHIND or (len(self._rows) > 1 and num_query >= self._shortest_len())

    def _shortest_len(self) -> int:
        return min(len(text.token_ids) for text in self.matches.texts)


def _mixed(matched: DraftOut, drafted: DraftOut, uses_match: Tensor) -> DraftOut:
    """One draft of both by `uses_match` [B] bool; matched tokens have kept logits 0 at the token, -inf elsewhere."""
    num_drafted = drafted.token_ids.shape[1]
    width = max(matched.token_ids.shape[1], num_drafted)
    matched_ids, drafted_ids = (
        torch.nn.functional.pad(draft.token_ids, (0, width - draft.token_ids.shape[1])) for draft in (matched, drafted)
    )
    token_ids = torch.where(uses_match[:, None], matched_ids, drafted_ids)  # [B, K]
    lens = torch.where(uses_match, matched.lens, drafted.lens)
    if drafted.token_logits is None or drafted.logsumexp is None:
        return DraftOut(token_ids, lens, None, None)
    model_logits = drafted.token_logits
    logits = model_logits.new_full((*token_ids.shape, model_logits.shape[-1]), -torch.inf)  # [B, K, V]
    logits.scatter_(-1, token_ids.clamp(0, model_logits.shape[-1] - 1)[..., None], 0.0)
    logits[:, :num_drafted] = torch.where(uses_match[:, None, None], logits[:, :num_drafted], model_logits)
    logsumexp = drafted.logsumexp.masked_fill(uses_match[:, None], 0.0)
    return DraftOut(token_ids, lens, logits, torch.nn.functional.pad(logsumexp, (0, width - num_drafted)))


class HybridSource(DraftSource):
    """The source of a call that drafts with a model and by prompt lookup."""

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

    def make_drafter(self, plan: DraftPlan) -> Drafter:
        model, settings = self.with_model.make_drafter(plan), self.lookup.suffix_settings(plan)
        return HybridDrafter(model, settings, plan.config.max_model_tokens, plan.device)

    def keep(self, token_ids: Sequence[int]) -> None:
        self.lookup.keep(token_ids)


def make_source(target: PreTrainedModel, values: Mapping[str, Any]) -> HybridSource:
    """The source of a model, or of the target's first layers, with `prompt_lookup_num_tokens`."""
    name = "assistant_early_exit" if values.get("assistant_model") is None else "assistant_model"
    return HybridSource(make_part(name, target, values), make_part("prompt_lookup_num_tokens", target, values))
