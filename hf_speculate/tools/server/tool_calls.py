"""Tool calls as JSON in `<tool_call>` tags, the format of Hermes, Qwen and many others."""

import json
import re
import uuid
from typing import Any, NamedTuple

BEGIN, END = "<tool_call>", "</tool_call>"
# characters of JSON with an error before the last one, such as -Infinity and \u00e9
_MAX_WORD_LEN = 10
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_DECODER = json.JSONDecoder(strict=False)  # grammars allow control characters in strings


class Said(NamedTuple):
    """Final parts of an answer."""

    content: str = ""
    reasoning: str = ""


class ToolCallReader:
    """Splitter into content and tool calls.

    It reads a streamed text piece by piece. A call is a JSON object in tags; the object marks its
    own end. The end tag may be missing at the end of the text and before the next call. All else is
    content, also other text in tags. Spaces alone beside calls are left out.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []  # in OpenAI's form
        self._pending = ""  # text with a possible call
        self._num_searched = 0  # characters of the pending text without the start of an end tag
        # spaces beside a call; whether content follows it
        self._spaces, self._has_content = "", False

    def read(self, text: str, is_end: bool = False) -> Said:
        """Return the content made final by the text; at the end all remaining text."""
        self._pending += text
        content = ""
        while (begin := self._pending.find(BEGIN)) >= 0:
            content += self._take_content(begin)
            call_len = self._read_call(is_end)
            if call_len is None:
                return Said(content)
            self._num_searched = 0
            if call_len:
                self._pending, self._spaces, self._has_content = self._pending[call_len:], "", False
            else:
                content += self._take_content(len(BEGIN))
        num_held = 0
        if not is_end:
            lens = range(min(len(BEGIN) - 1, len(self._pending)), 0, -1)
            num_held = next(
                (length for length in lens if self._pending.endswith(BEGIN[:length])), 0
            )
        content += self._take_content(len(self._pending) - num_held)
        return Said(content if self.calls or not is_end else content + self._spaces)

    def _take_content(self, num_chars: int) -> str:
        """Cut characters from the pending text, and return them.

        Spaces after a call are held back until other content follows.
        """
        content, self._pending = self._spaces + self._pending[:num_chars], self._pending[num_chars:]
        self._has_content = self._has_content or bool(content.strip())
        self._spaces = "" if self._has_content else content
        return content if self._has_content else ""

    def _read_call(self, is_end: bool) -> int | None:
        """Parse a call at the start of the pending text, and add it to `calls`.

        Returns:
            Number of its characters, or 0 if it is no call.
            None if it is incomplete.
        """
        text = self._pending
        body = text[len(BEGIN) :].lstrip()
        if not body.startswith("{"):
            return 0 if body or is_end else None
        if not is_end and text.find(END, self._num_searched) < 0:
            self._num_searched = max(len(text) - len(END) + 1, 0)
            return None
        self._num_searched = len(text)
        try:
            value, end = _DECODER.raw_decode(body)
        except json.JSONDecodeError as error:
            is_cut_short = error.pos > len(body) - _MAX_WORD_LEN or error.msg.startswith(
                "Unterminated"
            )
            return None if is_cut_short and not is_end else 0
        except (RecursionError, ValueError):  # a number of too many digits
            return 0
        after = body[end:].lstrip()
        if not after.startswith((BEGIN, END)):
            if not (BEGIN.startswith(after) or END.startswith(after)):
                return 0
            if not is_end:
                return None
            after = ""  # the end tag is missing or incomplete
        call = call_of(value)
        if call is None:
            return 0
        self.calls.append(call)
        return len(text) - len(after.removeprefix(END))


def call_of(value: Any) -> dict[str, Any] | None:
    """Convert a call to OpenAI's form; None if the value has no name with arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        if not isinstance(arguments, str):
            written = json.dumps(arguments, ensure_ascii=False)
            # an unpaired surrogate can only be sent as an escape
            arguments = json.dumps(arguments) if _SURROGATE.search(written) else written
        f"{value['name']}{arguments}".encode()
    except (RecursionError, UnicodeEncodeError):  # lists nested too deep, or an unpaired surrogate
        return None
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": value["name"], "arguments": arguments},
    }
