"""Chat templates: a list of messages becomes the prompt text that the model was trained on.

A template is a program that comes with a model, so it runs in jinja2's sandbox and sees plain data and a handful of
helpers only. No tokens here, and no opinion on roles beyond their spelling: the template knows which ones it takes.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.worker.errors import ConfigurationError, InvalidRequestError

_ROLE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""What a role may look like. Templates paste it between control tokens, so nothing else may get in."""

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    *,
    special_tokens: Mapping[str, str] = _NOTHING,
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """The prompt for `messages`. It holds its own special tokens: encode it with `add_special_tokens=False`.

    `special_tokens` are the names that templates use (`bos_token`, `eos_token`, ...), see `Tokenizer.special_tokens`.
    Raises `InvalidRequestError` for messages that are malformed or that the template refuses, and `ConfigurationError`
    for a template that does not compile.
    """
    if template is None:
        raise InvalidRequestError("messages", messages, "this model has no chat template; send a text prompt instead")
    _check(messages)
    compiled = _compiled(template)
    try:
        return compiled.render(
            **special_tokens,
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            strftime_now=lambda form: now().strftime(form),
        )
    except Exception as error:  # a template is foreign code: it may fail in any way, and mostly because of the messages
        raise InvalidRequestError("messages", messages, f"the model's chat template refuses them: {error}") from error


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", messages, "must be a list of messages")
    if not messages:
        raise InvalidRequestError("messages", messages, "must have at least one message")
    for index, message in enumerate(messages):
        _check_message(index, message)


def _check_message(index: int, message: Mapping[str, Any]) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequestError("messages", message, f"message {index} must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequestError(
            "messages", role, f"the role of message {index} must be a name like user or assistant"
        )
    if not isinstance(content, str | list) and not (content is None and role == "assistant"):
        raise InvalidRequestError("messages", content, f"the content of message {index} must be text")


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        way_out = "mend chat_template in tokenizer_config.json, or chat_template.jinja"
        reason = f"the model's chat template does not compile: {error} (line {error.lineno}); {way_out}"
        raise ConfigurationError(reason) from error


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect that published templates are written in: block trimming, loop controls, and these helpers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training. In a prompt it means nothing: keep its inside."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
