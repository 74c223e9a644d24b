"""Decodes questions off the event loop, one at a time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

import hf_speculate
from serving.pieces import Pieces

POLL_S = 0.2  # between two looks whether somebody still waits, where no text comes


class Question(NamedTuple):
    """A request that can be decoded."""

    input_ids: torch.Tensor  # [1, T]
    attention_mask: torch.Tensor  # [1, T]
    stops: list[str]
    options: dict[str, Any]  # of `generate()`

    @property
    def num_prompt_tokens(self) -> int:
        return self.input_ids.shape[1]


class Finish(NamedTuple):
    """How an answer ended."""

    reason: Literal["stop", "length"]
    num_new_tokens: int
    stats: hf_speculate.SpeculationStats


class Cancelled(StoppingCriteria):
    """Ends the generation once nobody waits for it."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.is_set, device=input_ids.device)


hf_speculate.register_row_wise(Cancelled)  # it may be asked about several tokens at once


class Engine:
    """Answers one question at a time.

    Args:
        target: an enabled model.
        draft: the draft model; None if there is none.
        tokenizer: the target's.
        name: under which the target is served.
        **options: of `generate()`, such as what drafts instead of a model.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        **options: Any,
    ):
        self.target, self.draft, self.tokenizer, self.name, self.options = target, draft, tokenizer, name, options
        self.max_length: int | None = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generate")

    async def answer(self, question: Question, is_gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str | Finish]:
        """Pieces of the text as they come, then how it ended; who leaves earlier ends the generation.

        Args:
            question: waits in line until those before it are answered.
            is_gone: whether nobody waits for the answer any more; it then ends without a `Finish`.
        """
        loop, cancelled = asyncio.get_running_loop(), Cancelled()
        queue: asyncio.Queue[str | None] = asyncio.Queue()

        def hand_over(piece: str) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, piece)

        task = loop.run_in_executor(self.worker, self._decode, question, hand_over, cancelled)
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while not await is_gone():
                try:
                    piece = await asyncio.wait_for(queue.get(), POLL_S)
                except TimeoutError:
                    continue
                if piece is None:
                    yield await task
                    return
                yield piece
        finally:
            cancelled.is_set = True

    def _decode(self, question: Question, hand_over: Callable[[str], None], cancelled: Cancelled) -> Finish:
        """Runs in the worker."""
        stats, pieces = hf_speculate.SpeculationStats(), Pieces(self.tokenizer, question.stops, hand_over)
        if cancelled.is_set:
            return Finish("stop", 0, stats)
        output = self.target.generate(
            question.input_ids,
            attention_mask=question.attention_mask,
            **question.options,
            **self.options,
            **({} if self.draft is None else {"assistant_model": self.draft}),
            **({"stop_strings": question.stops, "tokenizer": self.tokenizer} if question.stops else {}),
            streamer=pieces,
            stopping_criteria=[cancelled],
            speculation_stats=stats,
        )
        new_ids = output[0, question.num_prompt_tokens :].tolist()
        eos = self.target.generation_config.eos_token_id
        has_ended = pieces.is_cut or new_ids[-1] in (eos if isinstance(eos, list) else [eos])
        return Finish("stop" if has_ended else "length", len(new_ids), stats)
