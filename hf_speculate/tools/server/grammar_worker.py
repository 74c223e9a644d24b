"""Worker process that compiles grammars, so that slow compilations can be terminated.

The server runs this file by its path, and the file imports nothing from this package. Input and
output have one JSON value per line: first the tokenizer and the limits, then the arguments of
`compile_grammar`. If `fork` exists, each grammar is compiled in a child process that starts after
the imports. Without `fork`, the server terminates this process at the time limit.
"""

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import IO, Any

# xgrammar's rule for an unsatisfiable schema, which matches no character
_EMPTY_RULE = re.compile(r'::= \(+""\)')
# Parts of a printed rule that need no other rule: strings, classes and optional repetitions.
_FREE_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|(?<![\w.-])[\w.-]+\{0,[^}]*\}')
_RULE_NAME = re.compile(r"[\w.-]+")
# xgrammar prints \xe9 for a letter of Latin-1, and reads hex digits behind it as a part of it.
_ESCAPE = re.compile(r"(\\\\)|\\x([0-9a-fA-F]{2})")


def main(lines: IO[str], answers: IO[str]) -> None:
    """Answer each line with the error of its grammar.

    The answer is an empty string if there is no error, and null past a limit.
    """
    import xgrammar

    settings = json.loads(lines.readline())
    info = xgrammar.TokenizerInfo.deserialize_json(settings["tokenizer"])

    def compile_source(source: str, calls: dict[str, Any] | None) -> str:
        try:
            return _error_of(xgrammar, info, source, calls)
        # xgrammar raises many types; the server passes the message on to the client
        except Exception as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                raise MemoryError from error  # ends the process without an answer
            return str(error) or type(error).__name__

    print("true", file=answers, flush=True)
    for line in lines:
        error_of = partial(compile_source, *json.loads(line))
        if hasattr(os, "fork"):
            answer = _in_fork(error_of, settings["seconds"], settings["memory_bytes"])
        else:
            answer = json.dumps(error_of())
        print(answer or "null", file=answers, flush=True)


def compile_grammar(
    xgrammar: Any, compiler: Any, source: str, calls: dict[str, Any] | None = None
) -> Any:
    """Compile a grammar for JSON or for tool calls.

    Args:
        xgrammar: the module.
        compiler: the module's compiler for a tokenizer.
        source: a JSON schema, empty for any JSON. With `calls`, a list of functions in JSON, each
            with its name and the schema of its arguments.
        calls: the format of calls, as in `GrammarSource`. None for a grammar of JSON.
    """
    if calls is None:
        if not source:
            return compiler.compile_builtin_json_grammar()
        return compiler.compile_json_schema(source, any_whitespace=False)
    tags = []
    for name, schema in json.loads(source):
        # Schemas in structural tags allow any whitespace, and so would force less text.
        rules = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
        tags.append(
            {
                "type": "tag",
                "begin": f"{calls['begin']}{calls['space']}"
                f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
                "content": {"type": "grammar", "grammar": _printed(rules)},
                "end": f"}}{calls['end']}",
            }
        )
    form: dict[str, Any] = {"tags": tags, "stop_after_first": calls["is_single"]}
    if calls["is_required"]:
        form |= {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}
    else:
        form |= {"type": "triggered_tags", "triggers": [calls["begin"]]}
    return compiler.compile_structural_tag({"type": "structural_tag", "format": form})


def _printed(grammar: Any) -> str:
    """Print a grammar so that xgrammar reads the same one."""
    return _ESCAPE.sub(lambda found: found[1] or f"\\u00{found[2]}", str(grammar))


def _error_of(xgrammar: Any, info: Any, source: str, calls: dict[str, Any] | None) -> str:
    """Compile a grammar; return the reason if no answer can satisfy it."""
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if calls is not None:
        # A vocabulary of bytes shows whether any value fits the schema, and takes far less time.
        tokens = [bytes([byte]) for byte in range(256)]
        byte_info = xgrammar.TokenizerInfo([*tokens, b"end"], stop_token_ids=[len(tokens)])
        for name, schema in json.loads(source):
            if schema.get("type", "object") not in ("object", ["object"]):
                return f'one of a type other than "object", for the function {name}'
            if reason := _error_of(xgrammar, byte_info, json.dumps(schema), None):
                return f"{reason}, for the function {name}"
        compile_grammar(xgrammar, compiler, source, calls)  # within the limits
        return ""
    grammar = compile_grammar(xgrammar, compiler, source)
    matcher = xgrammar.GrammarMatcher(grammar)
    bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    matcher.fill_next_token_bitmask(bitmask)
    words = bitmask[0].tolist()
    for token_id in matcher.stop_token_ids:
        words[token_id // 32] &= ~(1 << token_id % 32)
    if not any(words):
        return "one that no value fits"
    rules = str(grammar.grammar).splitlines()
    if any(map(_EMPTY_RULE.search, rules)) or _has_endless_rule(rules):
        return "one with a part that no value fits"
    return ""


def _has_endless_rule(rules: list[str]) -> bool:
    """Return whether no finite text follows one of the rules, such as a reference to itself."""
    open_rules: dict[str, list[set[str]]] = {}  # names in each alternative
    for rule in rules:
        name, _, body = rule.partition(" ::= ")
        body = _FREE_PART.sub("", body).partition("(=")[0]  # no lookahead
        open_rules[name] = [set(_RULE_NAME.findall(each)) for each in body.split("|")]
    num_before = 0
    while len(open_rules) != num_before:
        num_before = len(open_rules)
        # A rule may be printed before or behind those that it needs.
        for name in (*reversed(open_rules), *open_rules):
            if name in open_rules and any(map(open_rules.keys().isdisjoint, open_rules[name])):
                del open_rules[name]
    return bool(open_rules)


def _in_fork(error_of: Callable[[], str], seconds: float, memory_bytes: int) -> str:
    """Compile a grammar in a child process within the limits.

    Returns:
        The child's answer as JSON; empty if it ended without an answer or was killed at the time
        limit.
    """
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            _limit(seconds, memory_bytes)
            os.write(writer, json.dumps(error_of()[-4000:]).encode())
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
