"""Drafts each row with a model or by copying, whichever promises more accepted tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_speculate.cache.base import KVCache
from hf_speculate.draft.acceptance_rates import model_kinds, model_rates, suffix_kinds, suffix_rates
from hf_speculate.draft.base import check_request
from hf_speculate.draft.model import ModelDrafter
from hf_speculate.draft.suffix import NO_PROPOSAL, Proposal, SuffixRows, SuffixSettings, point_masses
from hf_speculate.types import DraftOut, Fed, Kept, NoiseKeys, SampleStrategy

MAX_BEHIND = 64  # tokens that the draft model may lag behind the text before it is run whatever is promised


class HybridDrafter:
    """A `Drafter` that copies where that promises more, and else asks a draft model.

    What a copy would have gained is learnt in every round, from the text alone; what the model gains, in the rounds in
    which its tokens were proposed. A round in which every row copies does not run the model: its cache catches up when
    it is run next. The choice depends on nothing but the past, so each row's proposal keeps its law; in a mixed round
    under sampling a copied token's law is all on that token.

    Args:
        model: drafts for the rows that do not copy.
        settings: how rows copy.
        max_model_tokens: tokens that the model drafts at most, >= 1.
        device: where drafts are handed over.

    Source:
        Oliaro et al., "SuffixDecoding" (arXiv:2411.04975), section 4.
    """

    def __init__(
        self,
        model: ModelDrafter,
        settings: SuffixSettings,
        max_model_tokens: int,
        device: torch.device | str = "cpu",
    ):
        self.model = model
        self.texts = SuffixRows(settings)
        self.max_model_tokens = max_model_tokens
        self.device = torch.device(device)
        self._of_suffix, self._of_model = suffix_rates(0), model_rates(0)
        self._proposals: list[Proposal] = []  # [B] of the last call
        self._num_asked: list[int] = []  # [B] tokens of the model that were proposed in the last call
        self._unread: list[list[int]] | None = None  # [B] what was emitted since the model was run
        self._begun: Tensor | None = None  # [B, N] int64 on the host, what the model's cache held before the first call

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
        """See `Drafter.draft`; `query_token_ids` and `kept` are expected on the host."""
        check_request(query_token_ids, num_draft_tokens, sample_strategy, keys)
        num_model = min(num_draft_tokens, self.max_model_tokens)
        text = query_token_ids
        if self._begun is not None and kept is None:
            text = torch.cat([self._begun, text], dim=1)
        gained = self.texts.follow(text, kept)
        rows = self.texts.rows
        if gained is None or kept is None:
            self._of_suffix, self._of_model = suffix_rates(len(rows)), model_rates(len(rows))
            is_live = [True] * len(rows)
        else:
            self._learn(gained, kept.num_rounds)
            is_live = [bool(ids) for ids in gained]  # a row that gains nothing has ended
        # The model reads what was copied next, as many tokens of every row: the shortest row must have as many.
        most = num_draft_tokens if len(rows) == 1 else min(num_draft_tokens, max(self._shortest_len() - 1, 1))
        self._proposals = [row.propose(most) if live else NO_PROPOSAL for row, live in zip(rows, is_live, strict=True)]
        copies = [self._copies(number, num_model) for number in range(len(rows))]
        asks = [live and not copy for live, copy in zip(is_live, copies, strict=True)]
        self._num_asked = [num_model if ask else 0 for ask in asks]
        num_query = query_token_ids.shape[1]
        chosen = [one.token_ids if copy else [] for one, copy in zip(self._proposals, copies, strict=True)]
        if self._unread is not None and not any(asks) and not self._is_far_behind(num_query + num_draft_tokens):
            return point_masses(chosen, self.device)._replace(fed=Fed(-num_query, [False] * len(rows)))
        drafted = self.model.draft(
            query_token_ids.to(self.device),
            kv_cache,
            num_model if any(asks) else 1,
            sample_strategy,
            keys=keys,
            kept=self._unread_by_model(),
        )
        self._unread = [[] for _ in rows]
        if not any(copies):
            return drafted
        fed = Fed(drafted.token_ids.shape[1] - 1, [not copy for copy in copies])
        copied = point_masses(chosen, self.device)
        if not any(asks):
            return copied._replace(fed=fed)
        return _mixed(copied, drafted, torch.tensor(copies).to(self.device))._replace(fed=fed)

    def begin(self, token_ids: Tensor) -> None:
        """See `ModelDrafter.begin`."""
        self._begun = token_ids.cpu()
        self.model.begin(token_ids)

    def rows(self, indices: Sequence[int]) -> None:
        """Forget all rows but `indices`."""
        if self._begun is not None:
            self._begun = self._begun[torch.tensor(list(indices))]
        if self.texts.rows:  # nothing is known of any before the first call
            self._of_suffix.rows(indices)
            self._of_model.rows(indices)
        self.texts.select(indices)
        self.model.rows(indices)
        self._proposals = [self._proposals[row] for row in indices] if self._proposals else []
        self._num_asked = [self._num_asked[row] for row in indices] if self._num_asked else []
        if self._unread is not None:
            self._unread = [self._unread[row] for row in indices]

    def _copies(self, row: int, num_model: int) -> bool:
        """Whether a row's copy promises at least what the model does, and saves running it."""
        proposal = self._proposals[row]
        if not proposal.token_ids:
            return False
        promised = self._of_suffix.expected(row, suffix_kinds(proposal.match_len, len(proposal.token_ids)))
        return promised >= self._of_model.expected(row, model_kinds(num_model))

    def _learn(self, gained: Sequence[list[int]], num_rounds: int) -> None:
        """See what became of the last call's proposals.

        Args:
            gained: [B] tokens that each row has gained since.
            num_rounds: rounds since, of which all but the first were plain.
        """
        for row, ids in enumerate(gained):
            if self._unread is not None:
                self._unread[row] += ids
            if not ids:
                continue
            proposal, num_asked = self._proposals[row], self._num_asked[row]
            agrees = [one == other for one, other in zip(proposal.token_ids, ids, strict=False)]
            if agrees:
                num_verified = agrees.index(False) + 1 if False in agrees else len(agrees)
                num_accepted = num_verified - (False in agrees)
                self._of_suffix.observe(row, suffix_kinds(proposal.match_len, num_verified), num_accepted)
            if num_asked:
                num_accepted = min(len(ids) - num_rounds, num_asked)
                self._of_model.observe(row, model_kinds(min(num_accepted + 1, num_asked)), num_accepted)

    def _is_far_behind(self, num_query: int) -> bool:
        """Whether the next query may be so long that the draft model must be run now.

        In a batch all rows are fed as many tokens, and the slower ones drop states for it: they must have as many.
        """
        return num_query > MAX_BEHIND or (len(self.texts.rows) > 1 and num_query >= self._shortest_len())

    def _shortest_len(self) -> int:
        return min(len(row.index.text) for row in self.texts.rows)

    def _unread_by_model(self) -> Kept | None:
        """What was emitted since the model was run; None before its first run."""
        if self._unread is None:
            return None
        counts = [len(ids) for ids in self._unread]
        ids = [ids + [-1] * (max(counts) - len(ids)) for ids in self._unread]
        return Kept(torch.tensor(ids, dtype=torch.int64), torch.tensor(counts, dtype=torch.int32))


def _mixed(copied: DraftOut, drafted: DraftOut, copies: Tensor) -> DraftOut:
    """One draft of both; where laws are kept, a copied token's is 0 at the token and -inf elsewhere.

    Args:
        copied: the rows' copies, K of them.
        drafted: the model's tokens, as many or another number.
        copies: [B] bool, the rows that copy.
    """
    width = max(copied.token_ids.shape[1], drafted.token_ids.shape[1])
    num_drafted = drafted.token_ids.shape[1]
    copied_ids, drafted_ids = (
        torch.nn.functional.pad(one.token_ids, (0, width - one.token_ids.shape[1])) for one in (copied, drafted)
    )
    token_ids = torch.where(copies[:, None], copied_ids, drafted_ids)  # [B, K]
    lens = torch.where(copies, copied.lens, drafted.lens)
    if drafted.token_logits is None or drafted.logsumexp is None:
        return DraftOut(token_ids, lens, None, None)
    laws = drafted.token_logits
    logits = laws.new_full((*token_ids.shape, laws.shape[-1]), -torch.inf)  # [B, K, V]
    logits.scatter_(-1, token_ids.clamp(0, laws.shape[-1] - 1)[..., None], 0.0)
    logits[:, :num_drafted] = torch.where(copies[:, None, None], logits[:, :num_drafted], laws)
    logsumexp = drafted.logsumexp.masked_fill(copies[:, None], 0.0)
    return DraftOut(token_ids, lens, logits, torch.nn.functional.pad(logsumexp, (0, width - num_drafted)))
