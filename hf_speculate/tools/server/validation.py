"""Says in plain words what pydantic rejects in a request."""

import json
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from hf_speculate.errors import nearest_name
from hf_speculate.tools.server.errors import RequestError


def invalid_field(
    error: ValidationError, fields: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> RequestError:
    """The first field that is wrong: what it must be, and what it is.

    Args:
        error: of a request; for a field with several types it lists an error per type.
        fields: names of all fields; the other words in pydantic's paths are names of types.
        neutral: values of fields that are not supported with which they change nothing.
    """
    errors = error.errors(include_url=False)
    of_first = {
        _path(each["loc"], fields): each for each in reversed(errors) if each["loc"][:1] == errors[0]["loc"][:1]
    }
    name = max(of_first, key=_fit)  # among several types the one that fits best
    kind, message, got = of_first[name]["type"], of_first[name]["msg"], reprlib.repr(of_first[name]["input"])
    if kind == "json_invalid":
        return RequestError(f"the body must be JSON in UTF-8, got {message.removeprefix('Invalid JSON: ')}")
    if kind == "missing":
        return RequestError(f"{name} must be given, got none", name)
    if kind == "extra_forbidden":
        name = str(errors[0]["loc"][0])
        values = " or ".join(map(json.dumps, neutral.get(name, ())))
        if values:
            return RequestError(f"{name} must be {values}, got {got}; other values are not supported", name)
        nearest = nearest_name(name, fields)
        hint = f"; did you mean {nearest}?" if nearest else ""
        return RequestError(f"{name} must be left out, got {got}; this endpoint has no such field{hint}", name)
    reasons = [each["msg"].removeprefix("Input should be ") for each in errors if _path(each["loc"], fields) == name]
    needed = ", or ".join(dict.fromkeys(reasons))
    return RequestError(f"{name or 'the body'} must be {needed}, got {got}", name or None)


def _fit(path: str) -> tuple[int, list[int]]:
    """How much of a value a type has taken before the error at this path: deep first, then far along its lists."""
    return path.count("."), [int(part) for part in path.split(".") if part.isdecimal()]


def _path(location: tuple[int | str, ...], fields: Collection[str]) -> str:
    return ".".join(str(part) for part in location if isinstance(part, int) or part in fields)
