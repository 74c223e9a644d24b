"""The command `hf-speculate`."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from hf_speculate.commands.batch import batch
from hf_speculate.commands.bench import bench
from hf_speculate.commands.check import check
from hf_speculate.commands.console import OK, WRONG_USE, notes
from hf_speculate.commands.generate import generate
from hf_speculate.commands.tune import tune
from hf_speculate.errors import SpeculateError

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
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        get_command(app)(args=words, prog_name="hf-speculate")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except (SpeculateError, OSError) as error:  # what users can mend; anything else is a fault, with its trace
        if words[:1] == [_DEBUG]:
            raise
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        notes().print(f"hf-speculate: {first_line}", markup=False, soft_wrap=True)
        return WRONG_USE
    return OK


if __name__ == "__main__":
    sys.exit(main())
