"""Row lists: the logits processors and stopping criteria of a call's rows, which rows of other calls may join."""

import importlib

from hf_speculate.processors import BlockLogitsProcessorList
from hf_speculate.processors.of_rows import RowCriteria, RowProcessors
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria

_OPTION = "hf_speculate.options.refill.row_groups"  # imported where rows leave, so that others may join


class RowLists:
    """Makes what the engine runs of a call's lists; rows of one call have the same ones, and share them."""

    rows_leave = False  # whether each row ends by itself, to make room for another prompt
    first_row = 0  # number of the first output row

    def processors(self, processors: BlockLogitsProcessorList, num_rows: int) -> RowProcessors:
        """The logits processors of so many rows."""
        return processors

    def criteria(self, criteria: BlockStoppingCriteria, num_rows: int, max_length: int) -> RowCriteria:
        """The stopping criteria of so many rows, which end at `max_length` columns."""
        return criteria


ONE_CALL = RowLists()


def refilled_rows(first_row: int) -> RowLists:
    """What makes the lists of a call whose rows leave; `first_row` is the number of its first one."""
    lists: RowLists = importlib.import_module(_OPTION).RefilledRows(first_row)
    return lists
