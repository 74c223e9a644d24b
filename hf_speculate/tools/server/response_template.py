"""Reasoning, content and tool calls of an answer, parsed by a tokenizer's `response_template`."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_speculate.tools.server.errors import LOGGER
from hf_speculate.tools.server.text_stream import TAGS
from hf_speculate.tools.server.tool_calls import Said, call_of

_CONTENT, _CALLS = "content", "tool_calls"
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of reasoning in templates
# Most delimiters begin with one of these characters. The parser is fed up to the next one, because a failed feed loses
# its events.
_MARK = re.compile(r"(?=[<\[])")


class ResponseTemplate:
    """Factory of readers from a tokenizer's `response_template`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any]):
        others = {name: field for name, field in template["fields"].items() if name != _CALLS}
        self._tokenizer: Any = tokenizer
        self._by_tools = {True: template, False: {**template, "fields": others}}
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)}
        self._special = re.compile("|".join(map(re.escape, sorted(special - TAGS, key=len, reverse=True))) or "(?!)")

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "ResponseTemplate | None":
        """Return a tokenizer's template; None if it is missing or transformers cannot read it."""
        template = getattr(tokenizer, "response_template", None)
        if template is None:
            return None
        try:
            response_template = cls(tokenizer, template)
            response_template.reader("", [])
            response_template.reader("", None)
        except Exception as error:  # noqa: BLE001  # a user's file may have any fault
            LOGGER.warning("the tokenizer's response_template is not used, as it cannot be read: %s", error)
            return None
        return response_template

    def reader(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None) -> "ResponseReader":
        """Return the reader of one answer.

        Args:
            prompt: text before the answer, with its special tokens. A field may begin in it.
            tools: functions for the model.
                None treats calls as content.
        """
        template = copy.deepcopy(self._by_tools[tools is not None])  # transformers 5.17 changes the template's defaults
        make_parser = partial(self._tokenizer.get_response_parser, template)
        try:
            parser = make_parser(prefix=prompt, tools=tools)
        except Exception:  # noqa: BLE001  # earlier messages or tools may have another form
            parser = make_parser(prefix="")
        return ResponseReader(parser, partial(make_parser, prefix="", tools=tools), template["fields"], self._special)


class ResponseReader:
    """Splitter into reasoning, content and tool calls.

    It reads a streamed answer piece by piece. An unreadable field, such as a call with malformed JSON, becomes content.
    So does an answer without any field. Fields of other names are left out.
    """

    def __init__(
        self, parser: Any, make_parser: Callable[[], Any], fields: Mapping[str, Any], special: re.Pattern[str]
    ):
        self.calls: list[dict[str, Any]] = []  # in OpenAI's form
        self._parser, self._make_parser = parser, make_parser
        self._special = special  # texts of special tokens, removed from answers
        self._joins = {name: field.get("join") for name, field in fields.items()}
        is_stripped = {name: field.get("content_args", {}).get("strip", True) for name, field in fields.items()}
        reasoning = next((name for name in _REASONING if name in fields), "")
        self._content, self._reasoning = (_FieldText(is_stripped.get(name, True)) for name in (_CONTENT, reasoning))
        self._texts = {_CONTENT: self._content, reasoning: self._reasoning}
        self._raw = ""  # text since the last returned part of a field

    def read(self, text: str, is_end: bool = False) -> Said:
        """Return the final parts; at the end all remaining text."""
        for chunk in filter(None, _MARK.split(text)):
            self._raw += chunk
            self._take(partial(self._parser.feed, chunk))
        if is_end:
            self._take(lambda: self._parser.finalize()[1])
            if not (self.calls or self._content.is_begun or self._reasoning.is_begun):
                self._give_raw()
        return Said(self._content.take(), self._reasoning.take())

    def _take(self, step: Callable[[], list[dict[str, Any]]]) -> None:
        """Process the events of a parser step; after an error continue with a new parser."""
        try:
            events = step()
            closed = [event for event in events if event["type"] == "region_close"]
            calls = [call for event in closed if event["field"] == _CALLS for call in _calls_of(event["value"])]
        except Exception:  # noqa: BLE001  # templates and texts cause errors of all types
            self._give_raw()
            self._parser = self._make_parser()
            return
        self.calls += calls
        for event in events:
            if event["field"] != _CALLS:
                self._take_event(event["type"], event["field"], event)
        if closed and events[-1] is closed[-1]:
            self._raw = ""

    def _take_event(self, kind: str, field: str, event: Mapping[str, Any]) -> None:
        if kind == "region_chunk":
            _, found, tail = self._raw.rpartition(event["text"])
            self._raw = tail if found else self._raw
            if field in self._texts:
                self._texts[field].add(self._shown(event["text"]))
        elif kind == "region_open" and field in self._texts and self._joins[field] is not None:
            self._texts[field].join(self._joins[field])

    def _give_raw(self) -> None:
        """Add the text outside of all fields to the content."""
        self._content.add(self._shown(self._raw))
        self._raw = ""

    def _shown(self, text: str) -> str:
        return self._special.sub("", text)


def _calls_of(value: Any) -> list[dict[str, Any]]:
    """Convert calls to OpenAI's form.

    Raises:
        ValueError: a call has no name, or no JSON-serialisable arguments.
    """
    calls = []
    for each in value if isinstance(value, list) else [value]:
        call = call_of(each.get("function", each))
        if call is None:
            raise ValueError("a call must have a name and arguments that JSON can hold")
        calls.append(call)
    return calls


class _FieldText:
    """Text of a field.

    With `is_stripped`, spaces around it are left out.
    """

    def __init__(self, is_stripped: bool):
        self.is_begun = False  # whether the text has more than spaces
        self._is_stripped = is_stripped
        self._new = self._spaces = ""  # text to take next; trailing spaces, perhaps inside the text
        self._begin: str | None = ""  # text to insert before the next region; None inside a region

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
        """Begin a further region of the field, joined to the previous one by `text`."""
        if self._begin is None:
            self._begin, self._spaces = text, ""

    def take(self) -> str:
        text, self._new = self._new, ""
        return text
