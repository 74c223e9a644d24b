"""Decode JSON that follows a schema with an xgrammar grammar, in lock step and with rollback.

    pip install ".[grammar]"
    python examples/grammar.py

`GrammarProcessor` is an adapter that keeps one `GrammarMatcher` per row and has the methods of
`hf_speculate.RollbackProcessor`. Drafts therefore obey the grammar, each row advances by its own
number of tokens, and rejected tokens are rolled back. `forced_text` returns the text that the
grammar forces. With `tokenizer=`, this text is drafted first.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

import hf_speculate

try:
    import xgrammar
    from xgrammar.contrib.hf import LogitsProcessor as LockStepProcessor
except ImportError as error:
    raise SystemExit(f'{error.name} is not installed; run: pip install ".[grammar]"') from error

EXAMPLES = Path(__file__).resolve().parent
PROMPTS = ("# the size of the stack\nconfig = ", "import json\n\nDATA = json.loads('", "result = ")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "maximum": 9999, "minimum": 0},
        "is_open": {"type": "boolean"},
    },
    "required": ["name", "size", "is_open"],
}


class GrammarProcessor(LogitsProcessor):
    """Processor that allows only tokens of a grammar.

    Create a new processor for each call of `generate()`.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar):
        self.grammar = grammar
        self.matchers: list[Any] = []  # [B]
        self.num_lost: list[int] = []  # [B] last calls without an accepted token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.matchers:
            self.matchers = [xgrammar.GrammarMatcher(self.grammar) for _ in input_ids]
            self.num_lost = [0] * len(input_ids)
        else:
            for row, token_id in enumerate(input_ids[:, -1].tolist()):
                if not self._takes(row, token_id):
                    self.num_lost[row] += 1
        num_known = self.grammar.tokenizer_info.vocab_size
        # all tokens are allowed at first
        bitmask = xgrammar.allocate_token_bitmask(len(self.matchers), num_known)
        for row, matcher in enumerate(self.matchers):
            if not self.num_lost[row] and not matcher.is_terminated():
                matcher.fill_next_token_bitmask(bitmask, row)
        num_masked = min(num_known, scores.shape[1])  # a draft model may have a smaller vocabulary
        xgrammar.apply_token_bitmask_inplace(
            scores, bitmask.to(scores.device), vocab_size=num_masked
        )
        return scores

    def rollback(self, num_calls: Sequence[int]) -> None:
        for row, num_undone in enumerate(num_calls):
            num_lost = min(num_undone, self.num_lost[row])
            self.num_lost[row] -= num_lost
            if num_undone > num_lost:
                self.matchers[row].rollback(num_undone - num_lost)

    def rows(self, indices: Sequence[int]) -> None:
        self.matchers = [self.matchers[row] for row in indices]
        self.num_lost = [self.num_lost[row] for row in indices]

    def fork(self) -> "GrammarProcessor":
        copy = GrammarProcessor(self.grammar)
        copy.matchers = [matcher.fork() for matcher in self.matchers]
        copy.num_lost = list(self.num_lost)
        return copy

    def forced_text(self, row: int, input_ids: Tensor) -> str:
        """Return the forced text after `input_ids` [n]; the matcher has not seen the last token."""
        matcher, text = self.matchers[row], ""
        if self._takes(row, int(input_ids[-1])):
            if not matcher.is_terminated():
                try:
                    text = matcher.find_jump_forward_string()
                # The allowed characters may begin with the same bytes.
                except UnicodeDecodeError as error:
                    text = error.object[: error.start].decode()
            matcher.rollback(1)
        return text

    def _takes(self, row: int, token_id: int) -> bool:
        """Advance the matcher and return whether it accepts a token.

        After it has rejected a token, it accepts no further tokens until a rollback.
        """
        matcher = self.matchers[row]
        return (
            not self.num_lost[row]
            and not matcher.is_terminated()
            and matcher.accept_token(token_id)
        )


def compile_json(
    tokenizer: Any, vocab_size: int, schema: dict[str, Any] | None = None
) -> xgrammar.CompiledGrammar:
    """Compile the grammar for a JSON schema, or for any JSON.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of logits of the model.
        schema: the JSON schema.
            None to allow any JSON.
    """
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    if schema is None:
        return compiler.compile_builtin_json_grammar()
    return compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--num-assistant-tokens", type=int, default=5)
    parser.add_argument("--pair", type=Path, default=EXAMPLES / "pair")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.pair / "target", padding_side="left")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(args.pair / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    grammar = compile_json(tokenizer, target.config.vocab_size, SCHEMA)
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    for name, processor in (
        ("lock step", LockStepProcessor(grammar)),
        ("rollback", GrammarProcessor(grammar)),
    ):
        stats = hf_speculate.SpeculationStats()
        ids = hf_speculate.generate(
            target,
            **inputs,
            assistant_model=draft,
            logits_processor=[processor],
            tokenizer=tokenizer,
            max_new_tokens=args.max_new_tokens,
            num_assistant_tokens=args.num_assistant_tokens,
            speculation_stats=stats,
        )
        length, rate = stats.mean_acceptance_length, stats.acceptance_rate
        print(f"{name:10} mean acceptance length {length:.2f}, acceptance rate {rate:.3f}")
    for text in tokenizer.batch_decode(
        ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    ):
        print(repr(text))


if __name__ == "__main__":
    main()
