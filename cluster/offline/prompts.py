"""Prompts as callers of `LLM` give them: text, token ids, or mappings by vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Required, TypedDict, Unpack

from holdfast.cluster.offline.inference_engine import Prompt
from holdfast.router.chat import Message
from holdfast.router.text.chat import render_chat
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.tools.tools import checked_tools
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import checked_prompt, checked_text, checked_token_ids, is_list, is_whole


class TextPrompt(TypedDict, total=False):
    """A prompt in text."""

    prompt: Required[str]
    cache_salt: str
    """Only prompts with the same one find each other's prefixes in the cache."""


class TokensPrompt(TypedDict, total=False):
    """A prompt in token ids. Its text, if it is given as well, is shown in the output and not looked at."""

    prompt_token_ids: Required[Sequence[int]]
    prompt: str
    cache_salt: str


PromptInput = str | TextPrompt | TokensPrompt | Mapping[str, object]

_KNOWN: Final = TextPrompt.__annotations__.keys() | TokensPrompt.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class Given:
    """One prompt, in whichever way it was given."""

    prompt: Prompt
    cache_salt: str | None = None
    text: str | None = None
    """Text shown as the prompt in the output, for a prompt given in token ids."""


def prompt_list(prompts: PromptInput | Sequence[PromptInput] | Sequence[int]) -> list[Given]:
    """One prompt may be given without a list, also as a list of token ids. Raises `InvalidRequestError`."""
    if isinstance(prompts, str | Mapping):
        return [_given(prompts)]
    if not is_list(prompts):
        raise InvalidRequestError("prompts", prompts, "must be a prompt or a list of prompts")
    if prompts and is_whole(prompts[0]):
        return [_given({"prompt_token_ids": prompts})]
    return list(map(_given, prompts))


def _given(item: object) -> Given:
    """A mapping may hold nothing that is not known, lest it be ignored; None is nothing."""
    if not isinstance(item, Mapping):
        return Given(checked_prompt(item))
    if unknown := [key for key, value in item.items() if key not in _KNOWN and value is not None]:
        raise InvalidRequestError("prompt", unknown, "must have prompt or prompt_token_ids, and nothing else")
    salt = item.get("cache_salt")
    cache_salt = None if salt is None else checked_text("cache_salt", salt)
    if (token_ids := item.get("prompt_token_ids")) is not None:
        text = item.get("prompt")
        shown = None if text is None else checked_text("prompt", text)
        return Given(checked_token_ids("prompt_token_ids", token_ids), cache_salt, shown)
    return Given(checked_text("prompt", item.get("prompt")), cache_salt)


_NOTHING: Final[Mapping[str, Any]] = {}


class ChatShape(TypedDict, total=False):
    """Options for rendering a chat, as `chat_prompt` takes them."""

    template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]


def chat_list(
    tokenizer: Tokenizer, messages: Sequence[Message] | Sequence[Sequence[Message]], **shape: Unpack[ChatShape]
) -> list[Given]:
    """The prompt of one conversation, or of each of several. Raises what `chat_prompt` raises."""
    is_one = not is_list(messages) or not messages or isinstance(messages[0], Mapping)
    texts = [chat_prompt(tokenizer, one, **shape) for one in ([messages] if is_one else messages)]  # type: ignore[arg-type]  # it is checked there
    return [Given(tokenizer.encode(text, add_special_tokens=False), text=text) for text in texts]


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
    """The prompt that makes the model answer, or go on with the final message. Without `template`, by the model's own;
    it may also be the name of one of them.

    Raises `InvalidRequestError` for messages that are malformed, and where there is no chat template.
    """
    if continue_final_message and add_generation_prompt:
        limit = "must not be set with add_generation_prompt: a new message would begin"
        raise InvalidRequestError("continue_final_message", True, limit)
    shown = [tool.for_template() for tool in checked_tools(tools)]
    if template is None or template in tokenizer.chat_templates:
        template = tokenizer.template_of(has_tools=bool(shown), name=template or "")
    return render_chat(
        template,
        messages,
        add_generation_prompt,
        special_tokens=tokenizer.special_tokens,
        template_kwargs={**template_kwargs, "tools": shown or None},
        continue_final_message=continue_final_message,
    )
