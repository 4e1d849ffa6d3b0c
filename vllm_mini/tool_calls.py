"""Function calls, in the format that a model's chat template teaches it: what is asked for, enforced and found in text.

Knows no tokens and no HTTP. A format is recognised by the words of the template that describe it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from vllm_mini.sequence import RequestError, StructuredOutputsParams
from vllm_mini.structured import WHITESPACE

__all__ = ["ToolCallParser", "ToolFormat", "Tools", "check_tools", "join_deltas", "tool_format"]

MAX_TOOLS = 128  # OpenAI's limit
MAX_HEAD_LENGTH = 256  # characters of a call before its arguments: what goes on without is none
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Json = dict[str, Any]


class ToolFormat(NamedTuple):
    """How a model writes a call: begin {"name": ..., ARGUMENTS: {...}} end."""

    name: str
    marker: re.Pattern[str]  # found in the chat templates that ask for it
    begin: str
    end: str
    separator: str  # between two calls
    arguments: str  # its key


FORMATS = (
    ToolFormat("hermes", re.compile(r"""<tool_call>(?:\\n|\s)*\{\s*\\?["'](?:name|arguments)"""),
               "<tool_call>\n", "\n</tool_call>", "\n", "arguments"),
    ToolFormat("llama3_json", re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?":'), "", "", "; ", "parameters"),
)
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[a-zA-Z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


def tool_format(chat_template: str | None) -> ToolFormat | None:
    """The first format that a template describes."""
    return next((one for one in FORMATS if chat_template and one.marker.search(chat_template)), None)


def check_tools(tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> None:
    """RequestError, whose `param` is the path to the fault, for what OpenAI's API does not allow."""
    if not isinstance(tools, (list, type(None))) or len(tools or ()) > MAX_TOOLS:
        _refuse("tools", f"must be a list of at most {MAX_TOOLS} functions")
    names = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    if not isinstance(parallel_tool_calls, (bool, type(None))):
        _refuse("parallel_tool_calls", "must be true or false")
    if tool_choice in (None, "none", "auto"):
        return
    if not names:
        _refuse("tool_choice", "asks for a tool, but tools is empty")
    if tool_choice == "required":
        return
    path, name = "tool_choice", tool_choice
    for key in ("function", "name"):
        if not isinstance(name, Mapping) or key not in name:
            _refuse(path, 'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')
        path, name = f"{path}.{key}", name[key]
    if name not in names:
        _refuse(path, f"must be one of {', '.join(names[:10])}, got {name!r:.80}")


def _refuse(path: str, complaint: str) -> NoReturn:
    raise RequestError(f"{path} {complaint}", param=path)


def _check_tool(tool: Any, path: str) -> str:
    """Its name."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        _refuse(path, 'must be {"type": "function", "function": {...}}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        _refuse(f"{path}.function", "must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        _refuse(f"{path}.function.name", f"must be 1 to 64 letters, digits, underscores and dashes, got {name!r:.80}")
    if not isinstance(function.get("description"), (str, type(None))):
        _refuse(f"{path}.function.description", "must be a string")
    if not isinstance(function.get("parameters"), (Mapping, type(None))):
        _refuse(f"{path}.function.parameters", "must be a JSON schema")
    return name


@dataclass(frozen=True)
class Tools:
    """The tools that one request brings, once check_tools has found nothing wrong, and what it wants of them."""

    tools: Sequence[Json]
    format: ToolFormat
    choice: Any = None  # as tool_choice, but not "none"
    parallel: bool = True

    def structure(self, answer: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """What the output must look like, where an answer without a call would have to look like `answer`.

        A request that wants a call gets one; one that leaves it open gets a call or such an answer, if that is JSON.
        """
        if self.choice in (None, "auto"):
            if answer is None or not (answer.json or answer.json_object):
                return answer
            schema = {"type": "object"} if answer.json is None else json.loads(str(answer.json))
            return self._grammar("start: calls | answer", f"answer: {_json_rule(schema)}")
        return self._grammar("start: calls")

    def _grammar(self, *rules: str) -> StructuredOutputsParams:
        """Rules for `calls`, to the function that the request names or to any; and these."""
        wanted = self.choice["function"]["name"] if isinstance(self.choice, Mapping) else None
        functions = [tool["function"] for tool in self.tools if wanted in (None, tool["function"]["name"])]
        more = f"({json.dumps(self.format.separator)} call)*" if self.parallel and wanted is None else ""
        any_call = " | ".join(f"call_{index}" for index in range(len(functions)))
        lines = [*rules, f"calls: call {more}",
                 f"call: {self._quote(self.format.begin)} ({any_call}) {self._quote(self.format.end)}"]
        for index, function in enumerate(functions):
            head = f'{{"name": "{function["name"]}", "{self.format.arguments}": '
            lines += [f'call_{index}: {json.dumps(head)} arguments_{index} "}}"',
                      f"arguments_{index}: {_json_rule(_arguments_schema(function))}"]
        try:
            return StructuredOutputsParams(grammar="\n".join(lines))
        except RequestError as error:
            raise RequestError(f"tools: {error}", param="tools") from error

    @staticmethod
    def _quote(text: str) -> str:
        return json.dumps(text) if text else ""


def _json_rule(schema: Json) -> str:
    """A schema as the right side of a rule in Lark's notation."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def _arguments_schema(function: Json) -> Json:
    """A function's parameters; left out, it has none."""
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    return {**({} if "$ref" in schema else {"type": "object"}), **schema}


@dataclass
class ToolCallParser:
    """Parts the text of one growing answer into content and calls, as OpenAI's deltas.

    A call's arguments are passed on as they come, as the model wrote them. What turns out to be no call is content.
    """

    tools: Tools
    num_calls: int = 0
    _text: str = ""  # not yet passed on
    _state: str = "text"  # or "call", "arguments", "end", "other" (text in which no call can begin any more)
    _depth: int = 0  # of braces, inside arguments
    _in_string: bool = False
    _is_escaped: bool = False
    _deltas: list[Json] = field(default_factory=list)

    def feed(self, text: str, *, is_last: bool = False) -> list[Json]:
        """What some more text adds to the message: {"content": ...} and {"tool_calls": [...]}, in order."""
        self._text += text
        states = {"text": self._read_text, "call": self._read_call, "arguments": self._read_arguments,
                  "end": self._read_end, "other": self._read_other}
        while states[self._state](is_last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each of these reads what it can of _text; True when another is to go on.

    def _read_text(self, is_last: bool) -> bool:
        begin = self.tools.format.begin.strip()
        if not begin:  # a call is known by its brace, and only where a message or another call has just begun or ended
            rest = self._text.lstrip(" \n;" if self.num_calls else None)
            if not rest and not (is_last and not self.num_calls):
                return False
            self._state, self._text = ("call", rest) if rest.startswith("{") else ("other", self._text)
            return True
        before, found, after = self._text.partition(begin)
        if found:
            self._add_content(before.rstrip())
            self._state, self._text = "call", after
            return True
        end = len(before) if is_last else _certain_length(before, begin)
        if is_last and self.num_calls:
            end = len(before.rstrip())
        self._add_content(before[:end])
        self._text = "" if is_last else before[end:]
        return False

    def _read_other(self, is_last: bool) -> bool:
        self._add_content(self._text)
        self._text = ""
        return False

    def _read_call(self, is_last: bool) -> bool:
        head = HEAD.match(self._text)
        if head is not None and self._is_known(head["name"]):
            self._begin_call(head["name"])
            self._state, self._text = "arguments", self._text[head.end() :]
            return True
        end = self.tools.format.end.strip()
        body, found, after = self._text.partition(end) if end else (self._text, "", "")
        if not found and not is_last and (end or len(self._text) <= MAX_HEAD_LENGTH):
            return False
        call = self._parse(body)
        if call is None:
            self._add_content(f"{self.tools.format.begin.strip()}{body}{found}")
        else:
            self._begin_call(call[0])
            self._add_arguments(call[1])
        self._state = "text" if end else "other"
        self._text = after
        return bool(after)

    def _read_arguments(self, is_last: bool) -> bool:
        for at, char in enumerate(self._text):
            if self._ends_arguments(char):
                self._add_arguments(self._text[: at + 1])
                self._state, self._text = "end", self._text[at + 1 :]
                return True
        self._add_arguments(self._text)
        self._text = ""
        return False

    def _ends_arguments(self, char: str) -> bool:
        """Move on by one character of a JSON object; whether it was the last."""
        if self._in_string:
            is_quote = char == '"' and not self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
            self._in_string = not is_quote
            return False
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return self._depth == 0

    def _read_end(self, is_last: bool) -> bool:
        """The brace around a call and the mark after it; what else comes there is text."""
        end = self.tools.format.end.strip()
        rest = self._text.lstrip()
        is_closed = rest.startswith("}")
        rest = rest[is_closed:].lstrip()
        if len(rest) < len(end) and end.startswith(rest):  # it may yet come
            self._text = "" if is_last else self._text
            return False
        if not end and not is_closed and not rest and not is_last:
            return False
        self._state, self._text = "text", rest.removeprefix(end)
        return bool(self._text)

    def _is_known(self, name: str) -> bool:
        """Without a mark around it, an object is a call only if it names a function that there is."""
        return bool(self.tools.format.begin) or any(tool["function"]["name"] == name for tool in self.tools.tools)

    def _parse(self, body: str) -> tuple[str, str] | None:
        """A whole call, its keys in any order: the name and the arguments' JSON."""
        try:
            call = json.loads(body)
            name = call["name"]
            arguments = call["arguments"] if "arguments" in call else call["parameters"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not isinstance(name, str) or not NAME.fullmatch(name) or not self._is_known(name):
            return None
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    @property
    def _is_dropped(self) -> bool:
        """Of several calls, a request may want only the first."""
        return self.num_calls > 1 and not self.tools.parallel

    def _add_content(self, text: str) -> None:
        if text:
            self._deltas.append({"content": text})

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        if not self._is_dropped:
            self._deltas.append({"tool_calls": [{
                "index": self.num_calls - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                "function": {"name": name, "arguments": ""}}]})

    def _add_arguments(self, text: str) -> None:
        if text and not self._is_dropped:
            self._deltas.append({"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]})


def join_deltas(deltas: Sequence[Json]) -> Json:
    """A message's content and tool_calls (without their index), from all its deltas; what there is none of is left out."""
    message: Json = {}
    for delta in deltas:
        if "content" in delta:
            message["content"] = message.get("content", "") + delta["content"]
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return message


def _certain_length(text: str, mark: str) -> int:
    """How much of a text can belong neither to a mark that begins at its end nor to the space before that."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    held = next((length for length in lengths if mark.startswith(text[-length:])), 0)
    return len(text[: len(text) - held].rstrip())
