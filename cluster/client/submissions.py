"""First submissions of requests: what a client's calls send, fixed for every router that continues them."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Unpack

from holdfast.cluster.call_options import CallOptions, ServiceOptions, check_timeout
from holdfast.router.chat import Chat, Message
from holdfast.router.request import GenerationRequest
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.sampling_params import SamplingParams


def submission(
    prompt: str | Sequence[int] | None,
    params: SamplingParams | None,
    messages: Sequence[Message] | None,
    *,
    model: str,
    request_id: str,
    **options: Unpack[CallOptions],
) -> GenerationRequest:
    """The first submission of a request. The returned request is fixed for every router that continues it: its id, from
    which an unseeded request draws its seed, and the time that a chat template shows. Raises `InvalidRequestError`.
    """
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("prompt", prompt, "exactly one of prompt and messages must be given")
    service, of_chat = _parted(options)
    if messages is None and of_chat:
        name = next(iter(of_chat))
        raise InvalidRequestError(name, of_chat[name], "is for messages alone")
    chat = None
    if messages is not None:
        chat = Chat(
            messages=messages,
            template_kwargs=of_chat.pop("chat_template_kwargs", {}),
            template=of_chat.pop("chat_template", ""),
            now_s=int(time.time()),
            **of_chat,
        )
    request = GenerationRequest(
        prompt=() if prompt is None else prompt,  # type: ignore[arg-type]  # it becomes a tuple there
        chat=chat,
        sampling_params=params or SamplingParams(),
        model=model,
        request_id=request_id or uuid.uuid4().hex,
        attempt=1,
        **service,
    )
    check_timeout(request.timeout_s)
    return request


def bare_submission(
    params: PoolingParams | None,
    truncation: SamplingParams,
    model: str,
    request_id: str,
    options: ServiceOptions,
) -> GenerationRequest:
    """The first submission of a pooling request, without its prompts. Raises `InvalidRequestError`."""
    request = GenerationRequest(
        model=model,
        request_id=request_id or uuid.uuid4().hex,
        pooling=params or PoolingParams(),
        sampling_params=truncation,
        attempt=1,
        **options,
    )
    check_timeout(request.timeout_s)
    return request


def _parted(options: CallOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the service, and those of a chat that are set."""
    of_chat = CallOptions.__annotations__.keys() - ServiceOptions.__annotations__.keys()
    given = {name: value for name, value in options.items() if name not in of_chat or value is not None}
    service = {name: value for name, value in given.items() if name not in of_chat}
    return service, {name: value for name, value in given.items() if name in of_chat}
