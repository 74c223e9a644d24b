"""List mutants in the KV caches, the token buffer, stopping criteria and logits processors."""

from tests.mutants.base import Fault, mutants_of

KV_CACHES = "cache/test_kv_cache.py generation/test_rollback.py generation/test_prompts.py"

MUTANTS = mutants_of(
    {
        ("hf_speculate/cache/dynamic.py", KV_CACHES): {
            "too little is dropped": Fault(
                "self._drop_last(min(drops, default=0))",
                "self._drop_last(max(min(drops, default=0) - 1, 0))",
            ),
            "the gap is not masked": Fault(
                "torch.where(\n            source < 0, 0, mask", "torch.where(source < 0, 1, mask"
            ),
            "common padding stays": Fault(
                "        if surplus <= 0:\n",
                "        if True:\n",
                f"{KV_CACHES} generation/test_caches.py",
            ),
            "windows keep what is past them": Fault(
                "self._record(False)",
                "self._record(True)",
                f"generation/test_caches.py {KV_CACHES}",
            ),
            "a window's length is not shortened": Fault(
                "layer.cumulative_length -= surplus", "layer.cumulative_length -= 0"
            ),
        },
        ("hf_speculate/cache/left_padding.py", KV_CACHES): {
            "rows move the wrong way": Fault(
                "shifts = [drop - smallest for drop in drops]",
                "shifts = [max(drops) - drop for drop in drops]",
            ),
            "padding is not counted in positions": Fault(
                "first_column - num_columns, self._prompt_pads_on_device\n        )",
                "first_column - num_columns)",
            ),
            "padding is not compacted": Fault(
                "self.pads = [self.pads[row] for row in indices]",
                "self.pads = self.pads[: len(indices)]",
            ),
        },
        ("hf_speculate/cache/preallocated.py", f"generation/test_caches.py {KV_CACHES}"): {
            "rows keep rejected tokens": Fault(
                "[length - drop for length, drop in", "[length for length, drop in"
            ),
            "positions count padding": Fault(
                "starts = [\n            length - pad for length, pad in zip",
                "starts = [length for length, pad in zip",
            ),
            "a window too wide is handed back": Fault(
                "max(width - layer.window + 1, 0)", "max(width - layer.window, 0)"
            ),
        },
        ("hf_speculate/cache/lookahead.py", f"generation/test_caches.py {KV_CACHES}"): {
            "tokens are written one column late": Fault(
                "            ].permute(1, 2, 0)", "            ].permute(1, 2, 0) + 1"
            ),
            "a window loses its first column": Fault(
                "first = max(min(layout.lens) - window + 1, 0)",
                "first = max(min(layout.lens) - window + 2, 0)",
            ),
            "a mask of a GPU begins before the buffer of a window": Fault(
                "(first - first_of_all) % MASK_UNIT", "first % MASK_UNIT"
            ),
            "masks of plain steps end too soon": Fault("num_left < num_query", "num_left < 0"),
            "longest row's window": Fault(
                "first = max(min(layout.lens) - window", "first = max(max(layout.lens) - window"
            ),
        },
        ("hf_speculate/cache/row_layout.py", f"generation/test_caches.py {KV_CACHES}"): {
            "padding stays after rows are dropped": Fault(
                "surplus = self.skip_padding() if self.num_columns else 0", "surplus = 0"
            ),
        },
        ("hf_speculate/rows/token_buffer.py", "cache/test_token_buffer.py"): {
            "even rows are written too early": Fault(
                "start = self.lens[0] if self.lens else 0",
                "start = self.lens[0] - 1 if self.lens else 0",
            ),
            "all tokens count": Fault(
                "self.row_lens.add_counts(counts)", "self.row_lens.add(num_tokens)"
            ),
            "tokens gathered before an append stay": Fault("gathered[0] is not self.lens or ", ""),
        },
        ("hf_speculate/processors/stopping_criteria.py", "processors/test_stopping_criteria.py"): {
            "one token after the maximal length": Fault(
                "max(1, max_length - prefix_len)", "max(1, max_length - prefix_len + 1)"
            ),
            "EOS is found one token late": Fault(
                "for length, token_id in enumerate(ids, 1)\n"
                "                        if token_id in self._eos_token_ids",
                "for length, token_id in enumerate(ids, 2) if token_id in self._eos_token_ids",
            ),
            "the last stop string counts": Fault(
                "stops_by_len.index(True) + 1", "len(stops_by_len) - stops_by_len[::-1].index(True)"
            ),
            "the last criterion counts": Fault(
                "num_emitted[row], is_done[row] = min(num_emitted[row], length)",
                "num_emitted[row], is_done[row] = length",
            ),
            "integers are read as truth": Fault(
                "(answers & 1).bool()",
                "answers.bool()",
                "processors/test_stopping_criteria.py generation/test_options.py",
            ),
        },
        ("hf_speculate/processors/block.py", "processors/test_processors.py"): {
            "all positions read one prefix": Fault(
                "aligned_ids.shape[1] - (last - position)",
                "aligned_ids.shape[1] - last",
                "processors generation/test_rollback.py",
            ),
            "an id in front ends an n-gram": Fault("fill = _NO_TOKEN", "fill = 1"),
            "the draft model changes the target's": Fault(
                "parts = [\n            _ForkedProcessor(p) if _has_state(p) else p",
                "parts = [p if _has_state(p) else p",
                "processors generation/test_rollback.py",
            ),
        },
        ("hf_speculate/options/cpu/top_k_top_p.py", "processors/test_processors.py options/cpu"): {
            "top-p drops one token too few": Fault(
                "np.float32(1 - processor.top_p)", "np.float32(1 - processor.top_p - 1e-3)"
            ),
            "top-p drops all that tie at the border": Fault(
                "if is_unsure is not None and is_unsure.any():", "if False:"
            ),
            "top-p of few scores rounds as it will": Fault(
                "rounding = (ascending.shape[-1] + 8)", "rounding = 0"
            ),
            "top-k keeps one token more": Fault(
                "scores.shape[-1] - min(processor.top_k, scores.shape[-1])",
                "max(scores.shape[-1] - processor.top_k - 1, 0)",
            ),
        },
        ("hf_speculate/processors/encoder_ids.py", "processors/test_processors.py"): {
            "rows take turns": Fault(
                "self._followers[score_index // num_positions]",
                "self._followers[score_index % len(self._followers)]",
            ),
        },
        ("hf_speculate/options/static_cache/copies.py", "generation/test_prompt_arguments.py"): {
            "pictures are as long as the text": Fault(
                "StaticLayer(max_cache_len=layers[index].keys.shape[2])",
                "StaticLayer(max_cache_len=max_cache_len)",
            ),
        },
        ("hf_speculate/models/wrapper_probe.py", "models/test_wrapper_probe.py"): {
            "any mask is ours": Fault("is_same = all(any(leaf is mask", "is_same = all(any(True"),
            "positions always arrive": Fault(
                "HandedOn(\n            is_same, _names_positions(meta_model) or received",
                "HandedOn(is_same, True or received",
            ),
        },
        ("hf_speculate/generation/inputs.py", "generation/test_prompt_arguments.py"): {
            "the prompt sees all pictures": Fault(
                "prompt |= dict.fromkeys(columns)", "prompt |= {}"
            ),
        },
        ("hf_speculate/engine/plan.py", "generation/test_caches.py"): {
            "a padding id below 0 is fed": Fault(
                "return pad if 0 <= pad < vocab", "return pad if pad < vocab"
            ),
        },
    }
)
