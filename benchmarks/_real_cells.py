"""Cells for `real_models.py`, which cover every pair of settings."""

from typing import Any, NamedTuple

HOLDS_AT = 0.97
USELESS = ("foreign", "early exit")  # sources that cost more than they save or are never accepted
SOURCES = {
    "smollm2": (*USELESS, "head", "lookup", "lookup with head"),
    "gemma3": (*USELESS, "lookup"),
}
# Milliseconds of a plain step for 1 and 8 rows, on two cores of a Xeon with AMX.
STEP_MS = {
    ("smollm2", "float32"): (42, 75),
    ("smollm2", "bfloat16"): (30, 55),
    ("gemma3", "float32"): (95, 210),
    ("gemma3", "bfloat16"): (60, 120),
}
NUM_EXTRA_CALLS = 4  # number of first calls, probes and checks per cell


class Cell(NamedTuple):
    """One combination of settings, measured together."""

    target: str
    source: str
    batch_size: int
    mode: str  # "greedy" or "top-p"
    prompts: str  # "chat" or "copying"
    dtype: str

    @property
    def do_sample(self) -> bool:
        return self.mode != "greedy"

    @property
    def sampling(self) -> str:
        """Name of the mode as used in the other benchmarks."""
        return "sampling, top-p" if self.do_sample else "greedy"

    @property
    def is_useless(self) -> bool:
        """Whether the draft cannot help."""
        return self.source in USELESS

    def __str__(self) -> str:
        return ", ".join(map(str, self))


# An entry sets rows, mode, prompts and dtype. Two opposite entries cover every value, and the eight
# entries together cover every pair of values.
_ALONE = ((1, "greedy", "chat", "float32"), (8, "top-p", "copying", "bfloat16"))
_MIXED = ((8, "greedy", "chat", "bfloat16"), (1, "top-p", "copying", "float32"))
_TURNED = ((8, "greedy", "copying", "float32"), (1, "top-p", "chat", "bfloat16"))
_FOLDED = ((1, "greedy", "copying", "bfloat16"), (8, "top-p", "chat", "float32"))
_CHOICES = {
    ("smollm2", "foreign"): _TURNED,
    ("smollm2", "early exit"): _MIXED,
    ("smollm2", "head"): _ALONE,
    ("smollm2", "lookup"): _TURNED,
    ("smollm2", "lookup with head"): _FOLDED,
    ("gemma3", "foreign"): _ALONE,
    ("gemma3", "early exit"): _FOLDED,
    ("gemma3", "lookup"): _MIXED,
}
CELLS = [
    Cell(target, source, *choice)
    for target, source in ((target, source) for target in SOURCES for source in SOURCES[target])
    for choice in _CHOICES[target, source]
]


def cell_of(row: dict[str, Any]) -> Cell:
    """Return the cell that a row of results belongs to."""
    return Cell(*(row[name] for name in Cell._fields))


def estimate_s(cell: Cell, max_new_tokens: int, pairs: int) -> float:
    """Estimate how long a cell takes on two quiet cores, in seconds.

    All methods are assumed to be as fast as plain decoding.
    """
    step_ms = STEP_MS[cell.target, cell.dtype][cell.batch_size > 1]
    num_methods = 3 if cell.batch_size == 1 else 2
    return (pairs * num_methods + NUM_EXTRA_CALLS) * max_new_tokens * step_ms / 1000
