"""Draft with an EAGLE head, one token at a time, for rows that advance independently."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_speculate import DrafterSetup, DraftRequest
from hf_speculate.draft.suffix import SuffixDrafter, SuffixSettings, point_masses
from hf_speculate.kernels import Draws
from hf_speculate.rows.token_buffer import TokenBuffer
from hf_speculate.types import DraftOut, Kept, SampleStrategy
from smollm2_head.head import DraftHead, Heads

GROWTH = 256  # minimal growth of the buffers, in columns
# Assumed accepted tokens per draft of the head, before a row has measured any; mean over questions.
USUAL_GAIN = 0.4
GAIN_RATE = 0.2  # weight of the newest draft in the running mean of a row


class HeadDrafter:
    """`Drafter` over a `DraftHead`, with a KV cache.

    `generate(drafter=functools.partial(HeadDrafter, head))` creates a drafter for every call. The
    cache keeps the pairs that the target has read; the next call overwrites the states of drafted
    tokens.

    Args:
        head: head trained for the target.
        setup: setup of the call.
        confidence: lower limit in 0..1 for the product of top probabilities in a draft. The draft
        of a row ends before the token that takes the product below the limit, possibly before the
        first token. The rule depends only on distributions, not on sampled tokens, so sampling
        stays exact.
        copies: whether a row may copy the continuation of an earlier occurrence of its last tokens,
        as in prompt lookup, if this is expected to gain as much as the head has gained in the row
        so far.
    """

    def __init__(
        self, head: DraftHead, setup: DrafterSetup, confidence: float = 0.0, copies: bool = False
    ):
        self.head, self.confidence, self.proposes = head, confidence, copies
        self.hidden_layers = tuple(head.hidden_layers)
        self.vocab_size, self.processors, self.stream = (
            setup.vocab_size,
            setup.processors,
            setup.stream,
        )
        self.lens = torch.zeros(setup.batch_size, dtype=torch.int64)  # [B] true pairs in the cache
        config = head.config
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        shape = (2, setup.batch_size, config.num_key_value_heads, 0, config.head_dim)
        self.states = head.fc.weight.new_empty(shape)  # [2, B, Hkv, C, D] keys and values
        self.text: TokenBuffer | None = None  # input of the processors
        settings = SuffixSettings(
            max_draft_tokens=setup.max_draft_tokens,
            eos_token_ids=setup.eos_token_ids,
            vocab_size=setup.vocab_size,
            num_pads=list(setup.num_pads),
        )
        self.lookup = SuffixDrafter(settings)
        self.gains = [USUAL_GAIN] * setup.batch_size  # by row, per draft of the head
        self.has_drafted = [False] * setup.batch_size  # whether the head drafted last, by row

    def begin(self, token_ids: Tensor) -> None:
        """Start a call; see `Drafter.begin`."""
        self.lookup.begin(token_ids)

    def look_up(self, new_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Look up proposals; see `Drafter.look_up`."""
        for row, (ids, has_drafted) in enumerate(zip(new_ids, self.has_drafted, strict=True)):
            if has_drafted and ids:
                self.gains[row] += GAIN_RATE * (len(ids) - 1 - self.gains[row])
        self.has_drafted = [False] * len(new_ids)
        return self.lookup.look_up(new_ids)

    def cut_proposal(self, num_draft_tokens: int) -> DraftOut:
        """Cut the proposals; see `Drafter.cut_proposal`."""
        return self.lookup.cut_proposal(num_draft_tokens)

    @torch.inference_mode()
    def draft(self, request: DraftRequest) -> DraftOut:
        """Draft one block; see `Drafter.draft`."""
        query_token_ids, kept, num_draft_tokens = (
            request.query_token_ids,
            request.kept,
            request.num_draft_tokens,
        )
        is_sampled = request.sample_strategy is SampleStrategy.RANDOM
        counts = kept.num_emitted.to(torch.int64).cpu()  # [B]
        if is_sampled:
            self._follow(query_token_ids, kept)
        self._grow(int(self.lens.max()) + kept.token_ids.shape[1] + num_draft_tokens)
        # [B, N, D]
        output = self._run(
            kept.token_ids.clamp_min(0), self.head.project(kept.hidden_states), self.lens
        )
        self.lens = self.lens + counts
        copies = self._copies(num_draft_tokens) if self.proposes else [[]] * len(counts)
        self.has_drafted = [not ids for ids in copies]
        if all(copies):
            return point_masses(copies, query_token_ids.device)
        rows = torch.arange(len(counts))
        states = output[rows, (counts - 1).clamp_min(0)][:, None]  # [B, 1, D]
        chooser = _Chooser(self.head.target_ids)
        if is_sampled:
            chooser = _Drawer(self, Draws(request.keys, self.stream, num_draft_tokens), self.text)
        drafted = self._chain(chooser, states, num_draft_tokens)
        return _mixed(drafted, copies) if any(copies) else drafted

    def rows(self, indices: Sequence[int]) -> None:
        """Select rows; see `Drafter.rows`."""
        row_indices = torch.tensor(list(indices))
        self.lens, self.states = (
            self.lens[row_indices],
            self.states[:, row_indices.to(self.states.device)],
        )
        self.processors = self.processors.rows(indices)
        self.lookup.rows(indices)
        self.gains, self.has_drafted = (
            [values[row] for row in indices] for values in (self.gains, self.has_drafted)
        )
        if self.text is not None:
            self.text.rows(indices)

    def _copies(self, num_draft_tokens: int) -> list[list[int]]:
        """Return the copied tokens of each row [B]; rows that use the head get an empty list."""
        copies = []
        for text, gain in zip(self.lookup.texts, self.gains, strict=True):
            pays = sum(text.probabilities()[:num_draft_tokens]) >= gain
            copies.append(text.proposal.token_ids[:num_draft_tokens] if pays else [])
        return copies

    def _chain(self, chooser: "_Chooser", states: Tensor, num_draft_tokens: int) -> DraftOut:
        ids: list[Tensor] = []
        # [B] product of the likeliest tokens' probabilities
        sure = states.new_ones(len(states), dtype=torch.float32)
        lens = torch.zeros(len(states), dtype=torch.int32, device=states.device)
        for step in range(num_draft_tokens):
            logits = self.head.logits(states[:, 0])  # [B, Vd]
            if self.confidence:
                sure = sure * logits.float().softmax(-1).amax(-1)
                if bool((sure < self.confidence).all()):
                    break
            lens += sure >= self.confidence
            ids.append(chooser.choose(logits))
            if step + 1 < num_draft_tokens:
                states = self._run(ids[-1][:, None], states, self.lens + step)
        return chooser.result(ids, lens)

    def _run(self, token_ids: Tensor, states: Tensor, starts: Tensor) -> Tensor:
        """Return outputs [B, N, D] for pairs [B, N], stored from the columns `starts` [B] on."""
        num_pairs = token_ids.shape[1]
        columns = (starts[:, None] + torch.arange(num_pairs)).to(token_ids.device)  # [B, N]
        heads, residual = self.head.attend_from(token_ids, states, self.head.turns(columns))
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        keys, values = self.states
        keys[rows, :, columns] = heads.key.transpose(1, 2)
        values[rows, :, columns] = heads.value.transpose(1, 2)
        return self.head.finish(
            residual, self._attend(heads, columns, int(starts.max()) + num_pairs)
        )

    def _attend(self, heads: Heads, columns: Tensor, num_columns: int) -> Tensor:
        """Return the attention [B, H, N, D] of each pair over its row, up to its own column."""
        keys, values = self.states[:, :, :, :num_columns]
        mask = None
        # No mask is needed if every row has one pair, in the last column.
        if bool((columns[:, :1] != num_columns - 1).any()):
            # [B, 1, N, C]
            mask = torch.arange(num_columns, device=columns.device) <= columns[:, None, :, None]
            mask = mask.repeat(1, 1, self.num_groups, 1)  # [B, 1, G * N, C]
        query = heads.query.unflatten(1, (-1, self.num_groups)).flatten(2, 3)  # [B, Hkv, G * N, D]
        mixed = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return mixed.unflatten(2, (self.num_groups, -1)).flatten(1, 2)

    def _grow(self, num_columns: int) -> None:
        num_held = self.states.shape[3]
        if num_columns > num_held:
            num_new = max(num_columns - num_held, GROWTH)
            self.states = nn.functional.pad(self.states, (0, 0, 0, num_new))

    def _follow(self, query: Tensor, kept: Kept) -> None:
        if self.text is None:
            self.text = TokenBuffer(query)
        else:
            self.text.append(kept.token_ids, kept.num_emitted.tolist())


def _mixed(drafted: DraftOut, copies: list[list[int]]) -> DraftOut:
    """Replace some rows of the draft with copies, each with probability 1."""
    width = max(drafted.token_ids.shape[1], *map(len, copies))
    missing = width - drafted.token_ids.shape[1]
    token_ids, lens = nn.functional.pad(drafted.token_ids, (0, missing)), drafted.lens.clone()
    logits, sums = drafted.token_logits, drafted.logsumexp
    if logits is not None:
        logits = nn.functional.pad(logits, (0, 0, 0, missing), value=-torch.inf)
        sums = nn.functional.pad(sums, (0, missing))
    for row, ids in enumerate(copies):
        if not ids:
            continue
        lens[row] = len(ids)
        token_ids[row, : len(ids)] = torch.tensor(ids, device=token_ids.device)
        if logits is not None:
            logits[row] = (
                logits[row]
                .new_full(logits[row].shape, -torch.inf)
                .scatter(-1, token_ids[row, :, None], 0.0)
            )
            sums[row] = 0.0
    return DraftOut(token_ids, lens, logits, sums)


class _Chooser:
    """Greedy choice of the likeliest token."""

    def __init__(self, target_ids: Tensor):
        self.target_ids = target_ids

    def choose(self, logits: Tensor) -> Tensor:
        """Return target token ids [B] int64 for logits [B, Vd]."""
        return self.target_ids[logits.argmax(-1)]

    def result(self, ids: list[Tensor], lens: Tensor) -> DraftOut:
        """Return the draft with the chosen tokens, which may be empty."""
        return DraftOut(
            torch.stack(ids, 1) if ids else lens.new_empty(len(lens), 0, dtype=torch.int64),
            lens,
            None,
            None,
        )


class _Drawer(_Chooser):
    """Sampler of the processed distribution.

    The distribution is over the target vocabulary; tokens outside the draft vocabulary have
    probability 0.
    """

    def __init__(self, drafter: HeadDrafter, draws: Draws, text: TokenBuffer):
        super().__init__(drafter.head.target_ids)
        self.drafter, self.draws, self.text = drafter, draws, text
        self.processed: list[Tensor] = []

    def choose(self, logits: Tensor) -> Tensor:
        full = logits.new_full((len(logits), self.drafter.vocab_size), -torch.inf)  # [B, V]
        full[:, self.target_ids] = logits
        full = self.drafter.processors(
            self.text.token_ids, full[:, None], prefix_lens=self.text.lens
        )[:, 0]
        self.processed.append(full)
        ids = self.draws.draw(full)
        self.text.append(ids[:, None])
        return ids

    def result(self, ids: list[Tensor], lens: Tensor) -> DraftOut:
        if not ids:
            return super().result(ids, lens)
        self.text.drop(len(ids))
        return DraftOut(
            torch.stack(ids, 1), lens, torch.stack(self.processed, 1), self.draws.logsumexps()
        )
