"""Forced text: draft the only continuation that a logits processor allows.

A grammar often allows only one continuation, such as the names in a JSON schema and the quotes
around them. The processor returns this text, the call's tokenizer splits it, and the target
verifies the tokens under the grammar's mask, like any draft. If the target would split the text
differently, acceptance drops, but the output does not change. Rows with several allowed
continuations use the call's other draft source, and so do rows that expect more tokens from a draft
model or head.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.cache.base import KVCache
from hf_speculate.config import SpeculationConfig
from hf_speculate.draft.acceptance_rates import RowRates, SharedRates, forced_buckets, forced_rates
from hf_speculate.draft.base import Drafter, DrafterSetup, DraftRequest
from hf_speculate.draft.source import DraftSource, HistoryKey
from hf_speculate.draft.suffix import point_masses
from hf_speculate.options.sources.hybrid import RowChoice, mixed_draft
from hf_speculate.rows.per_row import PerRow
from hf_speculate.stats import SpeculationStats
from hf_speculate.transfers import upload
from hf_speculate.types import CachedDraft, DraftNames, DraftOut, Kept

if TYPE_CHECKING:
    from hf_speculate.engine.runners import Runners

# number of newest tokens tokenised together with the forced text; fewer if they do not fit
_TAIL_LENS = (4, 2, 1)
_BORDER = "\n"  # replaces the newest tokens if the last one would merge with the text
_CHARS_PER_TOKEN = 16  # characters to tokenise per drafted token; ordinary text has about 4
# Capabilities copied from the other source and its drafter.
_OF_SOURCE = (
    *(
        "argument",
        "hint",
        "model",
        "generation_config",
        "vocabulary",
        "eager_reason",
        "drafts_at_once",
    ),
    *(
        "is_single_row",
        "reads_embeds",
        "reads_keys",
        "reads_prepared",
        "unsynced",
        "hidden_layers",
        "is_compiled",
        "samples_with_kernels",
        "can_capture",
    ),
    "reads_outputs",
)
_OF_DRAFTER = (
    *(
        "hidden_layers",
        "reads_host_tokens",
        "reads_kept",
        "reads_prompt",
        "min_query_len",
        "is_compiled",
        "can_join",
    ),
    *("context_len", "counts_padding", "shares_columns", "awaits_prompt", "drafts_past_context"),
)


class Continuation:
    """Tokeniser for forced text.

    It splits the text as a continuation of a row.

    Args:
        tokenizer: the target's.
        max_tokens: maximum number of returned tokens.
        vocab_size: V; the tokens end before the first larger id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, vocab_size: int):
        self.max_tokens = max_tokens
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def tokens(self, tail: Sequence[int], text: str) -> tuple[list[int], bool]:
        """Return the first tokens of `text` after `tail`, and whether they cover the text.

        The text is tokenised together with the tail, so words across the boundary are split as
        usual. If the result does not begin with the tail, `text` is split on its own.
        """
        shown = text[: _CHARS_PER_TOKEN * self.max_tokens]
        token_ids = self._behind(tail, shown)
        num_known = next(
            (index for index, token_id in enumerate(token_ids) if token_id >= self._vocab_size),
            len(token_ids),
        )
        num_returned = min(num_known, self.max_tokens)
        return token_ids[:num_returned], num_returned == len(token_ids) and len(shown) == len(text)

    def _behind(self, tail: Sequence[int], text: str) -> list[int]:
        for tail_len in _TAIL_LENS:
            before = list(tail[-tail_len:])
            token_ids = self._encode(self._decode(before) + text) if before else []
            if before and token_ids[: len(before)] == before:
                return token_ids[len(before) :]
        before, token_ids = self._encode(_BORDER), self._encode(_BORDER + text)
        return token_ids[len(before) :] if token_ids[: len(before)] == before else []

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


class ForcedRow(RowChoice):
    """The newest tokens and the forced proposal of a row."""

    def __init__(self, tail: Sequence[int], shared: SharedRates):
        super().__init__()
        self.tail, self.rates = list(tail), RowRates(shared)
        self.token_ids: list[int] = []  # the proposal
        self.probabilities: list[float] = []  # for each proposed token and all before it
        self._buckets: list[int] = []  # kinds of the proposed tokens

    def learn(self, ids: Sequence[int]) -> None:
        """Append emitted tokens and learn from the acceptance of the last proposal."""
        super().learn(ids)
        agrees = [drafted == emitted for drafted, emitted in zip(self.token_ids, ids, strict=False)]
        if agrees:
            num_right = agrees.index(False) if False in agrees else len(agrees)
            self.rates.observe(self._buckets[: min(num_right + 1, len(agrees))], num_right)
        self.tail = [*self.tail, *ids][-max(_TAIL_LENS) :]
        self.token_ids, self.probabilities = [], []

    def propose(self, token_ids: list[int], is_whole: bool) -> None:
        """Propose forced tokens.

        Args:
            token_ids: the tokens.
            is_whole: whether they cover the whole forced text.
        """
        self.token_ids, self._buckets = token_ids, forced_buckets(len(token_ids), is_whole)
        self.probabilities = self.rates.probabilities(self._buckets)


def is_costly(drafter: Drafter) -> bool:
    """Return whether a drafter's drafts cost forwards of a model."""
    return drafter.max_draft_tokens != 0 and not drafter.is_free


class ForcedTextDrafter(PerRow, Drafter):
    """A `Drafter` that proposes forced text as point masses.

    Rows without forced text use the drafts of another drafter.
    """

    BY_ROW = ("_rows",)
    PARTS = ("rest",)
    proposes = True
    reads_forced_text = True
    drafts_fewer = True

    def __init__(
        self,
        rest: Drafter,
        continuation: Continuation,
        # called for each row; returns acceptance rates of forced tokens
        make_rates: Callable[[], SharedRates],
        max_model_tokens: int,  # limit for the other drafter, unless it proposes
        device: torch.device,
    ):
        self.rest, self._continuation, self._make_rates, self._device = (
            rest,
            continuation,
            make_rates,
            device,
        )
        self._max_model_tokens = max_model_tokens
        for name in _OF_DRAFTER:
            setattr(self, name, getattr(rest, name))
        self.is_free = not is_costly(rest)
        self.max_draft_tokens = rest.max_draft_tokens or None
        self._rows: list[ForcedRow] = []  # [B], once the prompts were read
        self._texts: Sequence[str] = ()  # [B] forced text after the newest tokens
        self._tokenizer_error: Exception | None = None  # last error of the tokenizer

    def begin(self, token_ids: Tensor) -> None:
        tails = token_ids[:, -max(_TAIL_LENS) :].tolist()
        self._rows = [ForcedRow(ids, self._make_rates()) for ids in tails]
        self.rest.begin(token_ids)

    def force(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def look_up(self, new_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        proposed = self.rest.look_up(new_ids) if self.rest.proposes else [[] for _ in new_ids]
        for row, ids in zip(self._rows, new_ids, strict=True):
            row.learn(ids)
        for row, text in zip(self._rows, self._texts, strict=True):
            if text and row.is_live:
                row.propose(*self._tokens(row.tail, text))
        return [
            row.probabilities or others for row, others in zip(self._rows, proposed, strict=True)
        ]

    def serves_all(self, num_draft_tokens: int) -> bool:
        return all(self._prefers(row, num_draft_tokens) or not row.is_live for row in self._rows)

    def cut_proposal(self, num_draft_tokens: int) -> DraftOut:
        forced = [row.token_ids[:num_draft_tokens] for row in self._rows]
        if not self.rest.proposes:
            return point_masses(forced, self._device)
        return self._mixed(forced, self.rest.cut_proposal(num_draft_tokens))

    def draft(self, request: DraftRequest) -> DraftOut:
        num_draft_tokens, forced = request.num_draft_tokens, []
        for row in self._rows:
            is_forced = self._prefers(row, num_draft_tokens)
            row.num_model = (
                0 if is_forced or not row.is_live else self._num_of_rest(num_draft_tokens)
            )
            forced.append(row.token_ids[:num_draft_tokens] if is_forced else [])
        drafted = self.rest.draft(request)
        if not any(forced):
            return drafted
        num_rows, num_drafted = drafted.token_ids.shape
        cached = drafted.cached or CachedDraft(
            0 if request.kv_cache is None else num_drafted - 1, [True] * num_rows
        )
        is_own = [own and not ids for own, ids in zip(cached.is_own, forced, strict=True)]
        return self._mixed(forced, drafted)._replace(cached=cached._replace(is_own=is_own))

    def is_callers(self, error: Exception) -> bool:
        return error is not self._tokenizer_error and self.rest.is_callers(error)

    def has_numbers(self) -> Tensor | None:
        return self.rest.has_numbers()

    def project_states(self, states: Tensor) -> Tensor:
        return self.rest.project_states(states)

    def read(self, token_ids: Tensor, kv_cache: KVCache) -> None:
        self.rest.read(token_ids, kv_cache)

    def read_kept(self, kept: Kept) -> None:
        self.rest.read_kept(kept)

    def _tokens(self, tail: Sequence[int], text: str) -> tuple[list[int], bool]:
        try:
            return self._continuation.tokens(tail, text)
        except Exception as error:
            self._tokenizer_error = error
            raise

    def _prefers(self, row: ForcedRow, num_draft_tokens: int) -> bool:
        """Return whether a row expects at least as many tokens from its forced text."""
        return row.prefers(
            row.probabilities[:num_draft_tokens], self._num_of_rest(num_draft_tokens)
        )

    def _num_of_rest(self, num_draft_tokens: int) -> int:
        return min(num_draft_tokens, self._max_model_tokens)

    def _mixed(self, forced: list[list[int]], drafted: DraftOut) -> DraftOut:
        """Return each row's forced tokens, or the other drafter's tokens if it has none."""
        is_forced = upload([bool(ids) for ids in forced], self._device, torch.bool)
        return mixed_draft(point_masses(forced, self._device), drafted, is_forced)


class ForcedText(DraftSource):
    """Draft source that tries forced text before another source."""

    varies_len = True

    def __init__(self, rest: DraftSource, tokenizer: PreTrainedTokenizerBase):
        self.rest, self._tokenizer = rest, tokenizer
        for name in _OF_SOURCE:
            setattr(self, name, getattr(rest, name))

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"forced text and {self.rest.description}" if self.rest.drafts else "forced text"

    @property
    def names(self) -> DraftNames:
        names, copies = self.rest.names, "prompt_lookup_num_tokens"
        is_free = names.free != names.model or self.rest.argument == copies
        return DraftNames(names.model, f"forced text or {names.free}" if is_free else "forced text")

    def settings(self, config: SpeculationConfig) -> SpeculationConfig:
        return self.rest.settings(config)

    def without_model(self) -> DraftSource:
        return ForcedText(self.rest.without_model(), self._tokenizer)

    def begin(self, setup: DrafterSetup) -> DraftSource:
        return ForcedText(self.rest.begin(setup), self._tokenizer)

    def samples(self, config: SpeculationConfig, do_sample: bool) -> bool:
        return self.rest.samples(config, do_sample)

    def history_key(self) -> HistoryKey:
        draft, name = self.rest.history_key()
        return HistoryKey(draft, ("forced text", name))

    def step_bytes(self, target: PreTrainedModel) -> int | None:
        return self.rest.step_bytes(target)

    def make_drafter(
        self, setup: DrafterSetup, runners: "Runners", meet: Callable[[], None] | None = None
    ) -> Drafter:
        drafter = self.rest.make_drafter(setup, runners, meet)
        shared = SharedRates.of_forced_texts(setup.target)
        # A row's choice between two sources depends only on its own tokens, as if it were decoded
        # on its own.
        make_rates = forced_rates if is_costly(drafter) else lambda: shared
        continuation = Continuation(self._tokenizer, setup.max_draft_tokens, setup.vocab_size)
        max_model_tokens = setup.config.max_model_tokens
        return ForcedTextDrafter(drafter, continuation, make_rates, max_model_tokens, setup.device)

    def keep_row(self, token_ids: Sequence[int], prompt_ids: Callable[[], Sequence[int]]) -> None:
        self.rest.keep_row(token_ids, prompt_ids)

    def after_call(self, target: PreTrainedModel, stats: SpeculationStats) -> None:
        self.rest.after_call(target, stats)


def make_source(rest: DraftSource, tokenizer: Any) -> ForcedText:
    """Return the draft source that tries forced text before the source `rest`."""
    return ForcedText(rest, tokenizer)
