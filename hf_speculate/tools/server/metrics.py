"""Prometheus metrics for a server: requests, tokens and times, but no texts or client names."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing
from types import TracebackType
from typing import Any

from hf_speculate.errors import import_extra
from hf_speculate.options.refill.row_prompts import RowResult
from hf_speculate.tools.server.engine import Engine
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.text_request import DecodeResult, Pieces

_OUTCOMES = ("answered", "refused", "busy", "failed", "cancelled")
# bounds of the histograms' buckets
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class SpeculationCounters:
    """Counters of drafted, accepted and generated tokens.

    Use them in a server or a custom decoding loop.

    Args:
        registry: registry of prometheus_client.
        source: name of the draft source, which labels drafted and accepted tokens.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """

    def __init__(self, registry: Any, source: str):
        counter = import_extra("prometheus_client", "metrics").Counter
        drafted, accepted = (
            counter(f"hf_speculate_{name}_tokens", text, ["source"], registry=registry).labels(
                source
            )
            for name, text in (
                ("drafted", "Tokens that were drafted."),
                ("accepted", "Drafted tokens that stayed."),
            )
        )
        self._drafted, self._accepted = drafted, accepted
        self._generated = counter(
            "hf_speculate_generated_tokens", "Tokens of answers.", registry=registry
        )

    def add(self, num_drafted: int, num_accepted: int, num_generated: int) -> None:
        self._drafted.inc(num_drafted)
        self._accepted.inc(num_accepted)
        self._generated.inc(num_generated)


class Metrics:
    """Metrics of an engine and its requests.

    Each object has its own registry.

    Raises:
        MissingExtraError: prometheus-client is not installed.
    """

    def __init__(self, engine: Engine):
        client = import_extra("prometheus_client", "metrics")
        self._client, self._engine, self._num_forwards = client, engine, 0
        self._registry = registry = client.CollectorRegistry()
        self._requests = client.Counter(
            "hf_speculate_requests", "Requests.", ["outcome"], registry=registry
        )
        for outcome in _OUTCOMES:
            self._requests.labels(outcome)  # creates the counter with value 0
        self._prompt_tokens = client.Counter(
            "hf_speculate_prompt_tokens", "Tokens of prompts.", registry=registry
        )
        self._speculation = SpeculationCounters(registry, engine.draft_source)
        self._forwards = client.Counter(
            "hf_speculate_target_forwards",
            "Forwards of the target after prompts.",
            registry=registry,
        )
        for name, text, read in (
            ("running", "Rows that are decoded.", lambda: engine.num_running),
            ("waiting", "Rows that wait for a place.", lambda: engine.num_waiting),
        ):
            client.Gauge(f"hf_speculate_rows_{name}", text, registry=registry).set_function(read)
        self._first_token_s, self._request_s = (
            client.Histogram(
                f"hf_speculate_{name}_seconds", text, buckets=_SECONDS, registry=registry
            )
            for name, text in (
                ("time_to_first_token", "Seconds from a request to the first text of its answer."),
                ("request", "Seconds from a request to the end of its answer."),
            )
        )
        engine.observe_rows(self._add_row)

    @property
    def media_type(self) -> str:
        return str(self._client.CONTENT_TYPE_LATEST)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        # counters must never decrease
        num_forwards = max(self._engine.num_target_forwards, self._num_forwards)
        self._forwards.inc(num_forwards - self._num_forwards)
        self._num_forwards = num_forwards
        return bytes(self._client.generate_latest(self._registry))

    def add_request(self, outcome: str, seconds: float, first_s: float | None) -> None:
        """Count a finished request.

        Args:
            outcome: "answered", "refused", "busy", "failed" or "cancelled".
            seconds: time from the start to the end of the request, in seconds.
            first_s: time from the start of the request to its first text, in seconds. None if there
                was no text.
        """
        self._requests.labels(outcome).inc()
        if first_s is not None:
            self._first_token_s.observe(first_s)
        if outcome == "answered":
            self._request_s.observe(seconds)

    def _add_row(self, row: RowResult) -> None:
        """Count the tokens of a row; called in the decoder's thread."""
        self._prompt_tokens.inc(len(row.prompt.token_ids))
        self._speculation.add(row.num_drafted, row.num_accepted, len(row.token_ids))


class RequestTimer(AbstractContextManager["RequestTimer"]):
    """Timer of a request.

    It reports the outcome once: after an error inside the context, or at the end of the pieces
    passed through `follow`.

    Args:
        on_end: called with the outcome, the duration, and the time to the first text, both in
            seconds. The latter is None if there was no text. None to report nothing.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        on_end: Callable[[str, float, float | None], object] | None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._on_end, self._clock = on_end, clock
        self._begin_s = clock()
        self._first_s: float | None = None

    async def follow(self, pieces: Pieces, num_texts: int) -> Pieces:
        """Yield the pieces of an answer with `num_texts` texts; report the outcome at the end."""
        num_ended, outcome = 0, "cancelled"
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    if self._first_s is None:
                        self._first_s = self._clock() - self._begin_s
                    num_ended += isinstance(piece, DecodeResult)
                    yield index, piece
            if num_ended == num_texts:
                outcome = "answered"
        except Exception as error:
            outcome = _outcome_of(error)
            raise
        finally:
            self.end(outcome)

    def end(self, outcome: str) -> None:
        """Report the outcome unless it was reported before."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(outcome, self._clock() - self._begin_s, self._first_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.end(_outcome_of(error))


def _outcome_of(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return "cancelled"
    status = error.status if isinstance(error, RequestError) else 500
    return "busy" if status == 429 else "refused" if status < 500 else "failed"
