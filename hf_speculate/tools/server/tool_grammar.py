"""Grammars for tool calls: JSON in `<tool_call>` tags that fits the request's tools."""

import importlib.util
import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import ConfigError
from hf_speculate.processors.registry import register_row_wise
from hf_speculate.tools.server.errors import RequestError
from hf_speculate.tools.server.response_format import GrammarProcessor, GrammarSource
from hf_speculate.tools.server.response_template import ResponseTemplate
from hf_speculate.tools.server.schemas import ChatRequest
from hf_speculate.tools.server.text_stream import TextStream
from hf_speculate.tools.server.token_bytes import TokenBytes
from hf_speculate.tools.server.tool_calls import BEGIN, END, ToolCallReader

_NAME, _ARGUMENTS = "probe", {"x": 1}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
_CALL = f'{{"name": "{_NAME}", "arguments": {json.dumps(_ARGUMENTS)}}}'
_TAGGED = re.compile(rf"{BEGIN}(\s*)(\{{[^<]*\}})(\s*){END}")
_NO_ARGUMENTS = {"type": "object", "properties": {}}


class CallFormat(NamedTuple):
    """The format of a tokenizer's tool calls, as far as the server can write grammars for it."""

    is_read: bool  # whether the server reads JSON calls in `<tool_call>` tags
    is_written: bool  # whether the chat template also writes such calls
    space: str  # text between the first tag and the JSON
    end: str  # text after the JSON
    reasoning: tuple[int, int] | None  # ids of `<think>` and `</think>`; None without them

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, template: ResponseTemplate | None
    ) -> "CallFormat":
        """Find the format from a call that the chat template writes and the reader accepts."""
        vocab = tokenizer.get_vocab()
        begin, end = vocab.get("<think>"), vocab.get("</think>")
        reasoning = None if begin is None or end is None else (begin, end)
        written = _TAGGED.finditer(_chat_with_call(tokenizer))
        found = next((each for each in written if _is_call(each[2])), None)
        space, end_space = ("\n", "\n") if found is None else (found[1], found[3])
        call = f"{BEGIN}{space}{_CALL}{end_space}{END}"
        reader = ToolCallReader() if template is None else template.reader("", [_TOOL])
        # Tokens may not spell the call, or are left out of texts.
        call_ids = tokenizer(call, add_special_tokens=False)["input_ids"]
        stream = TextStream(tokenizer, (), is_parsed=template is not None)
        text = stream.read_marked(call_ids, is_end=True)
        if isinstance(reader, ToolCallReader):
            reader.read(text.shown, is_end=True)
        else:
            reader.read(text, is_end=True)
        functions = [each["function"] for each in reader.calls]
        is_read = functions == [{"name": _NAME, "arguments": json.dumps(_ARGUMENTS)}]
        return cls(is_read, is_read and found is not None, space, end_space + END, reasoning)


def _is_call(text: str) -> bool:
    """Return whether a text is the call as JSON, in any order and with any spaces."""
    try:
        return bool(json.loads(text) == json.loads(_CALL))
    except ValueError:
        return False


def _chat_with_call(tokenizer: PreTrainedTokenizerBase) -> str:
    """Render a chat with a call; return "" if there is no chat template that accepts calls."""
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    call = {"id": "call_0", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        return str(tokenizer.apply_chat_template(messages, tools=[_TOOL], tokenize=False))
    except Exception:  # noqa: BLE001  # templates may raise any error
        return ""


def source_of_tools(
    request: ChatRequest, format_: CallFormat, has_ends: bool
) -> GrammarSource | None:
    """Return the source of the grammar for a request with tools.

    Args:
        request: a request that has tools and whose `tool_choice` is not "none".
        format_: the tokenizer's format for calls.
        has_ends: whether an EOS id ends the answer.

    Returns:
        The source; None if the request is answered without a grammar, as may happen with
        `tool_choice` "auto".

    Raises:
        RequestError: `tool_choice` requires a grammar, but there is none.
    """
    named, is_required = request.named_function, request.requires_calls
    got = '"required"' if named is None else f"the function {reprlib.repr(named)}"
    functions = [tool.function for tool in request.tools or ()]
    if not is_required:
        is_known = format_.is_written and all(map(_is_described, functions))
        has_xgrammar = importlib.util.find_spec("xgrammar") is not None
        if not (is_known and has_xgrammar and has_ends):
            return None
    elif not format_.is_read:
        raise RequestError(
            f'tool_choice must be "none" or "auto" for this tokenizer, got {got}; '
            f"it or its response_template keeps no JSON calls in {BEGIN} tags",
            "tool_choice",
        )
    elif not has_ends:
        raise RequestError(
            'tool_choice must be "none" or "auto" if no EOS id ends the answer, got '
            f"{got}; leave out ignore_eos",
            "tool_choice",
        )
    if named is not None:
        functions = [function for function in functions if function.get("name") == named][:1]
    for index, function in enumerate(functions):
        if not _is_described(function):
            raise RequestError(
                f"tools.{index}.function must have a name, and parameters that are an object, got "
                "others",
                "tools",
            )
    pairs = [[each["name"], each.get("parameters") or _NO_ARGUMENTS] for each in functions]
    calls = {
        "begin": BEGIN,
        "space": format_.space,
        "end": format_.end,
        "is_required": is_required,
        "is_single": named is not None or not request.parallel_tool_calls,
    }
    is_strict = any(each.get("strict") is True for each in functions)
    return GrammarSource(json.dumps(pairs), calls, not is_required, is_strict)


def _is_described(function: dict[str, Any]) -> bool:
    """Return whether a function has a name, and parameters that can be a schema."""
    parameters = function.get("parameters")
    return isinstance(function.get("name"), str) and isinstance(parameters, dict | None)


def begins_reasoning(
    prompt_ids: Sequence[int], reasoning: tuple[int, int] | None, token_bytes: TokenBytes
) -> bool:
    """Return whether a prompt ends with `<think>`, up to spaces and line breaks."""
    if reasoning is None:
        return False
    ends = (each for each in reversed(prompt_ids) if token_bytes(each).strip())
    return next(ends, None) == reasoning[0]


@register_row_wise
class ToolCallProcessor(GrammarProcessor):
    """Logits processor for a grammar of tool calls that may follow reasoning.

    The answer begins with reasoning if the prompt has begun it, or if its first token is `<think>`,
    which a grammar of required calls does not allow. In these cases, the grammar begins after
    `</think>`.
    """

    def __init__(
        self,
        grammar: Any,
        prompt_len: int,
        end_ids: Sequence[int],
        reasoning: tuple[int, int] | None,
        has_begun: bool,
        is_required: bool,
    ):
        super().__init__(grammar, prompt_len, end_ids)
        self._reasoning, self._has_begun, self._is_required = reasoning, has_begun, is_required

    def _constrained(self, ids: list[int]) -> list[int] | None:
        if self._reasoning is None:
            return ids
        begin, end = self._reasoning
        if self._has_begun or ids[:1] == [begin]:
            return ids[ids.index(end) + 1 :] if end in ids else None
        return ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return masked scores [N, V] float32 after `input_ids` [N, n] int64, the text so far."""
        scores = super().__call__(input_ids, scores)
        if self._is_required:  # reasoning must lead to a call
            ends = [token_id for token_id in self._end_ids if token_id < scores.shape[1]]
            for row, ids in enumerate(input_ids[:, self._prompt_len :].tolist()):
                if self._constrained(ids) is None:
                    scores[row, ends] = float("-inf")
        return scores

    def error_of(
        self, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
    ) -> ConfigError | None:
        """Return the error of an answer without its required call; None without one."""
        return super().error_of(token_ids, tokenizer) if self._is_required else None

    def _is_whole(self, text: str) -> bool:
        return True

    def _error(self, text: str) -> ConfigError:
        return ConfigError(
            "tools must have parameters whose grammar leads to a call, got a call that ends after "
            f"{text[-40:]!r}; look for a part that no value fits"
        )
