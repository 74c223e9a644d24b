"""Read pages, with their code blocks, commands and scripts."""

import configparser
import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
DOCS = tuple(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
EXAMPLES = tuple(
    path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").rglob("README.md"))
)
PAGES = ("README.md", "CONTRIBUTING.md", *EXAMPLES, *DOCS)
BLOCK = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```$", re.M | re.S)
PROGRAM = re.compile(
    r"(?:cd \S+ && )?(?:\w+=\S+ )*(?:accelerate|hf-speculate|make|python|torchrun)(?= )"
)
COMMAND = re.compile(rf"`({PROGRAM.pattern}[^`]+)`")
# Row for a script in the table of examples: its name, and its extras or "-".
ROW = re.compile(r"^\| `([^`]+)` \| `?([^`\s]+)`? \|", re.M)
EXTRA = re.compile(r'pip install (?:-U )?"\.\[([\w,]+)\]"')


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language, in order."""
    return [dedent(code) for _, label, code in BLOCK.findall(read(page)) if label == language]


def commands(page: str) -> list[str]:
    """Return the commands in a page's `sh` blocks, in order, with their continuation lines."""
    return [
        command for block in blocks(page, "sh") for command in re.split(r"(?<!\\)\n", block.strip())
    ]


def named_commands(page: str) -> list[str]:
    """Return the commands named in the text of a page, often without their arguments."""
    return [" ".join(command.split()) for command in COMMAND.findall(BLOCK.sub("", read(page)))]


def extras_of_scripts() -> dict[str, set[str]]:
    """Return the extras in each row of the table of examples."""
    return {
        name: set(extras.split(",")) - {"-"}
        for name, extras in ROW.findall(read("examples/README.md"))
    }


def extras_named_in(text: str) -> set[str]:
    """Return the extras of setup.cfg that a text gives installation commands for."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    named = {extra for extras in EXTRA.findall(text) for extra in extras.split(",")}
    return named & set(parser["options.extras_require"])
