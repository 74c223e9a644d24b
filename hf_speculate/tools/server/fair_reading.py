"""Fair reading, so that a connection that is slow to parse does not stall others."""

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# bytes; parsing them takes about 20 ms in chunks of one byte, and 20 us in large chunks
_NUM_AT_ONCE = 8192


class FairProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP protocol that parses in small steps.

    After each step, it pauses for as long as the step took.
    """

    _unparsed = b""
    _is_resting = False

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the connection, or hold them during a pause."""
        self._unparsed += data
        if self._is_resting:
            # reading resumes once the application has consumed the data
            self.transport.pause_reading()
        else:
            self._parse_some()

    def _parse_some(self) -> None:
        if self.transport.is_closing():
            self._unparsed = b""
            return
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        chunk, self._unparsed = self._unparsed[:_NUM_AT_ONCE], self._unparsed[_NUM_AT_ONCE:]
        super().data_received(chunk)
        if self._unparsed:
            self._is_resting = True
            self.transport.pause_reading()
            loop.call_later(loop.time() - begin_s, self._parse_some)
        elif self._is_resting:
            self._is_resting = False
            if not self.flow.read_paused:
                self.transport.resume_reading()
