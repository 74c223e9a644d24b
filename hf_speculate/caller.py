"""The line of a user's code that a warning belongs to."""

import sys

# packages between the user's code and a warning
_ON_THE_WAY = ("hf_speculate", "transformers", "torch", "peft", "contextlib")


def caller_level() -> int:
    """The `stacklevel`, for a warning of the function that asks, of the code that called the library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _ON_THE_WAY:
        frame, level = frame.f_back, level + 1
    return level
