"""Tool calls in the text of an answer, as Hermes, Qwen and many others write them: JSON in `<tool_call>` tags."""

import json
import re
import uuid
from typing import Any

_BEGIN = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCallReader:
    """Splits a text that comes in pieces into what is said before the first call, and the calls."""

    def __init__(self) -> None:
        self._pending, self._has_begun = "", False

    def read(self, text: str) -> str:
        """What is known to lie before the first call."""
        self._pending += text
        if self._has_begun:
            return ""
        at = self._pending.find(_BEGIN)
        self._has_begun = at >= 0
        if not self._has_begun:
            nums = range(min(len(_BEGIN) - 1, len(self._pending)), 0, -1)
            at = len(self._pending) - next((num for num in nums if self._pending.endswith(_BEGIN[:num])), 0)
        ready, self._pending = self._pending[:at], self._pending[at:]
        return ready

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text and the calls; a text whose calls are not JSON is all text."""
        calls = [_call_of(text) for text in _CALL.findall(self._pending)]
        if not calls or None in calls:
            return self._pending, []
        return "", [call for call in calls if call is not None]


def _call_of(text: str) -> dict[str, Any] | None:
    """A call in OpenAI's form; None if the text is not a name with arguments."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }
