"""Entry point of the command `hf-speculate`."""

import logging
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from typer.main import get_command

from hf_speculate.tools.cli.commands import Interrupted, add_commands
from hf_speculate.tools.cli.console import INTERRUPTED, OK, WRONG_USE, answer, first_line, notes

app = typer.Typer(
    help="Faster generate() for Hugging Face transformers with speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
add_commands(app)
_NAME, _DEBUG = "hf-speculate", "--debug"
# Loggers of torchao, which transformers imports if it is installed, and of torch on torchao's enums.
_NOISY_LOGGERS = ("torch.utils._pytree", "torchao")
_USER_ERRORS = ("SpeculateError",)  # by name, because importing the class imports torch


@app.callback()
def _common(
    show_version: Annotated[bool, typer.Option("--version", "-V", help="Print versions and exit.")] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Print the traceback of an error.")] = False,
) -> None:
    """Options of all commands; `main` handles them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 if the answer is no, 2 for wrong use or an error, 130 after Ctrl-C."""
    words, is_debugged = _without_debug(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--version"], ["-V"]):
        answer(_versions())
        return OK
    quiet_other_packages()
    try:
        status = get_command(app)(args=words or ["--help"], prog_name=_NAME, standalone_mode=False, obj=words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except Interrupted:
        notes().print("hf-speculate: interrupted")
        return INTERRUPTED
    except Exception as error:
        if is_debugged:
            raise
        notes().print(f"hf-speculate: {_line_of(error)}", markup=False, emoji=False, soft_wrap=True)
        return WRONG_USE
    if not words:
        return WRONG_USE
    return status if isinstance(status, int) else OK


def quiet_other_packages() -> None:
    """Hide warnings that torchao and torch log when transformers imports them; errors are still shown."""
    for name in _NOISY_LOGGERS:
        logger = logging.getLogger(name)
        if _is_error not in logger.filters:
            logger.addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _versions() -> str:
    found = []
    for name in ("hf-speculate", "transformers", "torch"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} (not installed)")
    return f"{', '.join(found)}, Python {platform.python_version()}"


def _without_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words without `--debug`, and whether it was among them; after `--` it is no option."""
    end = list(words).index("--") if "--" in words else len(words)
    options = [word for word in words[:end] if word != _DEBUG]
    return [*options, *words[end:]], len(options) < end


def _line_of(error: Exception) -> str:
    """One line about an error; the line about an unexpected error names its type."""
    if isinstance(error, typer.Abort) and error.__cause__ is not None:
        return _unexpected(error.__cause__)
    format_message = getattr(error, "format_message", None)  # of typer's and click's errors
    if callable(format_message):
        return " ".join(str(format_message()).split())
    is_expected = any(one.__name__ in _USER_ERRORS for one in type(error).__mro__)
    if is_expected or isinstance(error, OSError):
        return first_line(error) or type(error).__name__
    return _unexpected(error)


def _unexpected(error: BaseException) -> str:
    kind, line = type(error).__name__, first_line(error)
    return f"{kind}: {line} ({_DEBUG} prints the traceback)" if line else f"{kind} ({_DEBUG} prints the traceback)"


if __name__ == "__main__":
    sys.exit(main())
