"""Mutants of drafters, schedules and spans."""

from tests.mutants.base import Fault, mutants_of

MUTANTS = mutants_of(
    {
        ("hf_speculate/draft/suffix_index.py", "draft/test_suffix.py"): {
            "the match is one token late": Fault("length, found = matched, end", "length, found = matched, end + 1"),
            "the earliest match": Fault(
                "end = before[end - 1]\n", "end = before[end - 1] and before[before[end - 1] - 1]\n"
            ),
            "an occurrence at the end counts": Fault(
                "length < end < len(text) and text", "length < end <= len(text) and text"
            ),
        },
        ("hf_speculate/draft/suffix.py", "draft/test_suffix.py"): {
            "drafts go on after EOS": Fault("token_ids[: ends[0] + 1]", "token_ids[: ends[0] + 9]"),
            "padding is part of the text": Fault("row.extend(ids[num:])", "row.extend(ids)"),
            "finished rows draft": Fault(".token_ids if new else [] for row", ".token_ids for row"),
            "rows are not compacted": Fault("[self.texts[row] for row in indices]", "self.texts[: len(indices)]"),
        },
        ("hf_speculate/draft/hybrid.py", "draft/test_hybrid.py"): {
            "the model's cache counts matched tokens": Fault(
                "[not match for match in uses_match]", "[True for match in uses_match]"
            ),
            "the model is not told of matched tokens": Fault("self.unread += ids", "self.unread = list(ids)"),
            "the rates of matches and model are swapped": Fault(
                "expected(kinds) >= self.model_rates", "expected(kinds) < self.model_rates"
            ),
            "a matched token has the model's probabilities": Fault(
                "torch.where(uses_match[:, None, None], logits[:, :num_drafted], model_logits)", "model_logits"
            ),
            "a matched token has no probability": Fault(
                "[..., None], 0.0)\n    logits[:, :num_drafted]", "[..., None], -1.0)\n    logits[:, :num_drafted]"
            ),
        },
        ("hf_speculate/draft/heads/network.py", "draft/heads/test_targets.py"): {
            "ids that a table lacks are looked up": Fault("token_ids.clamp_max(num_rows - 1)", "token_ids"),
            "an adapter's rows keep the scale": Fault("rows = rows / self._scale", "pass"),
        },
        ("hf_speculate/draft/vocab_mapping.py", "draft/heads/test_targets.py"): {
            "ids that the target lacks are proposed": Fault(
                "ids = ids[ids < size]\n", "ids = ids.clamp_max(size - 1)\n"
            ),
            "columns of ids that the target lacks count": Fault(
                "return logits[..., : self.num_columns] if has_more else logits", "return logits"
            ),
        },
        ("hf_speculate/draft/heads/target_ids.py", "draft/heads/test_kinds.py"): {
            "ids are read as offsets": Fault("return readings[-1]", "return readings[0]"),
        },
        ("hf_speculate/draft/heads/weight_files.py", "draft/heads/test_damaged.py"): {
            "a shard may lack weights": Fault("if lacking:", "if False:"),
        },
        ("hf_speculate/draft/token_choice.py", "draft/test_model.py processors"): {
            "processors see no drafted token": Fault(
                "history.append(token_ids[:, None])", "history.append(token_ids[:, None], [0] * len(token_ids))"
            ),
            "sure tokens end a draft": Fault(
                "chosen.exp() < settings", "chosen.exp() > settings", "draft/test_model.py"
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
        ("hf_speculate/verify/spans.py", "verify generation/test_spans.py"): {
            "the opening token is verified inside": Fault(
                "torch.where(marks != 0, columns, 0)", "torch.where(marks != 0, columns - 1, 0).clamp_min(0)"
            ),
            "inside and outside are swapped": Fault("is_lossy = inside.flatten()", "is_lossy = ~inside.flatten()"),
            "rows are not compacted": Fault("self._is_open[list(indices)]", "self._is_open[: len(indices)]"),
        },
        ("hf_speculate/schedule/heuristic.py", "schedule"): {
            "a rejected draft grows it": Fault("accepted >= drafted for", "accepted >= drafted - 1 for"),
        },
        ("hf_speculate/schedule/acceptance.py", "schedule"): {
            "a row never reached is a rejection": Fault(
                "num_verified = min(accepted + 1, num_positions)", "num_verified = num_positions"
            ),
        },
        ("hf_speculate/schedule/costs.py", "schedule"): {
            "a pause decides about a new kind": Fault("else self.estimate(rows, (size,))[0]", "else 1e9"),
            "a draft takes as long for every K": Fault("add(num_rows, num, outcome", "add(num_rows, 1, outcome"),
            "a kind off the line is not believed": Fault("* total / max(squares", "* 1e9 / max(squares"),
        },
        ("hf_speculate/schedule/adaptive.py", "schedule"): {
            "plain steps are never measured": Fault("return self._num_rounds >= _PLAIN_AT\n", "return False\n"),
            "drafts grow without bound": Fault("max(self._last + _GROWTH, _FIRST", "max(self._max, _FIRST"),
            "it never probes": Fault("if self._num_plain_rounds <= min(self._wait, longest):", "if True:"),
            "the fastest row counts": Fault("(max(of_k), sum", "(min(of_k), sum"),
        },
    }
)
