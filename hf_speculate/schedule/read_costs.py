"""Read costs: the seconds in which the drafter catches up with the text, before its first step."""

from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

_NUM_READS = 3  # newest ones of about one length that are kept


class _Read(NamedTuple):
    """A draft before which the drafter read more than what the round before had emitted."""

    num_rows: int
    num_fed: int  # tokens of each row
    num_draft_tokens: int
    draft_s: float  # seconds of all draft steps


class ReadCosts:
    """Seconds per token that was read, of prompts and of other tokens, by how many they were.

    Args:
        ratio: the draft's share of the seconds of a token in the target's prefill, until reads were measured.
    """

    def __init__(self, ratio: float):
        self._ratio = ratio
        self._prompt_token_s = 0.0  # seconds of the target's prefill, for a token of each row
        self._reads: dict[tuple[bool, int], tuple[_Read, ...]] = {}  # prompts or not; the bit length of their tokens

    def begin(self, prefill_s: float, num_read: int) -> None:
        """Record the seconds of a target's prefill that read `num_read` tokens of each row."""
        self._prompt_token_s = prefill_s / max(num_read, 1)

    def add(self, num_rows: int, num_fed: int, num_draft_tokens: int, draft_s: float, is_prompt: bool) -> None:
        """Add a draft of K tokens before which `num_fed` tokens of each row were read."""
        key = is_prompt, (num_rows * num_fed).bit_length()
        read = _Read(num_rows, num_fed, num_draft_tokens, draft_s)
        self._reads[key] = (*self._reads.get(key, ()), read)[-_NUM_READS:]

    @property
    def is_measured(self) -> bool:
        return bool(self._reads)

    def seconds(
        self, num_rows: int, num_unread: int, num_prompt: int, draft_s: Callable[[int, int], float], most_s: float
    ) -> float:
        """Seconds in which `num_unread` tokens of each row are read.

        A single read, the first of its length, may have loaded kernels or compiled: it counts as no more than what the
        target takes for a prompt, or as `most_s` for other tokens.

        Args:
            num_rows: B.
            num_unread: tokens of each row.
            num_prompt: how many of them the target's prefill read.
            draft_s: estimates the seconds of a draft by B and K.
            most_s: see above.
        """
        target_s = self._prompt_token_s * (min(num_unread, num_prompt) if num_prompt else num_unread)
        if not self._reads:
            return self._ratio * target_s
        is_prompt, size = num_prompt > 0, (num_rows * num_unread).bit_length()
        nearest = min(self._reads, key=lambda key: (key[0] is not is_prompt, abs(key[1] - size), key[1]))
        by_token = [
            max(read.draft_s - draft_s(read.num_rows, read.num_draft_tokens), 0.0) / (read.num_rows * read.num_fed)
            for read in self._reads[nearest]
        ]
        seconds = median_low(by_token) * num_rows * num_unread
        return seconds if len(by_token) > 1 else min(seconds, target_s if is_prompt else most_s)

    def copy(self) -> "ReadCosts":
        twin = ReadCosts(self._ratio)
        twin._prompt_token_s, twin._reads = self._prompt_token_s, dict(self._reads)
        return twin
