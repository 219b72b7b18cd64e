"""Arguments of calls of `LLM`, beside prompts and parameters: classes of service, older names, and vLLM's for what is
not here.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from holdfast.cluster.call_options import ServiceOfAll, ServiceOptions
from holdfast.cluster.offline.prompts import Given
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.value_types import is_list, is_whole

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Read = TypeVar("Read")
Returned = TypeVar("Returned")

_UNUSED: Final = frozenset(
    {
        *("lora_request", "mm_processor_kwargs", "tokenization_kwargs", "trace_headers", "data_parallel_rank"),
        *("prompt_text", "session_id", "kv_hints", "reasoning_ended", "reasoning_parser_kwargs", "arrival_time"),
    }
)


def check_unused(**named: object) -> None:
    """vLLM's arguments for what is not here: nothing may be asked for by them."""
    for name, value in named.items():
        if name not in _UNUSED:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value:
            raise InvalidRequestError(name, value, "must not be set: it is not supported")


def takes_arguments_of(
    read: Callable[Concatenate[Owner, Arguments], Read],
) -> Callable[[Callable[[Owner, Read], Returned]], Callable[Concatenate[Owner, Arguments], Returned]]:
    """A method is called with the arguments of `read`, and gets what that makes of them: a signature of several."""

    def decorated(method: Callable[[Owner, Read], Returned]) -> Callable[Concatenate[Owner, Arguments], Returned]:
        def call(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
            return method(self, read(self, *args, **kwargs))

        functools.update_wrapper(call, method)
        returned = inspect.signature(method).return_annotation
        call.__signature__ = inspect.signature(read).replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorated


def either_prompts(prompts: Any, prompt_token_ids: Any) -> Any:
    """The prompts, by their name or by the older one for token ids."""
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequestError("prompts", prompts, "must be given; prompt_token_ids is an older name for token ids")
    if prompt_token_ids is None:
        return prompts
    is_one = not is_list(prompt_token_ids) or not prompt_token_ids or is_whole(prompt_token_ids[0])
    return [{"prompt_token_ids": item} for item in ([prompt_token_ids] if is_one else prompt_token_ids)]


def service_of_each(
    given: Sequence[Given], priority: Priority | int | Sequence[Priority | int] | None, service: ServiceOfAll
) -> list[ServiceOptions]:
    if is_list(priority) and len(priority) != len(given):
        raise InvalidRequestError("priority", len(priority), f"must be one, or {len(given)} of them")
    services: list[ServiceOptions] = []
    for item, one in zip(given, priority if is_list(priority) else [priority] * len(given), strict=True):
        options: ServiceOptions = {**service, "priority": _priority(one)}
        if item.cache_salt is not None:
            options["cache_salt"] = item.cache_salt
        services.append(options)
    return services


def _priority(priority: object) -> Priority:
    """Holdfast's `Priority`, or vLLM's number, of which lower ones go first and 0 is normal."""
    if priority is None or isinstance(priority, Priority):
        return Priority.NORMAL if priority is None else priority
    if not is_whole(priority):
        raise InvalidRequestError("priority", priority, "must be a Priority, or a whole number")
    return Priority.of_number(priority)
