"""Keeps answers to JSON of a schema, by a grammar of xgrammar."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from hf_speculate.errors import MissingExtraError, import_extra
from hf_speculate.processors.registry import register_row_wise
from hf_speculate.tools.server.errors import RequestError

_CACHE_BYTES = 2**28  # bytes of compiled grammars


class GrammarCompiler:
    """Compiles the grammars of requests for a tokenizer; equal schemas are compiled once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiler: Any = None

    def compile(self, schema: dict[str, Any] | None) -> Any:
        """The grammar of a JSON schema, or of all JSON; `RequestError` if there is none."""
        try:
            xgrammar = import_extra("xgrammar", "grammar")
        except MissingExtraError as error:
            raise RequestError(f"response_format must be text: {error}", "response_format") from error
        try:
            if self._compiler is None:
                info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size)
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
            if schema is None:
                return self._compiler.compile_builtin_json_grammar()
            return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise RequestError(
                f"response_format must have a schema that xgrammar compiles, got {reason[:200]}", "response_format"
            ) from error


@register_row_wise
class GrammarProcessor(LogitsProcessor):
    """Allows what a grammar allows after the answer so far; for one text, though draft and target may take turns.

    The result depends on the ids alone. The matcher follows them: it is rolled back to the tokens that the ids have in
    common with those of the call before, such as the accepted tokens of a block. After a token that the grammar
    forbids, as a rejected draft may have, all tokens are allowed; no such position counts.
    """

    def __init__(self, grammar: Any, prompt_len: int, end_ids: Sequence[int]):
        self._xgrammar = import_extra("xgrammar", "grammar")
        self._matcher = self._xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(end_ids))
        self._num_known = grammar.tokenizer_info.vocab_size
        self._prompt_len = prompt_len
        self._followed: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[N, V] float32; `input_ids` are [N, n] int64, the prompt and the answer so far."""
        bitmask = self._xgrammar.allocate_token_bitmask(len(input_ids), self._num_known)  # all are allowed
        for row, ids in enumerate(input_ids[:, self._prompt_len :].tolist()):
            if self._follow(ids) and not self._matcher.is_terminated():
                self._matcher.fill_next_token_bitmask(bitmask, row)
        num_masked = min(self._num_known, scores.shape[1])  # a draft model may have fewer
        scores = scores.to(torch.float32, copy=True)
        self._xgrammar.apply_token_bitmask_inplace(scores, bitmask.to(scores.device), vocab_size=num_masked)
        return scores

    def _follow(self, ids: list[int]) -> bool:
        """Bring the matcher to the end of some ids; False if it forbids one of them."""
        pairs = zip(ids, self._followed, strict=False)
        num_common = next((at for at, (new, old) in enumerate(pairs) if new != old), min(len(ids), len(self._followed)))
        if num_common < len(self._followed):
            self._matcher.rollback(len(self._followed) - num_common)
            del self._followed[num_common:]
        for token_id in ids[num_common:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                return False
            self._followed.append(token_id)
        return True
