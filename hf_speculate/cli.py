"""The command `hf-speculate`."""

import argparse
import json
import sys
from collections.abc import Sequence

from hf_speculate.checking.pair import check_pair
from hf_speculate.errors import SpeculateError

_OK, _REFUSED, _WRONG_USE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: of the command line; None: this process's.

    Returns:
        The exit status: 0, 1 where the answer is no, 2 where nothing could be looked at.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except SpeculateError as error:
        sys.stderr.write(f"hf-speculate: {error}\n")
        return _WRONG_USE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-speculate", description="Tools for speculative decoding.")
    commands = parser.add_subparsers(required=True, metavar="command")
    check = commands.add_parser("check", help="say whether a draft model goes with a target, without loading either")
    check.add_argument("target", help="name or path; its config and tokenizer must be on this machine")
    check.add_argument("draft", help="the same of the draft model")
    check.add_argument("--json", action="store_true", help="write JSON instead of text")
    check.set_defaults(run=_check)
    return parser


def _check(options: argparse.Namespace) -> int:
    report = check_pair(options.target, options.draft)
    text = json.dumps(report.as_dict(), indent=2) if options.json else str(report)
    sys.stdout.write(f"{text}\n")
    return _OK if report.ok else _REFUSED


if __name__ == "__main__":
    sys.exit(main())
