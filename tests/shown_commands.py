"""Says what is wrong with the commands that pages show, without running them."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from hf_speculate.tools.cli.main import app

ROOT = Path(__file__).parents[1]
CLI = "hf_speculate.tools.cli.main"
LAUNCHERS = ("python", "torchrun", "accelerate")
FREE = (".", "cp", "curl", "export", "git")  # about which nothing is known here
ENDS = {"&&", "||", "|", ";", "&"}  # of a simple command
REDIRECTIONS = {">", ">>", "<", "2>"}


def problems_in(block: str, *, is_whole: bool = True) -> list[str]:
    """What is wrong with each command of a block of sh, which begins at the root of a clone.

    Args:
        block: lines as they are pasted.
        is_whole: whether commands have all the arguments they need; in running text they are often only named.
    """
    problems, folder = [], ROOT
    for words in commands_in(block):
        if words[0] == "cd":
            folder = folder / words[1]
            problem = None if folder.is_dir() else f"no folder {words[1]}"
        else:
            problem = problem_of(words, folder, is_whole)
        if problem is not None:
            problems.append(f"{shlex.join(words)}: {problem}")
    return problems


def commands_in(block: str) -> Iterator[list[str]]:
    """The words of each simple command: without comments, variables set in front, and redirections."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in ENDS:
                words.append(word)
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                del words[0]
            for place in [place for place, one in enumerate(words) if one in REDIRECTIONS][::-1]:
                del words[place : place + 2]
            if words:
                yield words
            words = []


def problem_of(words: Sequence[str], folder: Path, is_whole: bool) -> str | None:
    """What is wrong with one command that is given in `folder`; None: nothing."""
    program, *rest = words
    name = Path(program).name or program
    if name == "make":
        return _make_problem(rest)
    if name == "hf-speculate":
        return _cli_problem(rest, is_whole)
    if name == "pip":
        return _extras_problem(rest)
    if name in LAUNCHERS or re.fullmatch(r"python3(\.\d+)?", name):
        return _script_problem(rest, folder, is_whole)
    return None if name in FREE else "a program that is not looked at; teach tests/shown_commands.py"


def _make_problem(words: Sequence[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", text, re.M))
    variables = set(re.findall(r"^([A-Z_]+) [?:]?=", text, re.M))
    for word in words:
        if word.partition("=")[0] not in (variables if "=" in word else targets):
            return f"the Makefile has no {word}"
    return None


def _cli_problem(words: Sequence[str], is_whole: bool) -> str | None:
    group: Any = get_command(app)
    options = {option for parameter in group.params for option in parameter.opts}
    while words and words[0] in {*options, "--help"}:
        words = words[1:]
    if not words:
        return None
    name, *arguments = words
    if name not in group.commands:
        return f"there is no command {name}, only {', '.join(sorted(group.commands))}"
    try:
        group.commands[name].make_context(name, list(arguments))
    except typer.Exit:
        return None  # --help
    except TyperException as error:
        message = error.format_message()
        return None if message.startswith("Missing") and not is_whole else message
    return None


def _extras_problem(words: Sequence[str]) -> str | None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    for word in words:
        match = re.fullmatch(r"(?:\.|hf[-_]speculate)\[(.*)\]", word)
        unknown = set(match[1].split(",") if match else ()) - set(config["options.extras_require"])
        if unknown:
            return f"setup.cfg has no extras {', '.join(sorted(unknown))}"
    return None


def _script_problem(words: Sequence[str], folder: Path, is_whole: bool) -> str | None:
    for place, word in enumerate(words):
        if word == "-m":
            module, arguments = words[place + 1], words[place + 2 :]
            if module == CLI:
                return _cli_problem(arguments, is_whole)
            parts = module.split(".")
            path = folder.joinpath(*parts)
            path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            if path.is_file():
                return _options_problem(path, arguments)
            is_ours = folder.joinpath(parts[0]).is_dir()
            is_installed = not is_ours and importlib.util.find_spec(parts[0]) is not None
            return None if is_installed else f"no module {module}"
        if word.endswith(".py"):
            path = folder / word
            return _options_problem(path, words[place + 1 :]) if path.is_file() else f"no file {word}"
    return "names no script" if is_whole else None


def _options_problem(path: Path, words: Sequence[str]) -> str | None:
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    unknown = given - options_of(path) - {"-h", "--help"}
    return f"{path.name} takes no {', '.join(sorted(unknown))}" if unknown else None


@cache
def options_of(path: Path) -> frozenset[str]:
    """The options that a script gives its parser, or that modules beside it give theirs, as its source says."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            found |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            beside = path.parent.joinpath(*node.module.split(".")).with_suffix(".py")
            if beside.is_file():
                found |= options_of(beside)
    return frozenset(option for option in found if option.startswith("-"))
