"""Row ends: the token at which stopping criteria ended each row of a decoded batch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from hf_speculate.cache.token_buffer import TokenBuffer
from hf_speculate.processors.stopping_criteria import BlockStoppingCriteria, as_flags


class RowEnds:
    """Finds, after a batch was decoded, at which token the stopping criteria ended each row.

    Rows without an EOS token go on until the last row has stopped, so the output does not show it. Criteria that are
    known to be row-wise run again on the finished sequences. Calls of the others are recorded during decoding.
    """

    def __init__(
        self, eos_token_ids: Iterable[int], stop_strings: StopStringCriteria | None, criteria: Iterable[Any] | None
    ):
        ids = sorted(eos_token_ids)
        asked: list[Any] = [EosTokenCriteria(ids)] if ids else []
        asked += [] if stop_strings is None else [stop_strings]
        self._watched: list[_Watched] = []
        self.criteria = StoppingCriteriaList()
        """The criteria to pass to `generate()`."""
        for one in criteria or ():
            if BlockStoppingCriteria([one]).is_row_wise:
                asked += [] if isinstance(one, MaxTimeCriteria) else [one]
                self.criteria.append(one)
            else:
                self._watched.append(_Watched(one))
                self.criteria.append(self._watched[-1])
        self._asked = BlockStoppingCriteria(asked)

    def find(self, token_ids: Tensor, prompt_len: int) -> list[int | None]:
        """[B] new tokens of each row up to its end, that token included; None for a row that no criterion ended."""
        on_host = token_ids.cpu()
        verdict = self._asked(TokenBuffer(on_host[:, :prompt_len]), on_host[:, prompt_len:].tolist())
        ends: list[int | None] = [
            num if is_done else None for num, is_done in zip(verdict.num_emitted, verdict.is_done, strict=True)
        ]
        for watched in self._watched:
            for row, length in watched.first_lens.items():
                num, known = length - prompt_len, ends[row]
                ends[row] = num if known is None else min(known, num)
        return ends


class _Watched(StoppingCriteria):
    """A user's criterion, with the length at which it first ended each row."""

    def __init__(self, criterion: Any):
        self._criterion = criterion
        self.first_lens: dict[int, int] = {}
        if hasattr(criterion, "eos_token_id"):
            self.eos_token_id = criterion.eos_token_id  # plain generate() then pads the rows that have ended

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        answer = self._criterion(input_ids, scores, **kwargs)
        flags = as_flags(answer if isinstance(answer, Tensor) else torch.tensor(answer, device="cpu"))
        flags = flags.expand(input_ids.shape[0])
        for row in flags.nonzero().flatten().tolist():
            self.first_lens.setdefault(row, input_ids.shape[1])
        return answer
