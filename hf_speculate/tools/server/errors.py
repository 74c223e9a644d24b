"""Errors of requests in OpenAI's format, with HTTP statuses."""

import logging
from functools import partial
from typing import Any

from hf_speculate.errors import BadLogitsError, SpeculateError

LOGGER = logging.getLogger("hf_speculate")


class RequestError(Exception):
    """A request that gets an error instead of an answer.

    `param`, `code` and `status` have the same meaning as in OpenAI's errors.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


closing_error = partial(RequestError, "the server is shutting down", status=503)
busy_error = partial(RequestError, code="rate_limit_exceeded", status=429)


def request_error(error: BaseException) -> RequestError:
    """Convert an error, with status 400 for invalid arguments and 500 for everything else."""
    if isinstance(error, SpeculateError) and not isinstance(error, BadLogitsError):
        return RequestError(str(error))
    LOGGER.error("a request failed", exc_info=error)
    return RequestError(f"{type(error).__name__}: {error}", status=500)


def error_body(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    return {
        "error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    }
