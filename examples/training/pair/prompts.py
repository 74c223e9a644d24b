"""Build held-out prompts in the JSON Lines format of Spec-Bench."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from training.pair.corpus import HELD_OUT_MODULES, read_source

PROMPTS_PER_CATEGORY = 10
MIN_PROMPT_LEN = 40
MAX_PROMPT_LEN = 250
MAX_EDIT_LEN = 110
MAX_PER_MODULE = 2
MIN_BODY_LEN = 5
NUM_TABLE_ROWS = 5
RENAMES = {
    "x": "value",
    "s": "text",
    "a": "items",
    "width": "max_width",
    "text": "source",
    "item": "entry",
}


class Function(NamedTuple):
    """Top-level function or method in a held-out module."""

    module: str
    name: str
    first_line: int  # zero-based, including decorators
    body_line: int  # zero-based line of the first statement
    end_line: int  # one past the last line
    argument: str  # the first argument other than self and cls; empty if there is none
    has_docstring: bool


def list_functions(module: str, text: str) -> list[Function]:
    """List the functions and methods of a module in file order."""
    functions = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        arguments = [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")]
        first_line = (
            min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        )
        functions.append(
            Function(
                module=module,
                name=node.name,
                first_line=first_line,
                body_line=node.body[0].lineno - 1,
                end_line=node.end_lineno,
                argument=arguments[0] if arguments else "",
                has_docstring=ast.get_docstring(node) is not None,
            )
        )
    return sorted(functions, key=lambda function: function.first_line)


def completion_prompt(function: Function, lines: list[str]) -> str:
    """Return the code before the function and its first half."""
    if function.end_line - function.body_line < MIN_BODY_LEN:
        return ""
    half = function.body_line + (function.end_line - function.body_line + 1) // 2
    start = max(0, function.first_line - 6)
    return "\n".join(lines[start:half]).strip("\n")


def docstring_prompt(function: Function, lines: list[str]) -> str:
    """Return the code before the function, its signature, and the opened docstring."""
    if not function.has_docstring:
        return ""
    start = max(0, function.first_line - 8)
    opening = re.match(r'\s*[rR]?("""|\'\'\')', lines[function.body_line])
    return (
        "\n".join([*lines[start : function.body_line], opening.group()]).strip("\n")
        if opening
        else ""
    )


def edit_prompt(function: Function, lines: list[str]) -> str:
    """Return the function, then its signature and first statement with one argument renamed."""
    source = lines[function.first_line : function.end_line]
    head_len = function.body_line - function.first_line
    if not function.argument or function.has_docstring or len(source) < head_len + 3:
        return ""
    renamed = RENAMES.get(function.argument, f"new_{function.argument}")
    again = [
        re.sub(rf"\b{re.escape(function.argument)}\b", renamed, line)
        for line in source[: head_len + 1]
    ]
    indent = source[0][: len(source[0]) - len(source[0].lstrip())]
    note = f"{indent}# The same with {function.argument} renamed to {renamed}."
    return "\n".join([*source, "", note, *again])


def table_prompt(module: str, functions: list[Function], offset: int) -> str:
    """Return the first rows of a table that lists the functions of a module."""
    public = sorted({function.name for function in functions if not function.name.startswith("_")})[
        offset:
    ]
    if len(public) < NUM_TABLE_ROWS + 3:
        return ""
    package = module.removesuffix(".py").replace("/", ".")
    if offset:
        rows = [
            f"    ('{package}', '{name}', {index}),"
            for index, name in enumerate(public[:NUM_TABLE_ROWS])
        ]
        return "\n".join(["_registry = [", *rows])
    rows = [f"    '{name}': '{package}.{name}'," for name in public[:NUM_TABLE_ROWS]]
    return "\n".join(["_qualified_names = {", *rows])


def candidates(category: str, module: str, text: str) -> Iterator[str]:
    """Yield prompts of a category from a module; unsuitable functions yield empty strings."""
    lines, functions = text.split("\n"), list_functions(module, text)
    builders = {
        "code completion": completion_prompt,
        "docstring": docstring_prompt,
        "edit": edit_prompt,
    }
    if category == "repetitive table":
        yield from (table_prompt(module, functions, offset) for offset in (0, 1))
        return
    for function in functions:
        yield builders[category](function, lines)


def build_prompts(root: Path, tokenizer: PreTrainedTokenizerFast) -> list[dict]:
    """Build prompts for every category from the held-out modules under `root`."""
    prompts = []
    for category in ("code completion", "docstring", "edit", "repetitive table"):
        chosen: list[str] = []
        max_len = MAX_EDIT_LEN * 2 if category == "edit" else MAX_PROMPT_LEN
        for module in HELD_OUT_MODULES:
            if not (root / module).is_file():
                continue
            fitting = []
            for text in candidates(category, module, read_source(root, module)):
                if text and MIN_PROMPT_LEN <= len(tokenizer(text)["input_ids"]) <= max_len:
                    fitting.append(text)
            chosen += fitting[:MAX_PER_MODULE]
        for text in chosen[:PROMPTS_PER_CATEGORY]:
            prompts.append({"question_id": len(prompts) + 1, "category": category, "turns": [text]})
    return prompts


def write_prompts(path: Path, prompts: list[dict]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")


def read_prompts(path: Path) -> list[str]:
    """Return the first turn of each prompt."""
    return [
        json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8-sig").splitlines()
    ]
