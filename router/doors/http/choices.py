"""Choices of OpenAI-style responses: log-probabilities, usage and finish reasons as clients read them.

Pure functions of the router's deliveries. What may not live here: events (`event_stream.py`), requests.
"""

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.router.events import Usage
from holdfast.worker.request import FinishReason, TokenLogprob

TokenText = Callable[[int], str]
"""The text of a single token."""


def usage_of(usage: Usage) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


def finish_of(reason: FinishReason | None) -> str | None:
    """The finish reason in OpenAI's words, which have none for an abort."""
    return None if reason is None else "stop" if reason is FinishReason.ABORT else str(reason)


def chat_logprobs(logprobs: Sequence[TokenLogprob], text_of: TokenText) -> dict[str, Any] | None:
    """The logprobs object of a chat's choice; null where none are asked for."""
    if not logprobs:
        return None
    content = [
        {
            **_named(item.token_id, item.logprob, text_of),
            "top_logprobs": [_named(token_id, logprob, text_of) for token_id, logprob in item.top],
        }
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def _named(token_id: int, logprob: float, text_of: TokenText) -> dict[str, Any]:
    text = text_of(token_id)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | None], text_of: TokenText, *, first_offset: int = 0, first_token_id: int = 0
) -> dict[str, Any] | None:
    """The logprobs object of a completion's choice, from a character of its text on. `None` among them is the first
    token of a prompt, `first_token_id`, of which nothing can be said."""
    if not logprobs:
        return None
    tokens = [text_of(first_token_id if item is None else item.token_id) for item in logprobs]
    offsets, at = [], first_offset
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if item is None else max(item.logprob, -9999.0) for item in logprobs],
        "top_logprobs": [None if item is None else _best(item, text_of) for item in logprobs],
        "text_offset": offsets,
    }


def _best(item: TokenLogprob, text_of: TokenText) -> dict[str, float]:
    """The likeliest tokens and the token itself, by text; of several tokens of one text the likeliest."""
    best: dict[str, float] = {}
    for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
        best.setdefault(text_of(token_id), max(logprob, -9999.0))
    return best


def prompt_logprobs_of(logprobs: Sequence[TokenLogprob], text_of: TokenText) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by prompt position, null for the first, entries by token id."""
    entries: list[dict[str, Any] | None] = [None]
    for item in logprobs:
        told = {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text_of(token_id)}
            for rank, (token_id, logprob) in enumerate(item.top, 1)
        }
        told[str(item.token_id)] = {
            "logprob": item.logprob,
            "rank": item.rank,
            "decoded_token": text_of(item.token_id),
        }
        entries.append(told)
    return entries
