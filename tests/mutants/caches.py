"""Mutants of the KV caches, the token buffer, stopping criteria and logits processors."""

from tests.mutants.base import Fault, mutants_of

KV_CACHES = "cache/test_kv_cache.py generation/test_rollback.py generation/test_prompts.py"
MUTANTS = (
    *mutants_of(
        "hf_speculate/cache/dynamic.py",
        KV_CACHES,
        {
            "dynamic cache: too little is dropped": Fault(
                "self._drop_last(min(drops, default=0))", "self._drop_last(max(min(drops, default=0) - 1, 0))"
            ),
            "dynamic cache: the gap is not masked": Fault(
                "torch.where(source < 0, 0, self._mask", "torch.where(source < 0, 1, self._mask"
            ),
            "dynamic cache: common padding stays": Fault(
                "        if surplus <= 0:\n",
                "        if True:\n",
                f"{KV_CACHES} generation/test_passed_caches.py",
            ),
            "dynamic cache: windows keep what is past them": Fault(
                "layer.record_past = False",
                "layer.record_past = True",
                f"generation/test_passed_caches.py {KV_CACHES}",
            ),
            "dynamic cache: a window's length is not shortened": Fault(
                "layer.cumulative_length -= surplus", "layer.cumulative_length -= 0"
            ),
        },
    ),
    *mutants_of(
        "hf_speculate/cache/left_padding.py",
        KV_CACHES,
        {
            "dynamic cache: rows move the wrong way": Fault(
                "shifts = [drop - smallest for drop in drops]", "shifts = [max(drops) - drop for drop in drops]"
            ),
            "dynamic cache: padding is not counted in positions": Fault(
                "first_column - num_columns, self._own_there)", "first_column - num_columns)"
            ),
            "dynamic cache: padding is not compacted": Fault(
                "self.pads = [self.pads[row] for row in indices]", "self.pads = self.pads[: len(indices)]"
            ),
        },
    ),
    *mutants_of(
        "hf_speculate/cache/preallocated.py",
        f"generation/test_preallocated.py {KV_CACHES}",
        {
            "preallocated cache: rows keep rejected tokens": Fault(
                "[length - drop for length, drop in", "[length for length, drop in"
            ),
            "preallocated cache: positions count padding": Fault(
                "starts = [length - pad for length, pad in zip", "starts = [length for length, pad in zip"
            ),
            "preallocated cache: a window too wide is handed back": Fault(
                "max(width - layer.window + 1, 0)",
                "max(width - layer.window, 0)",
                f"generation/test_preallocated.py {KV_CACHES} generation/test_passed_caches.py",
            ),
        },
    ),
    *mutants_of(
        "hf_speculate/cache/columns.py",
        f"generation/test_preallocated.py {KV_CACHES}",
        {
            "ragged layer: tokens are written one column late": Fault(
                "coming.places[key][coming.num_done : coming.num_done + self.num_query]",
                "coming.places[key][coming.num_done : coming.num_done + self.num_query] + 1",
            ),
            "ragged layer: a window loses its first column": Fault(
                "first = max(min(self.lens) - window + 1, 0)", "first = max(min(self.lens) - window + 2, 0)"
            ),
            "preallocated cache: padding stays after rows are dropped": Fault(
                "surplus = min(pads, default=0) if self.num_held else 0", "surplus = 0"
            ),
            "ragged layer: longest row's window": Fault(
                "first = max(min(self.lens) - window", "first = max(max(self.lens) - window"
            ),
        },
    ),
    *mutants_of(
        "hf_speculate/cache/token_buffer.py",
        "test_token_buffer.py",
        {
            "token buffer: even rows are written too early": Fault(
                "start = self.lens[0] if self.lens else 0", "start = self.lens[0] - 1 if self.lens else 0"
            ),
            "token buffer: all tokens count": Fault("self.row_lens.add_counts(counts)", "self.row_lens.add(num)"),
        },
    ),
    *mutants_of(
        "hf_speculate/processors/stopping_criteria.py",
        "processors/test_stopping_criteria.py",
        {
            "stops: one token after the maximal length": Fault(
                "max(1, max_length - prefix_len)", "max(1, max_length - prefix_len + 1)"
            ),
            "stops: EOS is found one token late": Fault(
                "for at, token_id in enumerate(ids, 1) if token_id in self._eos_token_ids",
                "for at, token_id in enumerate(ids, 2) if token_id in self._eos_token_ids",
            ),
            "stops: the last stop string counts": Fault("hits.index(True) + 1", "len(hits) - hits[::-1].index(True)"),
            "stops: the last criterion counts": Fault(
                "num_emitted[row], is_done[row] = min(num_emitted[row], at)", "num_emitted[row], is_done[row] = at"
            ),
            "stops: integers are read as truth": Fault(
                "(answers & 1).bool()",
                "answers.bool()",
                "processors/test_stopping_criteria.py generation/test_options.py",
            ),
        },
    ),
    *mutants_of(
        "hf_speculate/processors/block.py",
        "processors/test_processors.py",
        {
            "processors: all positions read one prefix": Fault(
                "aligned_ids.shape[1] - (last - position)",
                "aligned_ids.shape[1] - last",
                "processors generation/test_rollback.py",
            ),
            "processors: an id in front ends an n-gram": Fault("fill = _NO_TOKEN", "fill = 1"),
            "processors: the draft model changes the target's": Fault(
                "parts = [ForkedProcessor(p) if _has_state(p) else p",
                "parts = [p if _has_state(p) else p",
                "processors generation/test_rollback.py",
            ),
        },
    ),
    *mutants_of(
        "hf_speculate/processors/top_k_top_p.py",
        "processors/test_processors.py",
        {
            "processors: top-p drops one token too few": Fault(
                "np.float32(1 - processor.top_p)", "np.float32(1 - processor.top_p - 1e-3)"
            ),
            "processors: top-p drops all that tie at the border": Fault(
                "if is_split is not None and is_split.any():", "if False:"
            ),
            "processors: top-k keeps one token more": Fault(
                "scores.shape[-1] - min(processor.top_k, scores.shape[-1])",
                "max(scores.shape[-1] - processor.top_k - 1, 0)",
            ),
        },
    ),
)
