"""Reference of the command line as Markdown, made from the program when pages are built."""

import inspect
import re
from typing import Any

from typer.main import get_command

from hf_speculate.tools.cli.main import app

# Options and names in help texts, as code: a plain `--` becomes a dash.
NAME = re.compile(r"--[a-z][a-z-]*|\b[a-z]\w*_\w+(?:\.json)?\b|\b[A-Z]\w+Config\b")


def reference(program: Any = app, name: str = "hf-speculate") -> str:
    """Write a section for each command: usage, description, arguments and options."""
    group = get_command(program)
    parts = [
        _section(f"{name} {command}", group.commands[command]) for command in sorted(group.commands)
    ]
    return "\n".join(parts)


def _section(name: str, command: Any) -> str:
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    options = [one for one in shown if one.param_type_name == "option"]
    usage = " ".join([name, *map(_usage, arguments), *(["[OPTIONS]"] if options else [])])
    parts = [
        f"## {name}",
        "",
        inspect.cleandoc(command.help or ""),
        "",
        "```text",
        usage,
        "```",
        "",
    ]
    if arguments:
        rows = [(f"`{_usage(one).strip('[]')}`", _text(one.help)) for one in arguments]
        parts += [_table(("argument", "meaning"), rows)]
    if options:
        rows = [(_names(one), _text(one.help), _default(one)) for one in options]
        parts += [_table(("option", "meaning", "default"), rows)]
    return "\n".join(parts)


def _usage(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper().strip("[]")
    return name if argument.required else f"[{name}]"


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(option: Any) -> str:
    if option.required:
        return "required"
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    if shown is None or shown is False or callable(shown) or shown in ((), [], ""):
        return ""
    return f"`{', '.join(map(str, shown)) if isinstance(shown, list | tuple) else shown}`"


def _text(words: str | None) -> str:
    line = " ".join((words or "").split()).replace("|", "\\|").replace("<", "&lt;")
    return NAME.sub(r"`\g<0>`", line)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
