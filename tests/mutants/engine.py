"""List mutants in the decoding loop: batch, sessions, stops, output and draft lengths."""

from tests.mutants.base import Fault, mutants_of

NAN = "reliability/test_nan_of_drafts.py"
COLUMNS = "models/test_quirks.py"
CONTEXT = "draft/test_context.py reliability/test_draft_faults.py"

MUTANTS = mutants_of(
    {
        ("hf_speculate/rows/per_row.py", "test_per_row.py"): {
            "lists are not compacted": Fault(
                "[values[row] for row in row_indices]", "values[: len(row_indices)]"
            ),
            "tensors are not compacted": Fault(
                "tensor.index_select(dim, self.on(tensor.device))",
                "tensor.narrow(dim, 0, len(self))",
            ),
            "a part with two names is selected twice": Fault(
                "if name in first.values()]", "if getattr(self, name) is not None]"
            ),
            "what was derived of other rows stays": Fault(
                "getattr(self, name).rows(row_indices)\n        self.forget()",
                "getattr(self, name).rows(row_indices)",
            ),
        },
        ("hf_speculate/engine/batch.py", "engine/test_batch.py"): {
            "keys count the padding": Fault(
                "positions(1, pads=self._key_pads)", "positions(1, pads=0 * self._key_pads)"
            ),
            "the round is not counted": Fault("self.num_rounds += 1", "self.num_rounds += 0"),
            "one token of room too many": Fault(
                "[\n            max_len - length\n            for", "[max_len - length + 1 for"
            ),
            "a row that joins counts the rounds before it": Fault(
                "[self.num_rounds - other.num_rounds]", "[0]", "options/refill/test_continuous.py"
            ),
        },
        ("hf_speculate/models/attention_names.py", "models/test_attention_names.py"): {
            "flash attention reads our name": Fault(
                "config=_Renamed(module.config, _attn_implementation=name)", "config=module.config"
            ),
            "our name stays in a config": Fault("if not holders:", "if holders:"),
            "soft caps are left out": Fault(
                'getattr(config, "attn_logit_softcapping", None)', "None"
            ),
        },
        ("hf_speculate/options/refill/continuous.py", "options/refill/test_continuous.py"): {
            "configs of an attached draft keep their names": Fault(
                "for model in decoder.plan.models if", "for model in [self.model] if"
            ),
        },
        ("hf_speculate/cache/ragged_layer.py", "cache/test_kv_cache.py"): {
            "a window layer keeps its first column when rows join": Fault(
                "min(self.base, other.base)", "max(self.base, other.base)"
            ),
            "the first rejected column stays": Fault(
                "(columns >= upload(lens", "(columns > upload(lens"
            ),
        },
        (
            "hf_speculate/engine/decoder.py",
            "generation/test_prompts.py generation/test_rollback.py test_stats.py",
        ): {
            "finished rows are never dropped": Fault(
                "if self.plan.keeps_rows or not any", "if True or not any"
            ),
            "a round that was scored again leaves NaN": Fault(
                "if verified.is_rescored:", "if False:", NAN
            ),
            "verification keeps dropped rows": Fault(
                "(batch, self.stops, self.target, self.drafts, self.verification)",
                "(batch, self.stops, self.target, self.drafts)",
                "generation/test_rollback.py options/spans/test_spans.py generation/test_matrix.py",
            ),
            "the output is not truncated": Fault(
                "self.output.truncate(end)",
                "self.output.truncate(end + 1)",
                "generation/test_options.py generation/test_matrix.py",
            ),
            "the draft is not told its end": Fault(
                "self.drafts.end(batch)",
                "self.drafts.kv_cache",
                "options/draft_state/test_draft_state.py",
            ),
            "a passed cache is not restored": Fault(
                "                restore()\n",
                "                pass\n",
                "reliability generation/test_caches.py",
            ),
            "buffers are not released": Fault(
                "kv_cache.release()",
                "kv_cache.kind",
                "options/compiled/test_compiled.py cache/test_memory.py",
            ),
        },
        (
            "hf_speculate/engine/target_session.py",
            "generation/test_options.py generation/test_matrix.py",
        ): {
            "the newest token is kept": Fault(
                "num_query = draft.token_ids.shape[1] + 1", "num_query = draft.token_ids.shape[1]"
            ),
            "surplus tokens stay in the cache": Fault(
                "if any(num_surplus):",
                "if False:",
                "generation/test_options.py generation/test_caches.py",
            ),
            "chunks are placed wrongly": Fault(
                "num_query - index * ", "num_query - 0 * ", "draft/test_custom.py"
            ),
            "padding at the end reads rejected columns": Fault(
                "if num_forwards and kv_cache.holds_rejected:", "if False:", NAN
            ),
            "plain steps are never spoilt": Fault(
                "            or self.kv_cache.holds_rejected\n            or", "            or", NAN
            ),
            "drafts end one column past a table": Fault(
                "self.kv_cache.num_columns - 1\n", "self.kv_cache.num_columns\n", COLUMNS
            ),
            "padding ends past a table": Fault(
                "min(max_query, self.max_columns - kv_cache.num_columns)", "max_query", COLUMNS
            ),
            "ids without a meaning reach the model": Fault(
                "draft.token_ids.clamp_min(0)",
                "draft.token_ids.clamp_min(1)",
                "draft/test_custom.py generation/test_prompts.py generation/test_rollback.py",
            ),
        },
        (
            "hf_speculate/engine/draft_session.py",
            "generation/test_options.py generation/test_matrix.py",
        ): {
            "the cache is cut one token too short": Fault(
                "self._crop(view, ends)",
                "self._crop(view, [end - 1 for end in ends])",
                "generation/test_faults_of_transformers.py",
            ),
            "the drafter is told of one token less": Fault(
                "ids = ids.masked_fill(columns >= lens.on_device()[:, None], -1)",
                "ids = ids.masked_fill(columns >= lens.on_device()[:, None] - 1, -1)",
                "draft/test_custom.py",
            ),
            "heads of joining rows have read nothing": Fault(
                "self.drafter.read_kept(kept)", "pass", "options/refill/test_heads.py"
            ),
            "dropped rows stay in the draft cache": Fault('("drafter", "kv_cache",', '("drafter",'),
            "rows draft past their end": Fault(
                "max_lens = [\n        max(min(left - 1, limit), 0)",
                "max_lens = [max(min(left + 9, limit), 0)",
                "generation/test_distribution.py generation/test_coupled.py test_stats.py "
                "draft/test_custom.py generation/test_schedules.py",
            ),
            "padding that is not fed counts as unseen": Fault(
                "row.num_seen += num_skipped", "row.num_seen += 0", "draft/test_context.py"
            ),
            "a rejected token stays in the cache": Fault(
                "num_columns = self.length - num_query",
                "num_columns = self.length - num_query + 1",
                "options/draft_state/test_draft_state.py",
            ),
            "a row drafts one token past the context": Fault(
                "return drafter.context_len + 1", "return drafter.context_len + 2", CONTEXT
            ),
            "padding takes the room of tokens": Fault(
                "(0 if drafter.counts_padding else num_pads)", "0", CONTEXT
            ),
            "a long row stays among rows that share its columns": Fault(
                "if room[row.index] >= num_draft_tokens]", "if True]", CONTEXT
            ),
            "a dead drafter is asked again": Fault(
                "if not self.faults.is_pending:  # a pending error is raised in all processes "
                "later",
                "if False:",
                CONTEXT,
            ),
            "the cache of a dead drafter keeps its hooks": Fault(
                "                session.kv_cache.release()\n", "                pass\n", CONTEXT
            ),
            "rows that join keep their old indices": Fault(
                "row.index += batch.num_rows", "row.index += 0", "reliability/test_draft_faults.py"
            ),
            "NaN is never looked for": Fault(
                ">= _FIRST_LOOK\n                and row.num_missed.bit_count()",
                "< 0 and row.num_missed.bit_count()",
                CONTEXT,
            ),
            "a full row counts for the schedule": Fault(
                "self.is_served = [max_tokens > 0 for max_tokens in room]",
                "self.is_served = [True for _ in room]",
                CONTEXT,
            ),
        },
        ("hf_speculate/engine/draft_faults.py", "reliability/test_draft_faults.py"): {
            "an error of the caller's code is swallowed": Fault(
                "if self.is_callers(error) or is_of_device", "if is_of_device"
            ),
            "a fault of the device is swallowed": Fault("isinstance(error, _OF_DEVICES)", "False"),
            "an error that is deferred by the device is not waited for": Fault(
                'if device.type != "cuda":', "if True:"
            ),
        },
        (
            "hf_speculate/engine/stop_tracker.py",
            "generation/test_options.py generation/test_matrix.py",
        ): {
            "a row stops one token late": Fault(
                "self.num_new[row] + count\n", "self.num_new[row] + count + 1\n"
            ),
            "a finished row emits on": Fault(
                "if batch.is_finished[row] and not self.is_lock_step:", "if False:"
            ),
            "rows without padding end at their own stop": Fault(
                "end = min(self.max_new_tokens, self.end) if",
                "end = min(self.max_new_tokens, *self.stop_lens) if",
            ),
            "the shortest row ends the output": Fault(
                "self.end = max(self.end, stop)",
                "self.end = min(self.end or stop, stop)",
                "processors/test_stopping_criteria.py generation/test_options.py",
            ),
        },
        (
            "hf_speculate/engine/verification.py",
            "generation/test_options.py generation/test_matrix.py",
        ): {
            "flags are lost": Fault(
                "reduce(or_, (flags[row] for row in live), 0)",
                "0",
                "reliability/test_bad_logits.py",
            ),
            "one token too few": Fault(
                "[row[: count + 1] for", "[row[: max(count, 1)] for", "generation/test_options.py"
            ),
            "NaN is not looked for": Fault(
                "if flags[row] & BAD_LOGITS] if checks_logits", "if False] if checks_logits", NAN
            ),
            "a processor hides NaN": Fault("if loses_nan or flagged:", "if flagged:", NAN),
            "a processor is shown NaN": Fault(
                "scores = logits.nan_to_num(0.0, torch.inf, -torch.inf)", "pass", NAN
            ),
            "NaN after the end counts": Fault("[: num_accepted[row] + 1])", ")", NAN),
            "processors are shown NaN in lock step": Fault(
                "if checks_logits and self.ranks.broadcast_number(self._begins_with_nan(batch, "
                "logits)):",
                "if False:",
                NAN,
            ),
            "a processor keeps its state of a round that is scored again": Fault(
                "self.processors.rollback([num_positions] * batch.num_rows)", "pass", NAN
            ),
            "processors are not rolled back": Fault(
                "[num_positions - count for count in trimmed.num_emitted]",
                "[0 for _ in trimmed.num_emitted]",
                "generation/test_rollback.py processors",
            ),
            "criteria are asked once a round": Fault(
                "if not all(accepted[row] for row in live) or self._has_ended != had_ended:",
                "if not all(accepted[row] for row in live):",
                "generation/test_options.py generation/test_matrix.py",
            ),
            "all positions share their noise": Fault(
                "positions=keys.positions + position)",
                "positions=keys.positions)",
                "generation/test_coupled.py",
            ),
            "processors write into the logits": Fault(
                "torch.float32, copy=True)\n            )\n            verifier",
                "torch.float32))\n            verifier",
            ),
        },
        ("hf_speculate/engine/second_scoring.py", NAN): {
            "the draft is dropped for what the target computes for it": Fault(
                "draft if self.depends_on_draft else batch.no_draft()", "batch.no_draft()"
            ),
            "rejected columns stay NaN": Fault(
                "+ 1)\n        self.target.kv_cache.clear_rejected()", "+ 1)", NAN
            ),
            "columns of single tokens are shifted": Fault(
                "(width - gap - row.shape[-1], gap)", "(gap, width - gap - row.shape[-1])", NAN
            ),
            "the target's own NaN is scored as if it were the draft's": Fault(
                "if verified.has_bad_logits:", "if False:", f"reliability/test_bad_logits.py {NAN}"
            ),
        },
        (
            "hf_speculate/engine/outputs.py",
            "generation/test_options.py generation/test_matrix.py",
        ): {
            "scores of the wrong rows": Fault(
                "record.verified.scores[row, :num_emitted]",
                "record.verified.scores[0, :num_emitted]",
            ),
            "ended rows hold no score at the padding": Fault(
                "ended[pad_token_id] = 0.0", "ended[pad_token_id] = 1.0", "engine/test_batch.py"
            ),
            "attentions are one column short": Fault(
                "end = layer.shape[-1] - num_query + position + 1",
                "end = layer.shape[-1] - num_query + position",
            ),
        },
        ("hf_speculate/types.py", "engine/test_batch.py"): {
            "finished rows are learned from": Fault(
                "enumerate(self.was_live) if was_live]", "enumerate(self.was_live)]"
            ),
        },
        ("hf_speculate/engine/draft_length.py", "engine/test_batch.py"): {
            "drafts past the last row's end": Fault(
                "[min(num_left[row] - 1, batch", "[min(num_left[row] + 3, batch"
            ),
            "rows without a drafter are learned from": Fault(
                "record.is_served[row] and (cached", "(cached"
            ),
            "the target's table has no end": Fault(
                "max_tokens = min(max_tokens, target_room)", "pass", COLUMNS
            ),
        },
        ("hf_speculate/options/draft_state/reuse.py", "options/draft_state/test_draft_state.py"): {
            "a passed state of another length is used whole": Fault(
                "for position, (left, right) in pairs if left != right)",
                "for position, _ in () if position)",
            ),
            "padding is not taken into account": Fault(
                "- torch.tensor(num_pads, device=device)[:, None]",
                "- 0 * torch.tensor(num_pads, device=device)[:, None]",
            ),
        },
    }
)
