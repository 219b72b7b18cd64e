"""Prompts of conversations: messages in OpenAI's shape, tools, and a final message to go on with, by a chat template.

What may not live here: templates themselves (`router/text/chat.py`), and reading calls out of an output.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.router.chat import Message, check_messages, flat_message, with_arguments
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
    if continue_final_message and add_generation_prompt:
        limit = "must not be set with add_generation_prompt: a new message would begin"
        raise InvalidRequestError("continue_final_message", True, limit)
    check_messages(messages)
    flat = [with_arguments(flat_message(message)) for message in messages]
    text = render_chat(
        template or tokenizer.chat_template,
        flat,
        add_generation_prompt,
        special_tokens=tokenizer.special_tokens,
        template_kwargs={**template_kwargs, "tools": [tool.for_template() for tool in checked_tools(tools)] or None},
    )
    if continue_final_message:
        text = _cut_after(text, flat[-1])
    return tokenizer.encode(text, add_special_tokens=False)


def _cut_after(text: str, final: Message) -> str:
    """A rendered chat up to the end of its final message's content, as Hugging Face's tokenizers cut it."""
    content = final.get("content") or ""
    begin = text.rfind(content.strip())
    if not content.strip() or begin < 0:
        raise InvalidRequestError("messages", content, "must end with a message that the template shows as it stands")
    kept = content.lstrip() if text.startswith(content.lstrip(), begin) else content.strip()
    return text[: begin + len(kept)]
