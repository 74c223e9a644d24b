"""Constrain answers by an xgrammar grammar, for JSON that fits a schema or for tool calls."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import compress, count
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError, MissingExtraError, import_extra
from hf_speculate.processors.registry import register_row_wise
from hf_speculate.tools.server.errors import LOGGER, RequestError
from hf_speculate.tools.server.grammar_worker import compile_grammar

_CACHE_BYTES = 2**28  # size limit of compiled grammars, in bytes
_MAX_CACHED = 1024  # maximum number of grammars and errors
_START_S = 120.0  # seconds for the worker's imports, even on a busy machine
_GRACE_S = 5.0  # seconds for a worker to terminate slow compilations by itself
# Time and C++ file before xgrammar's own message.
_PLACE_IN_SOURCE = re.compile(r"^(\[[\d:]+\] )?\S+\.(cc|cpp|h):\d+: ")


@dataclass(frozen=True)
class GrammarLimits:
    """Limits on compiling one grammar; a request that needs more gets status 400."""

    seconds: float = 10.0  # > 0
    schema_bytes: int = 1_000_000  # length of the schema as JSON, or of all tools' schemas
    memory_bytes: int = 1_000_000_000  # memory that the worker may allocate, on Linux


class GrammarSource(NamedTuple):
    """The source of a grammar, from a field of a request."""

    text: str  # JSON schema, or functions in JSON; see `compile_grammar`
    # format of tool calls: `begin`, `space`, `end`, `is_required`, `is_single`; None for JSON
    calls: dict[str, Any] | None = None
    is_optional: bool = False  # whether the request can be answered without a grammar
    is_strict: bool = False  # whether an invalid schema is an error even then

    @classmethod
    def of_schema(cls, schema: dict[str, Any] | None) -> "GrammarSource":
        """Make the source for JSON that fits a schema; None for any JSON."""
        return cls("" if schema is None else json.dumps(schema))

    def error(self, needed: str) -> RequestError:
        """Return the error for a source that cannot be compiled."""
        if self.calls is not None:
            return RequestError(f"tools must have parameters {needed}", "tools")
        return RequestError(f"response_format must have a schema {needed}", "response_format")


class GrammarCompiler:
    """Compiles the grammars of requests for a tokenizer, equal sources only once.

    A worker process compiles a grammar first, within limits. If it succeeds, the grammar is
    compiled again here, since passing on a compiled grammar takes far longer than compiling it.
    xgrammar releases the GIL meanwhile.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        limits: GrammarLimits | None = None,
    ):
        self.limits = limits or GrammarLimits()
        # One schema at a time, in a separate thread, so that the event loop's threads never wait.
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()  # guards the following fields
        self._compiler: Any = None
        self._info_json = ""  # the tokenizer as JSON, for the worker
        self._worker: _Worker | None = None
        self._is_closed = False
        # grammars and errors by digest, newest last
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()
        self._num_bytes = 0  # total size of these grammars

    def compile(self, source: GrammarSource) -> Any:
        """Return the compiled grammar; raise `RequestError` if there is none.

        If the source is optional, return None instead, unless its schema is invalid and strict.
        """
        try:
            return self._compiled_or_error(source)
        except Exception as error:
            is_schema = isinstance(error, RequestError) and error.status < 500
            if not source.is_optional or (is_schema and source.is_strict):
                raise
            if not is_schema:  # such as a tokenizer that xgrammar does not support
                LOGGER.warning("tool calls have no grammar: %s", error)
            return None

    def _compiled_or_error(self, source: GrammarSource) -> Any:
        try:
            xgrammar = import_extra("xgrammar", "grammar")
        except MissingExtraError as error:
            param, neutral = (
                ("response_format", "text") if source.calls is None else ("tool_choice", "auto")
            )
            raise RequestError(f"{param} must be {neutral}: {error}", param) from error
        if len(source.text) > self.limits.schema_bytes:
            raise source.error(
                f"of at most {self.limits.schema_bytes} bytes, got {len(source.text)}; send a "
                "smaller schema"
            )
        digest = hashlib.sha256(json.dumps(source[:2]).encode()).digest()
        with self._lock:
            compiled = self._compiled.pop(digest, None)
            if compiled is None:
                compiled = self._compile(xgrammar, source)
                self._num_bytes += _size_of(compiled)
            self._compiled[digest] = compiled
            while len(self._compiled) > 1 and (
                self._num_bytes > _CACHE_BYTES or len(self._compiled) > _MAX_CACHED
            ):
                _, oldest = self._compiled.popitem(last=False)
                self._num_bytes -= _size_of(oldest)
        if isinstance(compiled, str):
            raise source.error(compiled)
        return compiled

    def close(self) -> None:
        """Terminate the worker, even while it compiles."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.end()
        self.thread.shutdown(cancel_futures=True)

    def _compile(self, xgrammar: Any, source: GrammarSource) -> Any:
        """Return the grammar or the text of its error; raise `RequestError` past a limit."""
        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            self._info_json = info.serialize_json()
        if self._worker is None or not self._worker.is_running:
            self._worker = _Worker(self._info_json, self.limits)
        try:
            error = self._worker.error_of(source)
        finally:
            if not (self._worker.is_running or self._is_closed):
                # It runs its imports until the next schema comes.
                self._worker = _Worker(self._info_json, self.limits)
        if error is None:
            needed = (
                f"that xgrammar compiles in {self.limits.seconds:g} s and "
                f"{self.limits.memory_bytes} bytes of memory, got one that takes more; send a "
                "smaller schema"
            )
            if not source.is_optional:
                raise source.error(needed)
            return needed  # kept, so that later requests need not wait for it again
        if error:
            reason = error.strip().splitlines()[-1]
            return f"that xgrammar compiles, got {_PLACE_IN_SOURCE.sub('', reason)[:200]}"
        try:
            return compile_grammar(xgrammar, self._compiler, *source[:2])
        except (RuntimeError, ValueError, TypeError) as failure:
            return f"that xgrammar compiles, got {str(failure).strip()[-200:]}"


def _size_of(compiled: Any) -> int:
    """Return the size of a compiled grammar or an error in bytes."""
    return len(compiled) if isinstance(compiled, str) else int(compiled.memory_size_bytes)


class _Worker:
    """A process that compiles grammars, see `grammar_worker.py`."""

    def __init__(self, info_json: str, limits: GrammarLimits):
        self._info_json, self._limits, self._is_ready = info_json, limits, False
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("grammar_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # only the server handles Ctrl-C
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def error_of(self, source: GrammarSource) -> str | None:
        """Return why a source cannot be compiled; empty if it can, None if it exceeds a limit."""
        if not self._is_ready:
            settings = {"tokenizer": self._info_json, **asdict(self._limits)}
            if self._ask(settings, _START_S) is None:
                raise RequestError(
                    "the process that compiles schemas must start, got an end of it", status=500
                )
            self._is_ready = True
        answer: str | None = self._ask(source[:2], self._limits.seconds + _GRACE_S)
        return answer

    def end(self) -> None:
        """Terminate the process and the child that compiles."""
        if self.is_running and hasattr(os, "killpg"):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message.

        None if there is no answer after `seconds`, or if the worker has ended.
        """
        process: Any = self._process
        clock = threading.Timer(seconds, process.kill)
        clock.start()
        try:
            print(json.dumps(message), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except (OSError, ValueError):  # its pipes are closed
            answer = ""
        finally:
            clock.cancel()
        if answer:
            return json.loads(answer)
        self.end()
        return None


@register_row_wise
class GrammarProcessor(LogitsProcessor):
    """Logits processor for the grammar of one text.

    It allows the tokens that the grammar allows after the answer so far. Draft and target may take
    turns, since the result depends only on the ids. The matcher follows the ids: it is rolled back
    to their common prefix with the previous call, such as the accepted tokens of a block. After a
    forbidden token, as in a rejected draft, all tokens are allowed, since such positions do not
    count. If the grammar allows no token, only end-of-text tokens are allowed, and `error_of`
    reports a text that ended there.
    """

    def __init__(self, grammar: Any, prompt_len: int, end_ids: Sequence[int]):
        self._xgrammar = import_extra("xgrammar", "grammar")
        self._matcher = self._xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(end_ids))
        self._num_known = grammar.tokenizer_info.vocab_size
        self._prompt_len, self._end_ids = prompt_len, list(end_ids)
        self._followed: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask the forbidden tokens.

        Args:
            input_ids: [N, n] int64, the prompt and the answer so far.
            scores: [N, V].

        Returns:
            [N, V] float32.
        """
        # all tokens are allowed
        bitmask = self._xgrammar.allocate_token_bitmask(len(input_ids), self._num_known)
        for row, answer_ids in enumerate(input_ids[:, self._prompt_len :].tolist()):
            ids = self._constrained(answer_ids)
            if ids is not None and self._follow(ids) and not self._matcher.is_terminated():
                self._fill(bitmask, row)
        num_masked = min(self._num_known, scores.shape[1])  # a draft model may have fewer tokens
        scores = scores.to(torch.float32, copy=True)
        self._xgrammar.apply_token_bitmask_inplace(
            scores, bitmask.to(scores.device), vocab_size=num_masked
        )
        return scores

    def forced_text(self, row: int, input_ids: Tensor) -> str:
        """Return the text that must follow `input_ids` [n] int64; "" if there is a choice."""
        ids = self._constrained(input_ids[self._prompt_len :].tolist())
        if ids is None or not self._follow(ids) or self._matcher.is_terminated():
            return ""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError as error:  # several characters share the first bytes
            return bytes(error.object[: error.start]).decode()

    def error_of(
        self, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
    ) -> ConfigError | None:
        """Return the error of a finished answer; None if it has none.

        An answer has an error if it ended where its grammar allows no token, or if it is not JSON.
        """
        # not cut off by the length limit or a stop string
        is_ended = bool(token_ids) and token_ids[-1] in self._end_ids
        ids = list(token_ids[:-1] if is_ended else token_ids)
        text = str(
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
        constrained = self._constrained(ids)
        is_right = constrained is None or self._follow(constrained)
        if is_right and is_ended and constrained is not None:
            bitmask = self._xgrammar.allocate_token_bitmask(1, self._num_known)
            is_allowed = self._matcher.is_terminated() or self._fill(bitmask, 0)
            is_right = is_allowed and self._is_whole(text)
        return None if is_right else self._error(text)

    def _constrained(self, ids: list[int]) -> list[int] | None:
        """Return the tokens of an answer that the grammar constrains; None before it begins."""
        return ids

    def _is_whole(self, text: str) -> bool:
        """Return whether a text that ended without an error so far is valid."""
        return _is_json(text)

    def _error(self, text: str) -> ConfigError:
        return ConfigError(
            "response_format must have a schema whose grammar leads to JSON, got one that ends "
            f"after {text[-40:]!r}; "
            "look for a part that no value fits"
        )

    def _fill(self, bitmask: Tensor, row: int) -> bool:
        """Allow the grammar's next tokens in a row of the bitmask [N, V / 32].

        Returns:
            False if only the end of the text is allowed.
        """
        self._matcher.fill_next_token_bitmask(bitmask, row)
        if bitmask[row].any():
            return True
        words = bitmask[row].tolist()
        for token_id in self._end_ids:
            if token_id < self._num_known:
                words[token_id // 32] |= 1 << token_id % 32
        bitmask[row] = torch.tensor([_signed(word) for word in words], dtype=torch.int32)
        return False

    def _follow(self, ids: list[int]) -> bool:
        """Advance the matcher to the end of `ids`; return False if it forbids one of them."""
        num_common = min(len(ids), len(self._followed))
        if ids[:num_common] != self._followed[:num_common]:
            num_common = next(compress(count(), map(ne, ids, self._followed)))
        if num_common < len(self._followed):
            self._matcher.rollback(len(self._followed) - num_common)
            del self._followed[num_common:]
        for token_id in ids[num_common:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                return False
            self._followed.append(token_id)
        return True


def _signed(word: int) -> int:
    """Convert 32 bits to a signed int32."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except RecursionError:  # nested too deeply for this parser, but not invalid
        return True
    except ValueError:
        return False
    return True
