"""Errors that answer a request."""


class RequestError(Exception):
    """A request that is not answered with text; `param`, `code` and `status` are those of OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status
