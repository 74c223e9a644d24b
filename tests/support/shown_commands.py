"""Check the commands on pages without running them."""

import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from hf_speculate.tools.cli.main import app

ROOT = Path(__file__).parents[2]
CLI = "hf_speculate.tools.cli.main"
LAUNCHERS = r"python(3(\.\d+)?)?|torchrun|accelerate"
# other programs, whose arguments are not checked
FREE = (".", "cp", "curl", "export", "gh", "git", "pip")


def problems_in(block: str, *, is_whole: bool = True) -> list[str]:
    """Return the problems with each command in an `sh` block.

    The block starts in the root of a clone. Commands in running text are often only named: if
    `is_whole` is False, arguments may be missing.
    """
    problems, folder = [], ROOT
    for words in commands_in(block):
        if words[0] == "cd":
            folder = folder / words[1]
            problem = None if folder.is_dir() else f"no folder {words[1]}"
        else:
            problem = problem_of(words, folder, is_whole)
        problems += [f"{shlex.join(words)}: {problem}"] * (problem is not None)
    return problems


def commands_in(block: str) -> Iterator[list[str]]:
    """Yield the words of each simple command.

    Comments, leading variable assignments and redirections are removed.
    """
    for line in block.replace("\\\n", " ").splitlines():
        for command in re.split(r"&&|\|\||[|;&]", re.sub(r"(^|\s)#.*|\s2?[<>]+ *\S+", "", line)):
            words = list(
                itertools.dropwhile(
                    lambda word: re.fullmatch(r"\w+=.*", word), shlex.split(command)
                )
            )
            if words:
                yield words


def problem_of(words: list[str], folder: Path, is_whole: bool) -> str | None:
    """Return the problem with one command run in `folder`, or None."""
    program, *arguments = words
    name = Path(program).name or program
    if name == "make":
        known = re.findall(
            r"^[A-Za-z_-]+(?=:| [?:]?=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
        )
        unknown = [word for word in arguments if word.partition("=")[0] not in known]
        return f"the Makefile has no {unknown[0]}" if unknown else None
    if name == "hf-speculate":
        return _cli_problem(arguments, is_whole)
    if re.fullmatch(LAUNCHERS, name):
        return _script_problem(arguments, folder, is_whole)
    return (
        None
        if name in FREE
        else "a program that is not looked at; teach tests/support/shown_commands.py"
    )


def _cli_problem(words: list[str], is_whole: bool) -> str | None:
    group: Any = get_command(app)
    options = {option for parameter in group.params for option in parameter.opts}
    name, *arguments = [*itertools.dropwhile({*options, "--help"}.__contains__, words)] or [
        "--help"
    ]
    if name == "--help":
        return None
    if name not in group.commands:
        return f"there is no command {name}, only {', '.join(sorted(group.commands))}"
    try:
        group.commands[name].make_context(name, arguments)
    except typer.Exit:
        return None  # needed for --help
    except TyperException as error:
        message = error.format_message()
        return None if message.startswith("Missing") and not is_whole else message
    return None


def _script_problem(words: list[str], folder: Path, is_whole: bool) -> str | None:
    for index, word in enumerate(words):
        if word == "-m":
            module, arguments = words[index + 1], words[index + 2 :]
            if module == CLI:
                return _cli_problem(arguments, is_whole)
            is_ours = folder.joinpath(*module.split(".")).with_suffix(".py").is_file()
            is_installed = importlib.util.find_spec(module.split(".")[0]) is not None
            return None if is_ours or is_installed else f"no module {module}"
        if word.endswith(".py"):
            return _options_problem(folder / word, words[index + 1 :])
    return "names no script" if is_whole else None


def _options_problem(path: Path, words: list[str]) -> str | None:
    """Look for the options in the script and in the modules next to it."""
    if not path.is_file():
        return f"no file {path.name}"
    sources = [path, *path.parent.glob("*.py"), *path.parent.glob("*/*.py")]
    known = "".join(source.read_text(encoding="utf-8") for source in sources)
    passed = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {
        "-h",
        "--help",
    }
    unknown = sorted(option for option in passed if f'"{option}"' not in known)
    return f"{path.name} takes no {', '.join(unknown)}" if unknown else None
