"""Chat template renderer: turns a list of messages into the prompt text that the model was trained on.

A template is untrusted code that comes with a model, so it runs in jinja2's sandbox, within a budget of steps
(`template_budget.py`), and gets only plain data and a few helpers. Chats of all APIs are rendered here, so the
adaptations for a template's limits (`adapted_messages.py`) apply to all of them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from holdfast.router.chat import Chat, Message, check_messages, plain_messages
from holdfast.router.text.adapted_messages import adapted
from holdfast.router.text.template_budget import BudgetedEnvironment, BudgetExceededError, spending
from holdfast.router.text.template_traits import TemplateTraits, drops_role, traits_of
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import ConfigurationError, InvalidRequestError

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

FEW_STEPS: Final = 20_000
"""Steps of a template that take some milliseconds."""
_STEPS: Final = 4_000_000
_STEPS_PER_BYTE: Final = 20  # of a chat, for its template

_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind the content that an output goes on with, to find its end in the rendered text, as transformers does. By
the space it is seen whether the template trims content.
"""
_PROBED_AT: Final = datetime(2024, 2, 29, tzinfo=UTC)
_KNOWN_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def chat_text(tokenizer: Tokenizer, chat: Chat, steps: int | None = None) -> str:
    """The prompt for a chat, by the tokenizer's chat template. Raises what `render_chat` raises.

    Maximum number of steps of the template; None: the default for a chat of this size. A pure function of the chat if
    `now_s` is set. Dates are in UTC, in any time zone.
    """
    now = datetime.now(UTC) if chat.now_s is None else datetime.fromtimestamp(chat.now_s, UTC)
    return render_chat(
        tokenizer.template_of(has_tools=bool(chat.template_kwargs.get("tools")), name=chat.template),
        chat.messages,
        special_tokens=tokenizer.special_tokens,
        template_kwargs=chat.template_kwargs,
        continue_final_message=chat.continue_final_message,
        now=lambda: now,
        steps=_STEPS + _STEPS_PER_BYTE * chat.num_bytes if steps is None else steps,
    )


_MARK: Final = "HOLDFASTCACHEMARK{}X"


def mark_places(tokenizer: Tokenizer, chat: Chat, text: str) -> list[int | None]:
    """Characters of a chat's prompt, which is `text`, before each of its marks; None: not known, since the template
    does not show the place as it is. It is found by rendering the chat with a tag at each mark.
    """
    messages = [dict(message) for message in plain_messages(chat.messages)]
    ordered = sorted(enumerate(chat.marks), key=lambda one: (one[1].message, one[1].num_chars), reverse=True)
    for number, mark in ordered:  # from the last, so that places before it stay where they are
        if mark.message < len(messages):
            content = messages[mark.message]["content"]
            tag = _MARK.format(number)
            messages[mark.message]["content"] = content[: mark.num_chars] + tag + content[mark.num_chars :]
    places: list[int | None] = [None] * len(chat.marks)
    tagged = chat_text(tokenizer, replace(chat, messages=messages))
    for number, mark in reversed(ordered):
        if mark.message >= len(messages):
            places[number] = len(text)
            continue
        before, tag, after = tagged.partition(_MARK.format(number))
        tagged = before + after
        places[number] = len(before) if tag else None
    return places if tagged == text else [None] * len(places)


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    *,
    special_tokens: Mapping[str, str] = _NOTHING,
    template_kwargs: Mapping[str, Any] = _NOTHING,
    continue_final_message: bool = False,
    now: Callable[[], datetime] = datetime.now,
    steps: int = _STEPS,
) -> str:
    """The prompt for `messages`. It contains its special tokens: encode it with `add_special_tokens=False`.

    `special_tokens` are the names that templates use (`bos_token`, `eos_token`, ...), see `Tokenizer.special_tokens`.
    With `continue_final_message` the prompt ends with the last message's content.

    Raises `InvalidRequestError` for messages that are malformed or that the template refuses or does not show, its
    subclass `TemplateBudgetError` for a template that takes more than `steps` steps or makes too long a text, and
    `ConfigurationError` for a template that does not compile.
    """
    if template is None:
        way_out = "send a text prompt instead, or serve it with a template (--chat-template)"
        raise InvalidRequestError("chat", messages, f"this model has no chat template; {way_out}")
    check_messages(messages)
    variables = {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "tools": None,
        "documents": None,
        **template_kwargs,
    }
    traits = template_traits(template, special_tokens)
    tools = variables["tools"]
    taken = adapted(plain_messages(messages), traits, tools if isinstance(tools, list) else ())
    _check_roles(template, special_tokens, taken)
    if continue_final_message:
        taken[-1] = {**taken[-1], "content": (taken[-1]["content"] or "") + _TAG}
    own = {**special_tokens, "messages": taken, "strftime_now": lambda form: now().strftime(form)}
    if reserved := sorted(own.keys() & template_kwargs.keys()):
        raise InvalidRequestError("chat.template_kwargs", reserved, "are not for a request to set")
    try:
        text = _rendered(template, variables | own, steps)
    except BudgetExceededError as error:
        raise TemplateBudgetError(error.message or "") from error
    except Exception as error:  # a template may raise anything, and most failures are due to the messages
        limit = f"the model's chat template refuses them: {error}"
        raise InvalidRequestError("chat.messages", messages, limit) from error
    return _cut_at_tag(text, messages) if continue_final_message else text


def _rendered(template: str, variables: Mapping[str, Any], steps: int) -> str:
    compiled = _compiled(template)
    with spending(steps):
        return compiled.render(variables)


def _cut_at_tag(text: str, messages: Sequence[Message]) -> str:
    """A rendered chat up to the end of its last message's content."""
    end = text.rfind(_TAG.strip())
    if end < 0:
        limit = "must end with a message whose content the model's chat template shows: it is to go on"
        raise InvalidRequestError("chat.messages", messages[-1], limit)
    return text[:end] if text.startswith(_TAG, end) else text[:end].rstrip()


def template_traits(template: str, special_tokens: Mapping[str, str] = _NOTHING) -> TemplateTraits:
    """Traits of a template, found once. Raises `ConfigurationError` for a template that does not compile."""
    _compiled(template)
    return _traits(template, tuple(special_tokens.items()))


@lru_cache(maxsize=64)
def _traits(template: str, special_tokens: tuple[tuple[str, str], ...]) -> TemplateTraits:
    return traits_of(template, partial(_probed, template, special_tokens))


@lru_cache(maxsize=256)
def _drops_role(template: str, special_tokens: tuple[tuple[str, str], ...], role: str) -> bool:
    return drops_role(role, partial(_probed, template, special_tokens))


def _probed(
    template: str,
    special_tokens: tuple[tuple[str, str], ...],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    variables = {
        **dict(special_tokens),
        "messages": list(messages),
        "tools": tools,
        "documents": None,
        "add_generation_prompt": True,
        "strftime_now": _PROBED_AT.strftime,
    }
    return _rendered(template, variables, FEW_STEPS)


def _check_roles(template: str, special_tokens: Mapping[str, str], messages: Sequence[Message]) -> None:
    """Raises `InvalidRequestError` for a role whose messages the template would silently drop."""
    for role in {message["role"] for message in messages} - _KNOWN_ROLES:
        if _drops_role(template, tuple(special_tokens.items()), role):
            raise InvalidRequestError("chat.messages", role, f"the model's chat template shows no messages of {role!r}")


def check_template(template: str, name: str) -> None:
    """Raises `ConfigurationError` for a template that does not compile. `name` is what its user calls it."""
    try:
        _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(f"{name}: the template does not compile: {error} (line {error.lineno})") from error


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        way_out = "mend chat_template in tokenizer_config.json, or chat_template.jinja"
        reason = f"the model's chat template does not compile: {error} (line {error.lineno}); {way_out}"
        raise ConfigurationError(reason) from error


@lru_cache(maxsize=1)
def _environment() -> BudgetedEnvironment:
    """The jinja2 dialect of published templates: block trimming, loop controls, and the usual helpers."""
    environment = BudgetedEnvironment(
        {"tojson": _to_json}, trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.globals["raise_exception"] = _raise
    return environment


class TemplateBudgetError(InvalidRequestError):
    """The model's chat template does more than it may with these messages and variables."""

    def __init__(self, message: str) -> None:
        super().__init__("chat", "the model's chat template", f"cannot be rendered: {message}")


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training. A prompt keeps only its content."""

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
    """Plain JSON. jinja2's own `tojson` filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
