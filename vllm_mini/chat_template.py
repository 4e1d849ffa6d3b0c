"""A conversation as the one text that a model was trained on: OpenAI's messages, rendered by the model's Jinja template.

A template is code from a model's files, so it runs in a sandbox. Its output equals that of Hugging Face's transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from vllm_mini.config import ConfigError
from vllm_mini.sequence import RequestError

__all__ = ["ChatTemplate", "normalize_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks, in a rendered chat, where the last message is to be continued


class ChatTemplate:
    """One compiled template. ConfigError for a text that is none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._template = _compile_template(text)

    def render(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None, **variables: Any,
    ) -> str:
        """Raises RequestError for malformed messages, and with the template's own words if it refuses them."""
        chat = normalize_messages(messages)
        final_text = chat[-1]["content"]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("continue_final_message and add_generation_prompt cannot both be true",
                                   param="continue_final_message")
            chat[-1]["content"] += CONTINUE_TAG
        text = _render(self._template, {
            "documents": None, **variables, "messages": chat, "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt})
        return _cut_to_continue(text, final_text) if continue_final_message else text


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """OpenAI's messages as chat templates expect them: new dictionaries with known roles and plain text as content.

    Text parts are joined with a newline, as vLLM does; "developer" becomes "system"; the null content of an assistant
    message with tool calls becomes ""; the arguments of tool calls are objects; other keys pass unless they are null.
    Raises RequestError whose `param` is the path to the fault.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        _refuse("messages", "must be a list of at least one message")
    return [_normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _refuse(path: str, complaint: str) -> NoReturn:
    raise RequestError(f"{path} {complaint}", param=path)


def _normalize_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(path, "must be an object with a role and a content")
    role, content, tool_calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        _refuse(f"{path}.role", f"must be one of {', '.join(ROLES)}, not {role!r:.40}" if role else "is missing")
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = "system" if role == "developer" else role
    if tool_calls:
        if not isinstance(tool_calls, (list, tuple)):
            _refuse(f"{path}.tool_calls", "must be a list")
        normal["tool_calls"] = [_parse_arguments(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(tool_calls)]
    if content is None and role == "assistant" and tool_calls:
        content = ""
    normal["content"] = _content_text(content, f"{path}.content")
    return normal


def _content_text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        _refuse(path, "must be a string or a list of text parts" if content is not None else "is missing")
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            _refuse(f"{path}[{index}]", 'must be {"type": "text", "text": "..."}: this model reads only text')
    return "\n".join(part["text"] for part in content)


def _parse_arguments(call: Any, path: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, which templates expect; OpenAI sends them as JSON text."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {**call, "function": function}
    except (KeyError, TypeError, ValueError, RecursionError):
        _refuse(path, "must be an object with a function, whose arguments are JSON")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's words for training; here its body is rendered and that is all."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _compile_template(text: str) -> jinja2.Template:
    """A template, in transformers' environment for them. It is code from a model's files: hence the sandbox."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError) as error:
        raise ConfigError("chat template: it is nested too deeply") from error


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render for a client's eyes: the RequestError shows the template's own words, but nothing of Python."""
    try:
        return template.render(variables)
    except SecurityError as error:
        raise RequestError("the chat template does what its sandbox forbids", param="messages") from error
    except jinja2.TemplateError as error:
        raise RequestError(f"chat template: {error.message}", param="messages") from error
    except Exception as error:  # whatever an expression in the template can raise
        raise RequestError("the chat template cannot render these messages", param="messages") from error


def _cut_to_continue(rendered: str, final_text: str) -> str:
    """End the rendered chat where the final message ends, without what the template writes after it."""
    tag = CONTINUE_TAG.strip()
    if tag not in rendered or final_text.strip() not in rendered:
        raise RequestError("the chat template leaves out or changes the final message, so it cannot be continued",
                           param="continue_final_message")
    at = rendered.rindex(tag)
    # A template that strips its messages has stripped the tag's space too, and would have stripped the text's.
    return rendered[:at] if rendered.startswith(CONTINUE_TAG, at) else rendered[:at].rstrip()
