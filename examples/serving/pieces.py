"""Turns tokens into text as they come."""

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what decode() makes of bytes that are not a whole character


class Pieces(BaseStreamer):
    """Hands text over as soon as it is certain: whole characters, and none of what a stop string may begin with.

    Args:
        tokenizer: decodes.
        stops: the text ends before the first of them.
        hand_over: takes the pieces.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[str], hand_over: Callable[[str], None]):
        self.tokenizer, self.stops, self.hand_over = tokenizer, stops, hand_over
        self.is_cut = False
        self._is_prompt = True
        self._ids: list[int] = []
        self._begin = self._read = 0  # what lies between is decoded again, for tokens look different at a beginning
        self._held = ""

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += value.flatten().tolist()
        self._release(is_end=False)

    def end(self) -> None:
        self._release(is_end=True)

    def _release(self, is_end: bool) -> None:
        before = self._decode(self._ids[self._begin : self._read])
        now = self._decode(self._ids[self._begin :])
        if now.endswith(HALF_CHARACTER) and not is_end:
            return
        self._begin, self._read = self._read, len(self._ids)
        self._held += now[len(before) :]
        if self.is_cut:
            return
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        self.is_cut = bool(places)
        end = min(places) if places else len(self._held) - (0 if is_end else self._num_pending())
        ready, self._held = self._held[:end], self._held[end:]
        if ready:
            self.hand_over(ready)

    def _num_pending(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self.stops), default=1) - 1
        nums = range(min(longest, len(self._held)), 0, -1)
        return next((num for num in nums if any(stop.startswith(self._held[-num:]) for stop in self.stops)), 0)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
