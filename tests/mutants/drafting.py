"""Mutants of drafters, schedules and spans."""

from tests.mutants.base import Fault, mutants_of

MUTANTS = mutants_of(
    {
        ("hf_speculate/draft/suffix_index.py", "draft/test_suffix.py options/sources/test_suffix_store.py"): {
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
        ("hf_speculate/draft/suffix.py", "draft/test_suffix.py options/sources/test_suffix_store.py"): {
            "drafts go on after EOS": Fault("token_ids[: ends[0] + 1]", "token_ids[: ends[0] + 9]"),
            "padding is part of the text": Fault("row.extend(ids[num:])", "row.extend(ids)"),
            "a row that drafts nothing learns nothing": Fault("if agrees:", "if len(agrees) > 1:"),
            "every match is drafted to its end": Fault("_LEAST_PROBABILITY = 0.15", "_LEAST_PROBABILITY = 0.0"),
            "finished rows draft": Fault(".token_ids if new else [] for row", ".token_ids for row"),
            "rows are not compacted": Fault('("texts", "_num_pads")', '("_num_pads",)'),
        },
        ("hf_speculate/options/sources/hybrid.py", "options/sources/test_hybrid.py"): {
            "the model's cache counts matched tokens": Fault(
                "[not match for match in uses_match]", "[True for match in uses_match]"
            ),
            "the model is not told of matched tokens": Fault("self.unread += ids", "self.unread = list(ids)"),
            "the rates of matches and model are swapped": Fault(
                "expected(buckets) >= self.model_rates", "expected(buckets) < self.model_rates"
            ),
            "a matched token has the model's probabilities": Fault(
                "torch.where(uses_match[:, None, None], logits[:, :num_drafted], model_logits)", "model_logits"
            ),
            "a matched token has no probability": Fault(
                "[..., None], 0.0)\n    logits[:, :num_drafted]", "[..., None], -1.0)\n    logits[:, :num_drafted]"
            ),
        },
        ("hf_speculate/options/pictures/draft_inputs.py", "options/pictures/test_draft_inputs.py"): {
            "the draft model is written to": Fault("name: copy.copy(base)}", "name: base}"),
            "any number of states is taken": Fault("if num_states != num_tokens:", "if False:"),
            "other ids of pictures are taken": Fault("and ours != theirs and", "and ours is theirs is None and"),
            "prompts of one row are all rows'": Fault(
                "[::num_copies], call.prompts.text_mask", "[:1], call.prompts.text_mask"
            ),
        },
        ("hf_speculate/options/heads/row_axes.py", "options/heads/test_axes.py"): {
            "later tokens count all tokens of pictures": Fault(
                "numbers[:, None] + self.offsets[:, :, None]", "numbers[:, None] + 0 * self.offsets[:, :, None]"
            ),
        },
        ("hf_speculate/options/heads/media.py", "options/heads/test_merged.py"): {
            "a pair has the embedding of the token before": Fault(
                "torch.cat([inputs[:, 1:], inputs[:, -1:]], dim=1)", "inputs"
            ),
        },
        ("hf_speculate/options/heads/network.py", "options/heads/test_targets.py"): {
            "ids that a table lacks are looked up": Fault("token_ids.clamp_max(num_rows - 1)", "token_ids"),
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
            "candidates are scored without the token before": Fault(" + selector(known, features[:, step], ids)", ""),
        },
        ("hf_speculate/options/heads/target_ids.py", "options/heads/test_kinds.py"): {
            "ids are read as offsets": Fault("return readings[-1]", "return readings[0]"),
        },
        ("hf_speculate/options/heads/weight_files.py", "options/heads/test_damaged.py"): {
            "a shard may lack weights": Fault("if lacking:", "if False:"),
        },
        ("hf_speculate/draft/token_choice.py", "draft/test_model.py processors"): {
            "processors see no drafted token": Fault(
                "history.append(token_ids[:, None])", "history.append(token_ids[:, None], [0] * len(token_ids))"
            ),
            "sure tokens end a draft": Fault(
                "log_probs.exp() < settings", "log_probs.exp() > settings", "draft/test_model.py"
            ),
        },
        ("hf_speculate/models/chosen_tokens.py", "draft/test_model.py"): {
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
        },
        ("hf_speculate/models/inferencer.py", "draft/test_model.py"): {
            "only the last chunk is read": Fault(
                "in query_token_ids.tensor_split(num_chunks, dim=1):",
                "in query_token_ids.tensor_split(num_chunks, dim=1)[-1:]:",
                "models/test_language_model.py cache/test_memory.py",
            ),
        },
        ("hf_speculate/options/spans/spans.py", "verify options/spans/test_spans.py"): {
            "the opening token is verified inside": Fault(
                "torch.where(marks != 0, columns, 0)", "torch.where(marks != 0, columns - 1, 0).clamp_min(0)"
            ),
            "inside and outside are swapped": Fault("is_lossy = inside.flatten()", "is_lossy = ~inside.flatten()"),
            "rows are not compacted": Fault('("_num_read", "_is_open")', '("_num_read",)'),
        },
        ("hf_speculate/schedule/adaptive.py", "schedule"): {
            "a busy machine ends drafting after a call that gained": Fault(
                "_CREDIT_STEPS = 0.5", "_CREDIT_STEPS = 0.0"
            ),
        },
        ("hf_speculate/schedule/heuristic.py", "schedule"): {
            "a rejected draft grows it": Fault("accepted >= drafted for", "accepted >= drafted - 1 for"),
        },
        ("hf_speculate/schedule/acceptance.py", "schedule"): {
            "a row never reached is a rejection": Fault(
                "num_verified = min(accepted + 1, num_positions)", "num_verified = num_positions"
            ),
        },
        ("hf_speculate/schedule/cost_line.py", "schedule"): {
            "a pause decides about a new size": Fault("else self.estimate(rows, (size,))[0]", "else 1e9"),
            "a size off the line is not believed": Fault("* total / max(squares", "* 1e9 / max(squares"),
        },
        ("hf_speculate/schedule/costs.py", "schedule"): {
            "a draft takes as long for every K": Fault("add(num_rows, num, outcome", "add(num_rows, 1, outcome"),
            "a slow first round of a size is never tried again": Fault("_TRUSTED = 16", "_TRUSTED = 10**9"),
            "a first verification counts whatever it takes": Fault("_MOST_FIRST = 3.0", "_MOST_FIRST = 1e9"),
            "a plain step counts as longer than a verification": Fault("num_rows), shortest_s)", "num_rows), 1e9)"),
        },
        ("hf_speculate/schedule/machine_speed.py", "schedule"): {
            "a machine that becomes faster is not noticed": Fault("1 / _CHANGE < factor", "0 < factor"),
        },
        ("hf_speculate/schedule/read_costs.py", "schedule"): {
            "a first read counts whatever it takes": Fault("if len(by_token) > 1 else", "if by_token else"),
        },
        ("hf_speculate/schedule/plain_steps.py", "schedule"): {
            "a pause counts as a plain step": Fault("_PAUSE = 1.3", "_PAUSE = 1e9"),
            "a single step counts in full": Fault("else _ALONE * mean", "else mean"),
            "plain steps are never measured again": Fault("_STALE = 200", "_STALE = 10**9"),
            "sizes between two take as long as the smallest": Fault(
                "np.interp(size, sizes", "np.interp(sizes[0], sizes"
            ),
            "steps of another speed count for long": Fault("_NUM_CHANGED = 3", "_NUM_CHANGED = 12"),
        },
        ("hf_speculate/schedule/progress.py", "schedule"): {
            "the row that is furthest ahead counts": Fault("max(min(live) if live", "max(max(live) if live"),
            "rows that have ended are in no step": Fault("len(live) + sum(", "len(live) + 0 * sum("),
            "rows that leave stay in plain steps": Fault("if self._keeps_rows:", "if num_rows:"),
        },
        ("hf_speculate/schedule/budget.py", "schedule"): {
            "the budget pays for everything": Fault(
                "return max((self.loss_s + extra_s", "return min(0.0, (self.loss_s + extra_s"
            ),
            "what rounds lost is forgotten": Fault(
                "        self._drafted_s += seconds\n", "        self._drafted_s += 0.0\n"
            ),
            "first rounds of a size cost nothing": Fault(
                "sum(map(self._counted_s, [*", "0.0 * sum(map(self._counted_s, [*"
            ),
            "what was replaced counts as it would now": Fault(
                "known_s = self._p(num_rows) if plain.is_known(num_rows) else math.inf", "known_s = math.inf"
            ),
            "a tenth may be lost": Fault("SHARE = 0.02", "SHARE = 0.1"),
            "rows ahead count though they stay": Fault(
                "if not self._keeps_rows and self._most_rows", "if self._most_rows"
            ),
        },
        ("hf_speculate/schedule/options.py", "schedule"): {
            "what is read does not count": Fault("[num_draft_tokens] + self.read_s -", "[num_draft_tokens] -"),
            "shorter drafts are not tried": Fault("return self._fastest(shorter) if shorter else 0", "return 0"),
        },
        ("hf_speculate/schedule/call_state.py", "schedule"): {
            "drafts grow without bound": Fault(
                "max(self.num_last + _GROWTH, FIRST", "max(self.max_draft_tokens, FIRST"
            ),
        },
        ("hf_speculate/schedule/prior.py", "schedule"): {
            "expensive drafts are as long as others": Fault("_EXPENSIVE = 0.3", "_EXPENSIVE = 3.0"),
        },
        ("hf_speculate/schedule/states.py", "schedule"): {
            "it never tries": Fault("            return self._try(options)\n", "            pass\n"),
            "it tries as often as it can": Fault("min(2 * self.num_steps, _LONGEST_WAIT)", "self.num_steps"),
        },
        ("hf_speculate/schedule/history.py", "schedule"): {
            "no call rests": Fault("return self.num_vain > 0 and", "return False and"),
            "what was left is granted twice": Fault(
                "self.account_s + budget.left_s, 0.0)", "self.account_s, budget.left_s, 9.0)"
            ),
        },
        ("hf_speculate/schedule/work.py", "schedule"): {
            "the fastest row counts": Fault("(max(of_k), sum", "(min(of_k), sum"),
        },
        ("hf_speculate/stats.py", "test_stats.py generation/test_headline.py"): {
            "preparation costs nothing": Fault(
                "self.total_s - self.preparation_s - self.vocabulary_s", "self.total_s - self.vocabulary_s"
            ),
            "all steps take as long as those of one row": Fault(
                "np.interp(num_rows, measured", "np.interp(1, measured"
            ),
        },
        ("hf_speculate/engine/observers.py", "test_stats.py"): {
            "a slow first plain step counts in full": Fault("if len(steps_s) == 1:", "if not steps_s:"),
            "every call with a constant draft length begins plainly": Fault(
                "return call.batch_size not in PlainSteps.of(plan.target.model).get(call_type_of(plan))", "return True"
            ),
            "a plain step changes a sampled text": Fault("if depends_on_draft(call.config) or not", "if not"),
        },
        ("hf_speculate/engine/stage_clock.py", "generation/test_headline.py"): {
            "the time to the first token begins with the prefill": Fault(
                "return self._since - self._created", "return self._since - self._began"
            ),
        },
        ("hf_speculate/options/sources/early_exit.py", "engine/test_call_schedule.py"): {
            "early exits share a history": Fault("early exit after {self.num_layers} layers", "early exit"),
            "an early exit is a new model in every call": Fault("HistoryKey(None, (", "HistoryKey(self.model, ("),
        },
        ("hf_speculate/engine/step_weights.py", "engine/test_call_schedule.py"): {
            "a table of embeddings is read in every step": Fault(
                "set(map(id, table.parameters())) - shared", "shared - shared"
            ),
        },
    }
)
