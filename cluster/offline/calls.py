"""Calls of `LLM`: prompts and arguments in vLLM's forms, and the requests of one call, which run together."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Required, TypedDict, TypeVar, Unpack

from holdfast.cluster.call_options import ServiceOfAll, ServiceOptions
from holdfast.cluster.offline.inference_engine import InferenceEngine, Prompt
from holdfast.cluster.offline.lora import LoRARequest, LoRARequests, lora_of_each
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.cluster.offline.request_handle import RequestHandle
from holdfast.cluster.progress_bars import progress
from holdfast.router.chat import Message
from holdfast.router.text.chat import render_chat
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.tools.tools import checked_tools
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import checked_prompt, checked_text, checked_token_ids, is_list, is_whole

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

# --- prompts ---


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
    """A mapping with an unknown key is refused, so that no key is silently ignored; None is nothing."""
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


# --- other arguments ---


def check_unused(**named: object) -> None:
    """vLLM's arguments for unsupported features: only neutral values are accepted."""
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


class Enqueued(NamedTuple):
    """One request of a call."""

    request_id: str
    """Empty: the engine chooses one."""
    given: Given
    params: SamplingParams
    options: ServiceOptions
    lora: LoRARequest | None = None


class CallRequests(NamedTuple):
    """All requests of one call."""

    requests: list[Enqueued]
    show: bool
    """Show a progress bar."""


def requests_of(
    given: Sequence[Given],
    params: Sequence[SamplingParams],
    priority: Priority | int | Sequence[Priority | int] | None,
    service: ServiceOfAll,
    lora_request: LoRARequests = None,
) -> list[Enqueued]:
    """One request for each prompt. Raises `InvalidRequestError`, and TypeError for an option that there is not."""
    if unknown := service.keys() - ServiceOfAll.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    if is_list(priority) and len(priority) != len(given):
        raise InvalidRequestError("priority", len(priority), f"must be one, or {len(given)} of them")
    requests: list[Enqueued] = []
    priorities = priority if is_list(priority) else [priority] * len(given)
    loras = [None] * len(given) if lora_request is None else lora_of_each(lora_request, len(given))
    for item, one, level, lora in zip(given, params, priorities, loras, strict=True):
        options: ServiceOptions = {**service, "priority": Priority.NORMAL if level is None else _priority(level)}
        if item.cache_salt is not None:
            options["cache_salt"] = item.cache_salt
        requests.append(Enqueued("", item, one, options, lora))
    return requests


def _priority(priority: object) -> Priority:
    """Holdfast's `Priority`, or vLLM's number, of which lower ones go first and 0 is normal."""
    if isinstance(priority, Priority):
        return priority
    if not is_whole(priority):
        raise InvalidRequestError("priority", priority, "must be a Priority, or a whole number")
    return Priority.of_number(priority)


def run_together(
    engine: InferenceEngine, requests: Sequence[Enqueued], most: int, *, show: bool
) -> list[RequestHandle]:
    """Requests that have finished. Keeps at most `most` sequences submitted, the capacity of the engine's queue; a
    single request may always try. If one fails, so does the call, and the others are aborted. `show` shows a progress
    bar if stderr is a terminal.
    """
    handles: list[RequestHandle] = []
    widths: list[int] = []
    num_done = num_open = 0
    bar = progress(sys.stderr) if show and sys.stderr.isatty() else nullcontext()
    try:
        with bar as report:
            while num_done < len(requests):
                while len(handles) < len(requests):
                    request_id, given, params, options, lora = requests[len(handles)]
                    width = params.beam_width or params.num_sequences
                    if num_open and num_open + width > most:
                        break
                    handles.append(
                        engine.enqueue_request(
                            given.prompt, params, request_id=request_id, lora_request=lora, **options
                        )
                    )
                    widths.append(width)
                    num_open += width
                handles[num_done].result()
                num_open -= widths[num_done]
                num_done += 1
                if report is not None:
                    report("generating", num_done, len(requests))
    finally:
        if left := handles[num_done:]:
            for handle in left:
                handle.cancel()
            futures.wait([handle.future for handle in left])
    return handles


def outputs_of(requests: Sequence[Enqueued], handles: Sequence[RequestHandle]) -> list[RequestOutput]:
    """The output of each, with the text of its prompt, where it was given in token ids and the text is known."""
    outputs = []
    for request, handle in zip(requests, handles, strict=True):
        output, text = handle.result(), request.given.text
        output = output if request.lora is None else replace(output, lora_request=request.lora)
        outputs.append(output if text is None else replace(output, prompt=text))
    return outputs
