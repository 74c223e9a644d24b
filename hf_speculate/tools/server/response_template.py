"""Split an answer into reasoning, content and tool calls.

transformers parses the answer with the tokenizer's `response_template`.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_speculate.tools.server.errors import LOGGER
from hf_speculate.tools.server.text_stream import MarkedText
from hf_speculate.tools.server.tool_calls import Said, call_of

_CONTENT, _CALLS = "content", "tool_calls"
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the reasoning in templates
# Most delimiters begin with one of these characters. Text is fed up to the next such character,
# because the parser loses the events of a failed feed.
_MARK = re.compile(r"(?=[<\[])")


class ResponseTemplate:
    """Makes readers for answers from a tokenizer's `response_template`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]):
        others = {name: field for name, field in template["fields"].items() if name != _CALLS}
        self._tokenizer: Any = tokenizer
        self._by_tools = {True: template, False: {**template, "fields": others}}

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "ResponseTemplate | None":
        """Return a tokenizer's template; None if it is missing or unreadable."""
        template = getattr(tokenizer, "response_template", None)
        if template is None:
            return None
        try:
            made = cls(tokenizer, template)
            made.reader("", [])
            made.reader("", None)
        except Exception as error:  # noqa: BLE001  # the file may be invalid in any way
            LOGGER.warning(
                "the tokenizer's response_template is not used, as it cannot be read: %s", error
            )
            return None
        return made

    def reader(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None) -> "ResponseReader":
        """Return the reader for one answer.

        Args:
            prompt: text before the answer, including special tokens; it may have begun a field.
            tools: functions that the model may call. If None, calls are treated as content.
        """
        # transformers 5.17 adds to these defaults
        template = copy.deepcopy(self._by_tools[tools is not None])
        make_parser = partial(self._tokenizer.get_response_parser, template)
        try:
            parser = make_parser(prefix=prompt, tools=tools)
        except Exception:  # noqa: BLE001  # messages or tools in another format
            parser = make_parser(prefix="")
        make_next = partial(make_parser, prefix="", tools=tools)
        return ResponseReader(parser, make_next, template["fields"])


class ResponseReader:
    """Splits an answer into reasoning, content and calls.

    It reads the answer piece by piece. A field that the template cannot parse, such as a call with
    malformed JSON, is treated as content, and so is an answer without any fields. Fields with other
    names are left out.
    """

    def __init__(self, parser: Any, make_parser: Callable[[], Any], fields: Mapping[str, Any]):
        self.calls: list[dict[str, Any]] = []  # in OpenAI's format
        self._parser, self._make_parser = parser, make_parser
        self._joins = {name: field.get("join") for name, field in fields.items()}
        is_stripped = {
            name: field.get("content_args", {}).get("strip", True) for name, field in fields.items()
        }
        reasoning = next((name for name in _REASONING if name in fields), "")
        self._content, self._reasoning = (
            _FieldText(is_stripped.get(name, True)) for name in (_CONTENT, reasoning)
        )
        self._texts = {_CONTENT: self._content, reasoning: self._reasoning}
        self._raw = MarkedText()  # text after the last returned part of a field
        self._num_closed = 0  # number of its characters up to the end of a field closed since then

    def read(self, text: MarkedText, is_end: bool = False) -> Said:
        """Return the parts that are final; at the end, return all remaining text."""
        begin = 0
        for part in filter(None, _MARK.split(text.text)):
            self._raw, begin = self._raw + text[begin : begin + len(part)], begin + len(part)
            self._take(partial(self._parser.feed, part))
        if is_end:
            self._take(lambda: self._parser.finalize()[1])
            if not (self.calls or self._content.is_begun or self._reasoning.is_begun):
                self._give_raw()
        return Said(self._content.take(), self._reasoning.take())

    def _take(self, step: Callable[[], list[dict[str, Any]]]) -> None:
        """Take the events from a parser step; after an error, continue with a new parser."""
        try:
            events = step()
            closed = [event for event in events if event["type"] == "region_close"]
            calls = [
                call
                for event in closed
                if event["field"] == _CALLS
                for call in _calls_of(event["value"])
            ]
        except Exception:  # noqa: BLE001  # errors of templates or of their text
            self._give_raw()
            self._parser = self._make_parser()
            return
        self.calls += calls
        for event in events:
            if event["field"] != _CALLS:
                self._take_event(event["type"], event["field"], event)
        if closed and events[-1] is closed[-1]:
            self._num_closed = len(self._raw)  # the parser may hold back spaces for a later part

    def _take_event(self, kind: str, field: str, event: Mapping[str, Any]) -> None:
        if kind == "region_chunk":
            begin = self._raw.text.rfind(event["text"])
            end = begin + len(event["text"])
            part = MarkedText.of(event["text"]) if begin < 0 else self._raw[begin:end]
            if begin >= 0:
                self._raw, self._num_closed = self._raw[end:], max(self._num_closed - end, 0)
            if field in self._texts:
                self._texts[field].add(part.shown)
        elif kind == "region_open" and field in self._texts and self._joins[field] is not None:
            self._texts[field].join(self._joins[field])

    def _give_raw(self) -> None:
        """Return text outside all fields as content."""
        self._content.add(self._raw[self._num_closed :].shown)
        self._raw, self._num_closed = MarkedText(), 0


def _calls_of(value: Any) -> list[dict[str, Any]]:
    """Return calls in OpenAI's format; raise an error for a value without a name."""
    calls = []
    for each in value if isinstance(value, list) else [value]:
        call = call_of(each.get("function", each))
        if call is None:
            raise ValueError("a call must have a name and arguments that JSON can hold")
        calls.append(call)
    return calls


class _FieldText:
    """The text of a field; surrounding spaces are dropped if `is_stripped`."""

    def __init__(self, is_stripped: bool):
        self.is_begun = False  # whether it contains more than spaces
        self._is_stripped = is_stripped
        # text to return; spaces that may turn out to be surrounding spaces
        self._new = self._spaces = ""
        # prefix for the next text, which is stripped on its left; None inside a text
        self._begin: str | None = ""

    def add(self, text: str) -> None:
        text = self._spaces + text
        if self._begin is not None and self._is_stripped:
            text = text.lstrip()
        end = len(text.rstrip()) if self._is_stripped else len(text)
        self._spaces = text[end:]
        if end:
            self._new += (self._begin or "") + text[:end]
            self.is_begun, self._begin = True, None

    def join(self, text: str) -> None:
        """Begin another region of the field, joined to the previous region by a separator."""
        if self._begin is None:
            self._begin, self._spaces = text, ""

    def take(self) -> str:
        taken, self._new = self._new, ""
        return taken
