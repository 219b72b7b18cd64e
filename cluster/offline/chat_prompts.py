"""Prompts of conversations: messages in OpenAI's shape, tools, and a final message to go on with, by a chat template.

What may not live here: templates themselves (`router/text/chat.py`), and reading calls out of an output.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.router.chat import Message
from holdfast.router.text.chat import render_chat
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.tools.tools import checked_tools
from holdfast.worker.errors import InvalidRequestError

_NOTHING: Final[Mapping[str, Any]] = {}


def chat_token_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] = _NOTHING,
) -> list[int]:
    """The prompt that makes the model answer, or go on with the final message. Without `template`, by the model's own.

    Raises `InvalidRequestError` for messages that are malformed, and where there is no chat template.
    """
    return tokenizer.encode(
        chat_prompt(
            tokenizer,
            messages,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        ),
        add_special_tokens=False,
    )


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] = _NOTHING,
) -> str:
    """The same as text. `template` may also be the name of one of the model's own."""
    if continue_final_message and add_generation_prompt:
        limit = "must not be set with add_generation_prompt: a new message would begin"
        raise InvalidRequestError("continue_final_message", True, limit)
    told = [tool.for_template() for tool in checked_tools(tools)]
    if template is None or template in tokenizer.chat_templates:
        template = tokenizer.template_of(has_tools=bool(told), name=template or "")
    return render_chat(
        template,
        messages,
        add_generation_prompt,
        special_tokens=tokenizer.special_tokens,
        template_kwargs={**template_kwargs, "tools": told or None},
        continue_final_message=continue_final_message,
    )
