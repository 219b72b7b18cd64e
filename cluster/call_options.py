"""Options of a call besides its prompt and parameters, as keyword arguments shared by the clients of a cluster."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority


class ServiceOfAll(TypedDict, total=False):
    """Options that all requests of a call have in common. None of them changes a token of the completion."""

    tenant: str
    """On whose account; tenants share by `scheduler.tenant_shares`."""
    timeout_s: float | None
    """Seconds after which the request ends with a `DeadlineExceededError`."""
    cache_salt: str
    """Only requests with the same one find each other's prefixes in the cache."""
    cache_ttl_s: int
    """Seconds for which the prompt's prefix is kept in the cache, and on the disk below it; 0: while there is room."""


class ServiceOptions(ServiceOfAll, total=False):
    """Options of one request."""

    priority: Priority
    """The class of service; `NORMAL` by default."""


def check_timeout(timeout_s: float | None) -> None:
    """Raises `InvalidRequestError` for a timeout that is over before it begins. It must be known to be a number."""
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequestError("timeout_s", timeout_s, "must be above 0")


class CallOptions(ServiceOptions, total=False):
    """Options of a call. Those of chats need `messages`."""

    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables of the chat template, such as `enable_thinking`; `add_generation_prompt` is true unless it is
    here."""
    continue_final_message: bool
    """The output goes on with the last message, whose turn stays open."""
    chat_template: str | None
    """The name of one of the model's chat templates."""
    tools: Sequence[Mapping[str, Any]]
    """Functions that the model may call, in OpenAI's shape. Answers then have `chat`."""
    tool_choice: str | Mapping[str, Any] | None
    """`auto`, `none`, `required`, or an object that names a function."""
    parallel_tool_calls: bool
    """Whether one answer may have several calls; true unless said otherwise."""
    split_reasoning: bool
    """Answers have `chat`, with thoughts apart, where the model's template knows them."""
