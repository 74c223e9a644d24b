"""Worker process that compiles JSON schemas, so that slow compilations can be terminated.

The server runs this file by its path, and the file imports nothing from this package. Input and
output have one JSON value per line: first the tokenizer and the limits, then schemas. An empty
schema stands for any JSON. If `fork` exists, each schema is compiled in a child process that starts
after the imports. Without `fork`, the server terminates this process at the time limit.
"""

import json
import os
import re
import select
import signal
import sys
import time
from typing import IO, Any

# xgrammar's rule for an unsatisfiable schema, which matches no character
_EMPTY_RULE = re.compile(r'::= \(+""\)')


def main(lines: IO[str], answers: IO[str]) -> None:
    """Answer each schema with its error, an empty string if it has none, or null past a limit."""
    import xgrammar

    settings = json.loads(lines.readline())
    info = xgrammar.TokenizerInfo.deserialize_json(settings["tokenizer"])

    def compile_schema(schema: str) -> str:
        try:
            return _error_of(xgrammar, info, schema)
        # xgrammar raises many types; the server passes the message on to the client
        except Exception as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                raise MemoryError from error  # ends the process without an answer
            return str(error) or type(error).__name__

    print("true", file=answers, flush=True)
    for line in lines:
        schema = json.loads(line)
        if hasattr(os, "fork"):
            answer = _in_fork(compile_schema, schema, settings["seconds"], settings["memory_bytes"])
        else:
            answer = json.dumps(compile_schema(schema))
        print(answer or "null", file=answers, flush=True)


def _error_of(xgrammar: Any, info: Any, schema: str) -> str:
    """Compile a schema; return the reason if no answer can satisfy it."""
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if schema:
        grammar = compiler.compile_json_schema(schema, any_whitespace=False)
    else:
        grammar = compiler.compile_builtin_json_grammar()
    matcher = xgrammar.GrammarMatcher(grammar)
    bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    matcher.fill_next_token_bitmask(bitmask)
    words = bitmask[0].tolist()
    for token_id in matcher.stop_token_ids:
        words[token_id // 32] &= ~(1 << token_id % 32)
    if not any(words):
        return "one that no value fits"
    if any(map(_EMPTY_RULE.search, str(grammar.grammar).splitlines())):
        return "one with a part that no value fits"
    return ""


def _in_fork(compile_schema: Any, schema: str, seconds: float, memory_bytes: int) -> str:
    """Compile a schema in a child process within the limits.

    Returns:
        The child's answer as JSON; empty if it ended without an answer or was killed at the time
        limit.
    """
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            _limit(seconds, memory_bytes)
            os.write(writer, json.dumps(compile_schema(schema)[-4000:]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    answer, end = b"", time.monotonic() + seconds
    try:
        while select.select([reader], [], [], max(end - time.monotonic(), 0))[0] and (
            chunk := os.read(reader, 65_536)
        ):
            answer += chunk
    finally:
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
        os.close(reader)
    return answer.decode()


def _limit(seconds: float, memory_bytes: int) -> None:
    """Limit the memory and CPU time of this process.

    The time limit terminates the process even if its parent is killed. The memory limit applies to
    further allocations, on Linux only.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 5, int(seconds) + 5))
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            used = next(
                int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:")
            )
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory_bytes, used + memory_bytes))
    except (OSError, StopIteration, ValueError):
        return


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output printed by libraries must not mix with answers
    main(sys.stdin, output)
