"""Chat template renderer: turns a list of messages into the prompt text that the model was trained on.

A template is untrusted code that comes with a model, so it runs in jinja2's sandbox, within a budget of steps
(`template_budget.py`), and gets only plain data and a few helpers. What may not live here: tokens, and which roles
there are: the template decides that.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from holdfast.router.chat import Chat, Message, check_messages
from holdfast.router.text.template_budget import BudgetedEnvironment, SpentError, spending
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import ConfigurationError, InvalidRequestError

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

FEW_STEPS: Final = 20_000
"""Of templates: some milliseconds."""
_STEPS: Final = 4_000_000
_STEPS_PER_BYTE: Final = 20


def chat_text(tokenizer: Tokenizer, chat: Chat, steps: int | None = None) -> str:
    """The prompt for a chat, by the tokenizer's chat template. Raises what `render_chat` raises.

    The template may take so many steps; None: as many as a chat of this size may need. A pure function of the chat if
    `now_s` is set. Dates are in UTC, in any time zone.
    """
    now = datetime.now(UTC) if chat.now_s is None else datetime.fromtimestamp(chat.now_s, UTC)
    return render_chat(
        tokenizer.chat_template,
        chat.messages,
        special_tokens=tokenizer.special_tokens,
        template_kwargs=chat.template_kwargs,
        now=lambda: now,
        steps=_STEPS + _STEPS_PER_BYTE * chat.num_bytes if steps is None else steps,
    )


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    *,
    special_tokens: Mapping[str, str] = _NOTHING,
    template_kwargs: Mapping[str, Any] = _NOTHING,
    now: Callable[[], datetime] = datetime.now,
    steps: int = _STEPS,
) -> str:
    """The prompt for `messages`. It contains its special tokens: encode it with `add_special_tokens=False`.

    `special_tokens` are the names that templates use (`bos_token`, `eos_token`, ...), see `Tokenizer.special_tokens`.
    Raises `InvalidRequestError` for messages that are malformed or that the template refuses, `TemplateBudgetError`,
    which is one, for a template that takes more than so many `steps` or makes too long a text, and `ConfigurationError`
    for a template that does not compile.
    """
    if template is None:
        way_out = "send a text prompt instead, or serve it with a template (--chat-template)"
        raise InvalidRequestError("chat", messages, f"this model has no chat template; {way_out}")
    check_messages(messages)
    compiled = _compiled(template)
    variables = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None, **template_kwargs}
    own = {
        **special_tokens,
        "messages": [dict(message) for message in messages],
        "strftime_now": lambda form: now().strftime(form),
    }
    if reserved := sorted(own.keys() & template_kwargs.keys()):
        raise InvalidRequestError("chat.template_kwargs", reserved, "are not for a request to set")
    try:
        with spending(steps):
            return compiled.render(variables | own)
    except SpentError as error:
        raise TemplateBudgetError(error.message or "") from error
    except Exception as error:  # a template may raise anything, and most failures are due to the messages
        limit = f"the model's chat template refuses them: {error}"
        raise InvalidRequestError("chat.messages", messages, limit) from error


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

    def __init__(self, told: str) -> None:
        super().__init__("chat", "the model's chat template", f"cannot be rendered: {told}")


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
