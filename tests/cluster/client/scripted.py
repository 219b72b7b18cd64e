"""Routers that follow a script, a transport to them, and a clock that is moved: what a client does, without sockets.

A completion is `fake_tokens` of prompt and seed, one token a chunk, and a router that is asked to resume goes on where
its client is, as real ones do.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from holdfast.cluster.client.transport import CallFailed
from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.router.request import GenerationRequest
from holdfast.router.wire.request_codec import generation_request
from holdfast.router.wire.response_codec import delta_message, generation_message
from holdfast.router.wire.statuses import CallStatus, call_status
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import FinishReason
from tests.fakes import fake_tokens

FINGERPRINT = "fake/tp2"
USAGE = Usage(num_prompt_tokens=1, num_completion_tokens=1)


def broken(code: str = "UNAVAILABLE") -> CallStatus:
    """A call that ends without a router's word."""
    return CallStatus(code=grpc.StatusCode[code], message="the connection broke")


@dataclass(frozen=True, kw_only=True)
class Script:
    """How a router deals with one call. As it stands, it answers to the end."""

    num_chunks: int | None = None
    """So many, and then `status`; None: all."""
    status: CallStatus | None = None
    """Without `num_chunks`, in the place of any answer."""
    is_taken: bool = True
    is_lost: bool = False
    """The connection breaks, rather than that there is none."""
    is_silent: bool = False
    """Says nothing more, once the chunks are out."""


ANSWERS = Script()


def refuses(error: HoldfastError) -> Script:
    return Script(num_chunks=0, status=call_status(error), is_taken=False)


def lost_after(num_chunks: int, status: CallStatus | None = None) -> Script:
    return Script(num_chunks=num_chunks, status=status or broken(), is_lost=True)


LOST_READING = Script(num_chunks=0, status=broken(), is_taken=False, is_lost=True)
"""A router that ends while it reads the request."""

UNREACHABLE = Script(num_chunks=0, status=broken(), is_taken=False)


class MovedClock:
    """Time passes while somebody sleeps, and at no other time."""

    def __init__(self) -> None:
        self.time = 100.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)


class ScriptedTransport:
    """Each router's scripts are for its calls in turn; the last one goes on for ever."""

    def __init__(self, **routers: Script | list[Script]) -> None:
        self._scripts = {name: script if isinstance(script, list) else [script] for name, script in routers.items()}
        self.calls: list[tuple[str, str]] = []
        """(address, method)."""
        self.wishes: list[GenerationRequest] = []
        """What came with the calls that ask for completions."""
        self.stated: list[int] = []
        """How many routers each call says were lost with it."""
        self.num_open = 0
        self.is_closed = False

    async def call(
        self,
        address: str,
        method: str,
        request: Any,
        on_taken: Callable[[], None] | None = None,
        num_routers_lost: int = 0,
    ) -> AsyncGenerator[Any, None]:
        self.calls.append((address, method))
        self.stated.append(num_routers_lost)
        scripts = self._scripts[address]
        script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
        self.num_open += 1
        try:
            if script.is_taken and on_taken is not None:
                on_taken()
            answers = self._answers(method, request)
            for message in answers if script.num_chunks is None else answers[: script.num_chunks]:
                yield message
            if script.status is not None:
                raise CallFailed(script.status, is_router_lost=script.is_lost)
            if script.is_silent:
                await asyncio.Event().wait()
        finally:
            self.num_open -= 1

    async def close(self) -> None:
        self.is_closed = True

    def _answers(self, method: str, request: Any) -> list[Any]:
        if method == "Detokenize":
            return [inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())]
        if method not in ("Generate", "GenerateStream"):
            return [getattr(inference_pb2, f"{method}Response")()]
        wish = generation_request(request)
        self.wishes.append(wish)
        return [generation_message(whole(wish))] if method == "Generate" else list(map(delta_message, pieces(wish)))


def tokens(wish: GenerationRequest, index: int = 0) -> tuple[int, ...]:
    """Completion number `index`."""
    params = wish.sampling_params
    prompt = wish.prompt if isinstance(wish.prompt, tuple) else wish.prompt.encode()
    return tuple(fake_tokens(prompt, (params.seed or 0) + index, params.max_tokens or 0))


def pieces(wish: GenerationRequest) -> list[OutputDelta]:
    """What is left to be streamed, the completions by turns."""
    every = [_rest(wish, index) for index in range(wish.sampling_params.n)]
    longest = max(map(len, every))
    chunks = [rest[turn] for turn in range(longest) for rest in every if turn < len(rest)]
    return [*chunks[:-1], chunks[-1]._replace(usage=USAGE)] if chunks else []


def _rest(wish: GenerationRequest, index: int) -> list[OutputDelta]:
    token_ids = tokens(wish, index)
    begin = 0 if wish.resume is None else len(wish.resume.sequence(index).token_ids)
    return [
        OutputDelta(
            request_id=wish.request_id,
            sequence_index=index,
            first_token_index=place,
            token_ids=(token_ids[place],),
            text=chr(token_ids[place]),
            finish_reason=FinishReason.LENGTH if place == len(token_ids) - 1 else None,
            system_fingerprint=FINGERPRINT,
        )
        for place in range(begin, len(token_ids))
    ]


def whole(wish: GenerationRequest) -> Generation:
    completions = tuple(
        OutputDelta(
            request_id=wish.request_id,
            first_token_index=0,
            sequence_index=index,
            token_ids=tokens(wish, index),
            text=bytes(tokens(wish, index)).decode(),
            finish_reason=FinishReason.LENGTH,
        )
        for index in range(wish.sampling_params.n)
    )
    return Generation(request_id=wish.request_id, model="fake", completions=completions, usage=USAGE)
