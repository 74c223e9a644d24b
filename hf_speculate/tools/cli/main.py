"""The command `hf-speculate`."""

import sys
from collections.abc import Sequence
from typing import Annotated

import hf_speculate.tools.cli.logging  # noqa: F401  # before anything imports transformers

# isort: split
import typer
from typer.main import get_command

from hf_speculate.errors import SpeculateError
from hf_speculate.tools.cli.batch import batch
from hf_speculate.tools.cli.bench import bench
from hf_speculate.tools.cli.check import check
from hf_speculate.tools.cli.console import INTERRUPTED, OK, WRONG_USE, first_line, notes
from hf_speculate.tools.cli.generate import generate
from hf_speculate.tools.cli.tune import tune

app = typer.Typer(
    help="Speculative decoding with the models of transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(bench)
app.command()(batch)
app.command()(check)
app.command()(generate)
app.command()(tune)
_DEBUG = "--debug"


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show where an error came from.")] = False,
) -> None:
    """Options of all commands; `main` looks at them itself, where errors arrive."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: of the command line; None: this process's.

    Returns:
        The exit status: 0, 1 where the answer is no, 2 where nothing could be looked at.
    """
    words, is_debugged = _without_debug(sys.argv[1:] if arguments is None else arguments)
    try:
        status = get_command(app)(args=words or ["--help"], prog_name="hf-speculate", standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except Exception as error:
        if isinstance(error, typer.Abort) and not isinstance(error.__cause__, EOFError):
            return INTERRUPTED
        if is_debugged:
            raise
        notes().print(f"hf-speculate: {_line_of(error)}", markup=False, emoji=False, soft_wrap=True)
        return WRONG_USE
    if not words:
        return WRONG_USE
    return status if isinstance(status, int) else OK


def _without_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words without those that ask for traces, and whether one did; what stands behind `--` is no option."""
    end = list(words).index("--") if "--" in words else len(words)
    options = [word for word in words[:end] if word != _DEBUG]
    return [*options, *words[end:]], len(options) < end


def _line_of(error: Exception) -> str:
    """One line on an error: what users can mend as it stands, a fault with its kind."""
    if isinstance(error, typer.Abort) and error.__cause__ is not None:
        return _fault(error.__cause__)
    format_message = getattr(error, "format_message", None)  # of typer's and of click's own errors alike
    if callable(format_message):
        return " ".join(str(format_message()).split())
    if isinstance(error, SpeculateError | OSError):
        return first_line(error) or type(error).__name__
    return _fault(error)


def _fault(error: BaseException) -> str:
    kind, line = type(error).__name__, first_line(error)
    return f"{kind}: {line} ({_DEBUG} shows where it came from)" if line else f"{kind} ({_DEBUG} shows its trace)"


if __name__ == "__main__":
    sys.exit(main())
