"""Prompts as callers of `LLM` give them: text, token ids, or mappings by vLLM's names.

What may not live here: limits, and what needs a model (`router/requests/request_processor.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Required, TypedDict

from holdfast.cluster.offline.inference_engine import Prompt
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import checked_prompt, checked_text, checked_token_ids, is_list, is_whole


class TextPrompt(TypedDict, total=False):
    """A prompt in text."""

    prompt: Required[str]
    cache_salt: str
    """Only prompts with the same one find each other's prefixes in the cache."""


class TokensPrompt(TypedDict, total=False):
    """A prompt in token ids. Its text, if it is given as well, is not looked at."""

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


def prompt_list(prompts: PromptInput | Sequence[PromptInput] | Sequence[int]) -> list[Given]:
    """One prompt may be given without a list, also as a list of token ids. Raises `InvalidRequestError`."""
    if isinstance(prompts, str | Mapping):
        return [_given(prompts)]
    if not is_list(prompts):
        raise InvalidRequestError("prompts", prompts, "must be a prompt or a list of prompts")
    if prompts and is_whole(prompts[0]):
        return [_given({"prompt_token_ids": prompts})]
    return [_given(item) for item in prompts]


def _given(item: object) -> Given:
    """A mapping may hold nothing that is not known, lest it be ignored; None is nothing."""
    if not isinstance(item, Mapping):
        return Given(checked_prompt(item))
    if unknown := [key for key, value in item.items() if key not in _KNOWN and value is not None]:
        raise InvalidRequestError("prompt", unknown, "must have prompt or prompt_token_ids, and nothing else")
    salt = item.get("cache_salt")
    cache_salt = None if salt is None else checked_text("cache_salt", salt)
    if (token_ids := item.get("prompt_token_ids")) is not None:
        return Given(checked_token_ids("prompt_token_ids", token_ids), cache_salt)
    return Given(checked_text("prompt", item.get("prompt")), cache_salt)
