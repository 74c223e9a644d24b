"""Describe pydantic's errors for a request in plain words."""

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
    """Describe the first invalid field: its allowed values, and the value received.

    Args:
        error: pydantic's error for a request; for a field with several types, it lists an error per
            type.
        fields: names of all fields; other words in pydantic's paths are names of types.
        neutral: values of unsupported fields that are accepted.
    """
    errors = error.errors(include_url=False)
    first_errors = {
        _path(each["loc"], fields): each
        for each in reversed(errors)
        if each["loc"][:1] == errors[0]["loc"][:1]
    }
    name = max(first_errors, key=_fit)  # the best match among several types
    first = first_errors[name]
    kind, message, got = first["type"], first["msg"], reprlib.repr(first["input"])
    if kind == "json_invalid":
        return RequestError(
            f"the body must be JSON in UTF-8, got {message.removeprefix('Invalid JSON: ')}"
        )
    if kind == "missing":
        return RequestError(f"{name} must be given, got none", name)
    if kind == "extra_forbidden":
        name = str(errors[0]["loc"][0])
        values = " or ".join(map(json.dumps, neutral.get(name, ())))
        if values:
            return RequestError(
                f"{name} must be {values}, got {got}; other values are not supported", name
            )
        nearest = nearest_name(name, fields)
        hint = f"; did you mean {nearest}?" if nearest else ""
        return RequestError(
            f"{name} must be left out, got {got}; this endpoint has no such field{hint}", name
        )
    reasons = [
        each["msg"].removeprefix("Input should be ")
        for each in errors
        if _path(each["loc"], fields) == name
    ]
    needed = ", or ".join(dict.fromkeys(reasons))
    return RequestError(f"{name or 'the body'} must be {needed}, got {got}", name or None)


def _fit(path: str) -> tuple[int, list[int]]:
    """Rank an error by how much of the value was accepted before it: depth, then list indices."""
    return path.count("."), [int(word) for word in path.split(".") if word.isdecimal()]


def _path(location: tuple[int | str, ...], fields: Collection[str]) -> str:
    return ".".join(str(word) for word in location if isinstance(word, int) or word in fields)
