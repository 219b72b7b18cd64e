"""Choices of OpenAI-style responses: log-probabilities, usage and finish reasons as clients read them.

Pure functions of the router's deliveries. What may not live here: events (`event_stream.py`), requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.router.doors.token_logprobs import by_token_id, logprob_of
from holdfast.router.events import Usage
from holdfast.router.text.token_table import TokenTable
from holdfast.worker.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How one response writes tokens: as texts, or as `token_id:7` where the request asks for that."""

    tokens: TokenTable
    are_ids: bool = False

    def in_chat(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.are_ids else self.tokens.text_of(token_id)

    def in_completion(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.are_ids else self.tokens.name_of(token_id)

    def keys(self, token_ids: Iterable[int]) -> dict[int, str]:
        """A different name for each token, for objects that have tokens as their keys."""
        if self.are_ids:
            return {token_id: f"token_id:{token_id}" for token_id in token_ids}
        return self.tokens.distinct_names(token_ids)


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


def chat_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any] | None:
    """The logprobs object of a chat's choice; null where none are asked for."""
    if not logprobs:
        return None
    return {"content": listed_logprobs(logprobs, names), "refusal": None}


def listed_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> list[dict[str, Any]]:
    """Of each token: itself and the best ones."""
    return [
        {
            **_named(item.token_id, item.logprob, names),
            "top_logprobs": [_named(token_id, logprob, names) for token_id, logprob in item.top],
        }
        for item in logprobs
    ]


def _named(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    written = list(names.tokens.bytes_of(token_id))
    return {"token": names.in_chat(token_id), "logprob": logprob_of(logprob), "bytes": written}


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | None],
    names: TokenNames,
    *,
    text_offsets: Sequence[int],
    first_token_id: int = 0,
) -> dict[str, Any] | None:
    """The logprobs object of a completion's choice. `None` among them is the first token of a prompt,
    `first_token_id`, of which nothing can be said. `text_offsets` has one for each.
    """
    if not logprobs:
        return None
    return {
        "tokens": [names.in_completion(first_token_id if item is None else item.token_id) for item in logprobs],
        "token_logprobs": [None if item is None else logprob_of(item.logprob) for item in logprobs],
        "top_logprobs": [None if item is None else _best(item, names) for item in logprobs],
        "text_offset": list(text_offsets),
    }


def _best(item: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The likeliest tokens and the token itself, by text."""
    said = dict(item.top)
    said.setdefault(item.token_id, item.logprob)
    keys = names.keys(said)
    return {keys[token_id]: logprob_of(logprob) for token_id, logprob in said.items()}


def prompt_logprobs_of(logprobs: Sequence[TokenLogprob], tokens: TokenTable) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by prompt position, null for the first, entries by token id."""
    return [None, *(by_token_id(item, tokens) for item in logprobs)]
