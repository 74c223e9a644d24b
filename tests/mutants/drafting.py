"""List mutants in drafters, schedules and spans."""

from tests.mutants.base import Fault, mutants_of

MUTANTS = mutants_of(
    {
        (
            "hf_speculate/draft/suffix_index.py",
            "draft/test_suffix.py options/sources/test_suffix_store.py",
        ): {
            "the match is one token late": Fault(
                "length, match_end = matched, end", "length, match_end = matched, end + 1"
            ),
            "the earliest match": Fault(
                "end = before[end - 1]\n", "end = before[end - 1] and before[before[end - 1] - 1]\n"
            ),
            "an occurrence at the end counts": Fault(
                "length < end < len(text) and text", "length < end <= len(text) and text"
            ),
        },
        (
            "hf_speculate/draft/suffix.py",
            "draft/test_suffix.py options/sources/test_suffix_store.py",
        ): {
            "drafts go on after EOS": Fault("token_ids[: ends[0] + 1]", "token_ids[: ends[0] + 9]"),
            "padding is part of the text": Fault(
                "[ids[num_pads:] for ids, num_pads in zip(", "[ids for ids, num_pads in zip("
            ),
            "a row that drafts nothing learns nothing": Fault("if agrees:", "if len(agrees) > 1:"),
            "finished rows draft": Fault(
                "self._find(row) if ids else NO_PROPOSAL", "self._find(row)"
            ),
            "rows are not compacted": Fault('("texts", "_num_pads")', '("_num_pads",)'),
        },
        ("hf_speculate/options/sources/hybrid.py", "options/sources/test_hybrid.py"): {
            "the model's cache counts matched tokens": Fault(
                "[not match for match in uses_match]", "[True for match in uses_match]"
            ),
            "the model is not told of matched tokens": Fault(
                "self.unread += ids", "self.unread = list(ids)"
            ),
            "the rates of matches and model are swapped": Fault(
                "sum(probabilities) >= self.model_rates", "sum(probabilities) < self.model_rates"
            ),
            "a matched token has the model's probabilities": Fault(
                "torch.where(\n"
                "        uses_match[:, None, None], logits[:, :num_drafted], model_logits\n    )",
                "model_logits",
            ),
            "a matched token has no probability": Fault(
                "[..., None], 0.0)\n    logits[:, :num_drafted]",
                "[..., None], -1.0)\n    logits[:, :num_drafted]",
            ),
        },
        ("hf_speculate/options/sources/forced_text.py", "options/sources/test_forced_text.py"): {
            "forced text is split without the row": Fault("list(tail[-tail_len:])", "[]"),
            "a text that the row changes is split at its border": Fault(
                "_encode(_BORDER + text)", "_encode(text)"
            ),
            "all of an enormous text is tokenised": Fault(
                "text[: _CHARS_PER_TOKEN * self.max_tokens]", "text"
            ),
            "ids past the vocabulary are drafted": Fault(
                "if token_id >= self._vocab_size", "if False"
            ),
            "emitted tokens are not followed": Fault("[*self.tail, *ids]", "[*self.tail]"),
            "rows are not compacted": Fault('BY_ROW = ("_rows",)', "BY_ROW = ()"),
            "an error of the tokenizer ends the call": Fault(
                "error is not self._tokenizer_error and ", ""
            ),
        },
        ("hf_speculate/draft/custom.py", "options/sources/test_forced_text.py"): {
            "the first call of a custom drafter has a part of the text": Fault(
                "request._replace(kept=None)", "request"
            ),
        },
        (
            "hf_speculate/options/pictures/draft_inputs.py",
            "options/pictures/test_draft_inputs.py",
        ): {
            "the draft model is written to": Fault("name: copy.copy(base)}", "name: base}"),
            "any number of states is taken": Fault("if num_states != num_tokens:", "if False:"),
            "other ids of pictures are taken": Fault(
                "and ours != theirs and", "and ours is theirs is None and"
            ),
            "prompts of one row are all rows'": Fault(
                "[::num_copies], prompts.text_mask", "[:1], call.prompts.text_mask"
            ),
        },
        ("hf_speculate/options/heads/row_axes.py", "options/heads/test_axes.py"): {
            "later tokens count all tokens of pictures": Fault(
                "numbers[:, None] + self.offsets[:, :, None]",
                "numbers[:, None] + 0 * self.offsets[:, :, None]",
            ),
        },
        ("hf_speculate/options/heads/media.py", "options/heads/test_merged.py"): {
            "a pair has the embedding of the token before": Fault(
                "torch.cat([inputs[:, 1:], inputs[:, -1:]], dim=1)", "inputs"
            ),
        },
        ("hf_speculate/options/heads/network.py", "options/heads/test_targets.py"): {
            "ids that a table lacks are looked up": Fault(
                "token_ids.clamp_max(num_rows - 1)", "token_ids"
            ),
            "an adapter's rows keep the scale": Fault("rows = rows / self._scale", "pass"),
        },
        ("hf_speculate/draft/vocab_mapping.py", "options/heads/test_targets.py"): {
            "ids that the target lacks are proposed": Fault(
                "ids = ids[ids < size]\n", "ids = ids.clamp_max(size - 1)\n"
            ),
            "columns of ids that the target lacks count": Fault(
                "return logits[..., : self.num_columns] if has_more else logits", "return logits"
            ),
        },
        ("hf_speculate/options/heads/layer_capture.py", "options/heads/test_generate.py"): {
            "states are kept without a copy": Fault("states.clone()", "states"),
        },
        ("hf_speculate/options/heads/dflash2.py", "options/heads/test_against_reference.py"): {
            "candidates are scored without the token before": Fault(
                " + selector(known, features[:, step], ids)", ""
            ),
        },
        ("hf_speculate/options/heads/target_ids.py", "options/heads/test_kinds.py"): {
            "ids are read as offsets": Fault("return readings[-1]", "return readings[0]"),
        },
        ("hf_speculate/options/heads/weight_files.py", "options/heads/test_damaged.py"): {
            "a shard may lack weights": Fault("if lacking:", "if False:"),
        },
        ("hf_speculate/draft/token_choice.py", "draft/test_model.py processors"): {
            "processors see no drafted token": Fault(
                "history.append(token_ids[:, None])",
                "history.append(token_ids[:, None], [0] * len(token_ids))",
            ),
            "sure tokens end a draft": Fault(
                "log_probs.exp() < settings", "log_probs.exp() > settings", "draft/test_model.py"
            ),
        },
        ("hf_speculate/options/compiled/drafter.py", "options/compiled/test_graphs.py"): {
            "a replay overwrites the first part of a draft": Fault(
                "part = copies(part)", "part = DraftOut(*part)"
            ),
            "each part starts at the first token": Fault(
                "carry.by_row.copy_(following.by_row)", "carry.by_row.copy_(carry.by_row)"
            ),
            "all tokens of a round have one noise": Fault("numbers[6:] + 1", "numbers[6:] + 0"),
        },
        (
            "hf_speculate/options/heads/chain_graphs.py",
            "options/heads/test_chain_graphs.py",
        ): {
            "calls with another K share inputs": Fault(
                '"new pairs", self._max_new, len(numbers)', '"new pairs", len(numbers)'
            ),
            "graphs outlive the embeddings of the target": Fault(
                "return weights_key(*parts.modules), None", "return None, None"
            ),
            "a chain goes on from the pair before the last": Fault(
                "ends=ends + lens)", "ends=ends + lens - 1)"
            ),
            "states after a row's last token are read": Fault(
                "new.states.masked_fill(~is_new[:, :, None], 0)", "new.states"
            ),
        },
        ("hf_speculate/models/inferencer.py", "draft/test_model.py"): {
            "one EOS id is looked at": Fault(
                "[:, :, None] != stop_ids).all(-1)",
                "[:, :, None] != stop_ids).any(-1)",
                "models/test_language_model.py",
            ),
            "rows count tokens after their EOS": Fault(
                "torch.where(reduce(torch.logical_and, go_on), counts[-1], counts).amin(1)",
                "torch.where(reduce(torch.logical_and, go_on), counts[-1], counts).amax(1)",
                "models/test_language_model.py",
            ),
            "only the last chunk is read": Fault(
                "in query_token_ids.tensor_split(num_chunks, dim=1):",
                "in query_token_ids.tensor_split(num_chunks, dim=1)[-1:]:",
                "models/test_language_model.py cache/test_memory.py",
            ),
        },
        ("hf_speculate/options/spans/spans.py", "verify options/spans/test_spans.py"): {
            "the opening token is verified inside": Fault(
                "torch.where(marks != 0, columns, 0)",
                "torch.where(marks != 0, columns - 1, 0).clamp_min(0)",
            ),
            "inside and outside are swapped": Fault(
                "is_lossy = inside.flatten()", "is_lossy = ~inside.flatten()"
            ),
            "rows are not compacted": Fault('("_num_read", "_is_open")', '("_num_read",)'),
        },
        ("hf_speculate/schedule/adaptive.py", "schedule"): {
            "the account is not asked": Fault(
                "return self.memory.account - max_s / step_s >= -MAX_LOSS", "return True"
            ),
            "the account may lose more": Fault("MAX_LOSS = 24.0", "MAX_LOSS = 60.0"),
            "a trial is never made": Fault(
                "return (best, gain, True) if gain >", "return (0, 1.0, False) if gain >"
            ),
            "trials wait for the same time": Fault(
                "else min(2 * memory.wait, TUNING.max_wait)", "else memory.wait"
            ),
            "what is read does not count": Fault(
                "RoundCosts(step_s, rounds_s, read_s)", "RoundCosts(step_s, rounds_s, 0.0)"
            ),
            "the fastest row counts": Fault("- max(before - emitted", "- min(before - emitted"),
        },
        ("hf_speculate/schedule/free.py", "schedule"): {
            "tokens of all rows are worth the same": Fault(
                "math.exp((num_rounds - last) / max(last, 1.0) ** 0.5)",
                "math.exp(0.0 * num_rounds)",
            ),
            "a longer verification costs nothing": Fault(
                "- (verifications_s[width] - verifications_s[0])", ""
            ),
        },
        ("hf_speculate/schedule/constant.py", "schedule"): {
            "a rejected draft grows it": Fault(
                "accepted >= row.num_drafted for", "accepted >= row.num_drafted - 1 for"
            ),
        },
        ("hf_speculate/schedule/acceptance.py", "schedule"): {
            "a token never reached is a rejection": Fault(
                "min(row.num_accepted + 1, row", "min(99, row"
            ),
        },
        ("hf_speculate/schedule/costs.py", "schedule"): {
            "a pause counts in full": Fault("max_factor: float = 2.0", "max_factor: float = 1e9"),
            "plain steps are never measured again": Fault("stale: int = 150", "stale: int = 10**9"),
            "sizes between two take as long as the smallest": Fault(
                "(num_rows - low) / (high - low)", "0.0 * (num_rows - low)"
            ),
        },
        ("hf_speculate/engine/observers.py", "test_stats.py generation/test_headline.py"): {
            "the row that is furthest ahead counts": Fault(
                "max(min(live) if live", "max(max(live) if live"
            ),
            "rows that have ended are in no step": Fault(
                "len(live) + sum(", "len(live) + 0 * sum("
            ),
        },
        ("hf_speculate/stats.py", "test_stats.py generation/test_headline.py"): {
            "preparation costs nothing": Fault(
                "self.total_s - self.preparation_s - self.vocabulary_s",
                "self.total_s - self.vocabulary_s",
            ),
            "all steps take as long as those of one row": Fault(
                "np.interp(num_rows, measured", "np.interp(1, measured"
            ),
        },
        ("hf_speculate/engine/observers.py", "test_stats.py"): {
            "a slow first plain step counts in full": Fault(
                "if len(steps_s) == 1:", "if not steps_s:"
            ),
            "every call with a constant draft length begins plainly": Fault(
                "return call.batch_size not in "
                "PlainSteps.of(plan.target.model).get(call_type_of(plan))",
                "return True",
            ),
            "a plain step changes a sampled text": Fault(
                "if depends_on_draft(plan.config) or not", "if not"
            ),
        },
        ("hf_speculate/engine/stage_clock.py", "generation/test_headline.py"): {
            "the time to the first token begins with the prefill": Fault(
                "return self._since - self._created", "return self._since - self._began"
            ),
        },
        ("hf_speculate/options/sources/early_exit.py", "engine/test_schedule_memory.py"): {
            "early exits share a history": Fault(
                "early exit after {self.num_layers} layers", "early exit"
            ),
            "an early exit is a new model in every call": Fault(
                "HistoryKey(None, (", "HistoryKey(self.model, ("
            ),
        },
        ("hf_speculate/engine/step_weights.py", "engine/test_schedule_memory.py"): {
            "a table of embeddings is read in every step": Fault(
                "set(map(id, table.parameters())) - shared", "shared - shared"
            ),
        },
    }
)
