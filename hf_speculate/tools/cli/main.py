"""Entry point for the command `hf-speculate`."""

import logging
import pkgutil
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from typer.main import get_command

from hf_speculate.tools.cli.console import INTERRUPTED, OK, WRONG_USE, answer, error_line, note
from hf_speculate.tools.cli.options import COMMANDS

app = typer.Typer(
    help="Faster generate() for Hugging Face transformers with speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _options, (_command, _) in COMMANDS.items():
    app.command(_command)(_options)
_NAME, _DEBUG = "hf-speculate", "--debug"
# If torchao is installed, transformers imports it. torchao logs warnings, and so does torch about
# its enums.
_NOISY_LOGGERS = ("torch.utils._pytree", "torchao")


def _print_versions(is_asked: bool) -> None:
    if not is_asked:
        return
    parts = []
    for name in (_NAME, "transformers", "torch"):
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"{name} (not installed)")
    answer(f"{', '.join(parts)}, Python {platform.python_version()}")
    raise typer.Exit


@app.callback()
def _common(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            is_eager=True,
            callback=_print_versions,
            help="Print versions and exit.",
        ),
    ] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Print the traceback of an error.")] = False,
) -> None:
    """Declare the options shared by all commands; `main` handles `--debug`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0 for success, 1 if the answer is no, 2 for wrong usage or an error, 130
        after Ctrl-C.
    """
    words, is_debugged = _without_debug(sys.argv[1:] if arguments is None else arguments)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        options = get_command(app)(
            args=words or ["--help"], prog_name=_NAME, standalone_mode=False, obj=words
        )
        if type(options) in COMMANDS:
            return int(
                pkgutil.resolve_name(f"hf_speculate.tools.cli.{COMMANDS[type(options)][1]}")(
                    options
                )
            )
        return OK if words else WRONG_USE
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except KeyboardInterrupt:
        note("hf-speculate: interrupted", style="")
        return INTERRUPTED
    except Exception as error:
        if is_debugged:
            raise
        note(f"hf-speculate: {error_line(error, f'{_DEBUG} prints the traceback')}", style="")
        for line in getattr(error, "__notes__", ()):
            note(f"hf-speculate: {line}", style="")
        return WRONG_USE


def _without_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """Remove `--debug` before `--`; also return whether it was there."""
    end = list(words).index("--") if "--" in words else len(words)
    options = [word for word in words[:end] if word != _DEBUG]
    return [*options, *words[end:]], len(options) < end


if __name__ == "__main__":
    sys.exit(main())
