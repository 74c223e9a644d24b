"""Decodes requests in a worker thread, one at a time."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from hf_speculate.processors.registry import register_row_wise
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.server.text_stream import TextStream

_POLL_S = 0.2  # between two checks for a client that has left, while no text comes


class DecodeRequest(NamedTuple):
    """A prompt, the strings that end its text, and arguments of `generate()`."""

    token_ids: list[int]
    stop_strings: list[str]
    options: dict[str, Any]


class DecodeResult(NamedTuple):
    """Why a text ended, with its length and statistics."""

    finish_reason: Literal["stop", "length"]
    num_new_tokens: int
    stats: SpeculationStats


class _Cancelled(StoppingCriteria):
    """Ends a generation whose client has left."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.is_set, device=input_ids.device)


register_row_wise(_Cancelled)


class Engine:
    """Decodes one request at a time.

    Args:
        target: an enabled model.
        tokenizer: the target's.
        name: under which the target is served.
        options: arguments of every call of `generate()`, such as the draft model.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, options: dict[str, Any]):
        self.target, self.tokenizer, self.name, self.options = target, tokenizer, name, options
        self.max_length: int | None = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generate")

    async def stream(
        self, request: DecodeRequest, is_gone: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[str | DecodeResult, None]:
        """Yield pieces of the text, then the result; closing the iterator ends the generation.

        Args:
            request: waits until earlier requests are finished.
            is_gone: whether the client has left; the iterator then ends without a result.
        """
        loop, cancelled = asyncio.get_running_loop(), _Cancelled()
        queue: asyncio.Queue[str | None] = asyncio.Queue()

        def on_text(piece: str) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, piece)

        task = loop.run_in_executor(self._worker, self._decode, request, on_text, cancelled)
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while not await is_gone():
                try:
                    piece = await asyncio.wait_for(queue.get(), _POLL_S)
                except TimeoutError:
                    continue
                if piece is None:
                    yield await task
                    return
                yield piece
        finally:
            cancelled.is_set = True

    def _decode(self, request: DecodeRequest, on_text: Callable[[str], None], cancelled: _Cancelled) -> DecodeResult:
        stats, text = SpeculationStats(), TextStream(self.tokenizer, request.stop_strings, on_text)
        if cancelled.is_set:
            return DecodeResult("stop", 0, stats)
        input_ids = torch.tensor([request.token_ids], device=self.target.device)  # [1, T]
        stops = {"stop_strings": request.stop_strings, "tokenizer": self.tokenizer} if request.stop_strings else {}
        output: Any = self.target.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            **(self.options | request.options | stops),
            streamer=text,
            stopping_criteria=[cancelled],
            speculation_stats=stats,
        )
        new_ids = output[0, len(request.token_ids) :].tolist()
        eos: Any = self.target.generation_config.eos_token_id
        has_ended = text.is_cut or new_ids[-1] in (eos if isinstance(eos, list) else [eos])
        return DecodeResult("stop" if has_ended else "length", len(new_ids), stats)
