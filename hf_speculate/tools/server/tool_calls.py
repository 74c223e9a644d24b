"""Tool calls in the text of an answer, as Hermes, Qwen and many others write them: JSON in `<tool_call>` tags."""

import json
import uuid
from typing import Any, NamedTuple

_BEGIN, _END = "<tool_call>", "</tool_call>"
_LONGEST_WORD = 10  # characters of JSON that are an error until the next one comes, such as -Infinity and \u00e9
_DECODER = json.JSONDecoder()


class Said(NamedTuple):
    """Parts of an answer that are final."""

    content: str = ""
    reasoning: str = ""


class ToolCallReader:
    """Splits a text that comes in pieces into what is said and the calls.

    A call is a JSON object in tags, which says where it ends itself; the last tag may be missing at the end of the text
    and before the next call. All else is said, other text in tags too. Spaces alone beside calls are left out.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []  # in OpenAI's form
        self._pending = ""  # text that may hold a call
        self._num_searched = 0  # characters of it before which no last tag begins
        self._spaces, self._has_said = "", False  # before or after a call

    def read(self, text: str, is_end: bool = False) -> Said:
        """What is known to be said; at the end all of the rest."""
        self._pending += text
        said = ""
        while (at := self._pending.find(_BEGIN)) >= 0:
            said += self._say(at)
            num = self._num_of_call(is_end)
            if num is None:
                return Said(said)
            self._num_searched = 0
            if num:
                self._pending, self._spaces, self._has_said = self._pending[num:], "", False
            else:
                said += self._say(len(_BEGIN))
        num_held = 0
        if not is_end:
            nums = range(min(len(_BEGIN) - 1, len(self._pending)), 0, -1)
            num_held = next((num for num in nums if self._pending.endswith(_BEGIN[:num])), 0)
        said += self._say(len(self._pending) - num_held)
        return Said(said if self.calls or not is_end else said + self._spaces)

    def _say(self, num: int) -> str:
        """Cut so many characters from the pending text; returns them unless spaces are all that follows a call."""
        said, self._pending = self._spaces + self._pending[:num], self._pending[num:]
        self._has_said = self._has_said or bool(said.strip())
        self._spaces = "" if self._has_said else said
        return said if self._has_said else ""

    def _num_of_call(self, is_end: bool) -> int | None:
        """Add the call at the start of the pending text; returns its characters, 0 for none, None if more must come."""
        text = self._pending
        body = text[len(_BEGIN) :].lstrip()
        if not body.startswith("{"):
            return 0 if body or is_end else None
        if not is_end and text.find(_END, self._num_searched) < 0:
            self._num_searched = max(len(text) - len(_END) + 1, 0)
            return None
        self._num_searched = len(text)
        try:
            value, end = _DECODER.raw_decode(body)
        except json.JSONDecodeError as error:
            is_cut_short = error.pos > len(body) - _LONGEST_WORD or error.msg.startswith("Unterminated")
            return None if is_cut_short and not is_end else 0
        except RecursionError:
            return 0
        rest = body[end:].lstrip()
        if not rest.startswith((_BEGIN, _END)):
            if not (_BEGIN.startswith(rest) or _END.startswith(rest)):
                return 0
            if not is_end:
                return None
            rest = ""  # no tag, or a part of one
        call = call_of(value)
        if call is None:
            return 0
        self.calls.append(call)
        return len(text) - len(rest.removeprefix(_END))


def call_of(value: Any) -> dict[str, Any] | None:
    """A call in OpenAI's form; None if the value is not a name with arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        f"{value['name']}{arguments}".encode()
    except (RecursionError, UnicodeEncodeError):  # lists in lists without end, or an unpaired surrogate
        return None
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": value["name"], "arguments": arguments},
    }
