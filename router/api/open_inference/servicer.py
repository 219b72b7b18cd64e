"""Servicer of the Open Inference Protocol: `inference.GRPCInferenceService`, method by method, on the router's port.

It translates: requests into the router's own, completions into tensors.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from holdfast.foreign import grpc_service_pb2
from holdfast.router.api.grpc.handlers import Context
from holdfast.router.api.grpc.interceptors import REQUEST_ID_HEADER, given_request_id
from holdfast.router.api.intake import DecodeWorker, loggable
from holdfast.router.api.open_inference.infer_request import (
    STREAM,
    InferRequest,
    check_version,
    in_clients_words,
    infer_request,
)
from holdfast.router.api.open_inference.infer_response import InferResponses, empty, failed, streamed
from holdfast.router.api.open_inference.model_info import InferCounts, model_config, model_metadata, server_metadata
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import ModelStatus
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.beam_search import BeamAnswer
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.wire.json_bounds import JsonBounds
from holdfast.worker.errors import HoldfastError, InternalError, InvalidRequestError, ReplicaError, UnknownModelError

Request = TypeVar("Request")
Answer = TypeVar("Answer")


async def interleaved(
    requests: AsyncIterable[Request], answers: Callable[[Request], AsyncGenerator[Answer, None]], most_open: int
) -> AsyncGenerator[Answer, None]:
    """The answers to all requests, as they come. Ends when the requests have ended and all are answered.

    While `most_open` requests are open, no further one is read. An answer that is not read holds up the requests that
    have one as well, and no memory grows. Closing the generator closes all of `answers`, which must not raise.
    """
    outbox: asyncio.Queue[Answer | None] = asyncio.Queue(maxsize=1)
    room = asyncio.Semaphore(most_open)

    async def answer(request: Request) -> None:
        try:
            async with aclosing(answers(request)) as found:
                async for item in found:
                    await outbox.put(item)
        finally:
            room.release()

    async def read() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    tasks.create_task(answer(request))
        finally:
            if not is_closing:
                await outbox.put(None)

    is_closing = False
    reading = asyncio.create_task(read(), name="requests of a stream")
    try:
        while (item := await outbox.get()) is not None:
            yield item
        await reading
    finally:
        is_closing = True
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()  # it was raised above, or its caller is gone


logger = logging.getLogger(__name__)

SERVICE: Final = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

MAX_OPEN: Final = 1024
"""Requests of one stream that run at the same time. More wait in the client."""

MAX_NOTED: Final = 100
"""Unknown request parameters that are logged, each once."""


class InferenceProtocolServicer:
    """`inference.GRPCInferenceService`. Errors are raised as `HoldfastError`, and are answers on a stream."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        dispatch_host: DispatchHost,
        bounds: JsonBounds,
        decode_worker: DecodeWorker | None = None,
    ) -> None:
        """The `bounds` are those of the JSON in requests. Large requests are decoded by the `decode_worker`, or by a
        separate one.
        """
        self._bounds = bounds
        self._decode_worker = decode_worker or DecodeWorker()
        self._request_processor = request_processor
        self._dispatch_host = dispatch_host
        self._counts = InferCounts()
        self._noted: set[str] = set()

    async def ServerLive(
        self, message: grpc_service_pb2.ServerLiveRequest, context: Context
    ) -> grpc_service_pb2.ServerLiveResponse:
        return grpc_service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(
        self, message: grpc_service_pb2.ServerReadyRequest, context: Context
    ) -> grpc_service_pb2.ServerReadyResponse:
        return grpc_service_pb2.ServerReadyResponse(
            ready=any(map(self._is_ready, self._dispatch_host.dispatch.models()))
        )

    async def ModelReady(
        self, message: grpc_service_pb2.ModelReadyRequest, context: Context
    ) -> grpc_service_pb2.ModelReadyResponse:
        """A model that is not known is not ready either."""
        try:
            is_ready = self._is_ready(self._model(message.name, message.version))
        except (UnknownModelError, ReplicaError):
            is_ready = False
        return grpc_service_pb2.ModelReadyResponse(ready=is_ready)

    async def ServerMetadata(
        self, message: grpc_service_pb2.ServerMetadataRequest, context: Context
    ) -> grpc_service_pb2.ServerMetadataResponse:
        return server_metadata()

    async def ModelMetadata(
        self, message: grpc_service_pb2.ModelMetadataRequest, context: Context
    ) -> grpc_service_pb2.ModelMetadataResponse:
        return model_metadata(self._model(message.name, message.version))

    async def ModelConfig(
        self, message: grpc_service_pb2.ModelConfigRequest, context: Context
    ) -> grpc_service_pb2.ModelConfigResponse:
        return grpc_service_pb2.ModelConfigResponse(config=model_config(self._model(message.name, message.version)))

    async def ModelStatistics(
        self, message: grpc_service_pb2.ModelStatisticsRequest, context: Context
    ) -> grpc_service_pb2.ModelStatisticsResponse:
        """Inference counts and steps of one model, or of all where the message names none."""
        models = [self._model(message.name, message.version)] if message.name else self._request_processor.models()
        num_steps = dict.fromkeys((model.name for model in models), 0)
        for load in self._dispatch_host.dispatch.loads():
            if load.model in num_steps and load.stats is not None:
                num_steps[load.model] += load.stats.num_steps
        statistics = [self._counts.message(model, number) for model, number in num_steps.items()]
        return grpc_service_pb2.ModelStatisticsResponse(model_stats=statistics)

    async def ModelInfer(
        self, message: grpc_service_pb2.ModelInferRequest, context: Context
    ) -> grpc_service_pb2.ModelInferResponse:
        try:
            request = await self._read(message, given_request_id(context))
            if request.is_streamed:
                raise InvalidRequestError(STREAM, True, "must be false here: ModelStreamInfer answers in a stream")
            return await self._whole(request, context)
        except InvalidRequestError as error:
            raise in_clients_words(error) from error

    async def ModelStreamInfer(
        self, messages: AsyncIterator[grpc_service_pb2.ModelInferRequest | InvalidRequestError], context: Context
    ) -> AsyncGenerator[grpc_service_pb2.ModelStreamInferResponse, None]:
        """Many requests at the same time. A failed request is answered with its error, and the others continue."""
        requests = _numbered(messages)
        async with aclosing(interleaved(requests, partial(self._answers, context), MAX_OPEN)) as answers:
            async for answer in answers:
                yield answer

    # --- inside ---

    async def _read(self, message: grpc_service_pb2.ModelInferRequest, request_id: str) -> InferRequest:
        read = partial(infer_request, message, self._bounds, request_id)
        return await self._decode_worker.run(message.ByteSize(), read)

    async def _answers(
        self, context: Context, numbered: tuple[int, grpc_service_pb2.ModelInferRequest | InvalidRequestError]
    ) -> AsyncGenerator[grpc_service_pb2.ModelStreamInferResponse, None]:
        """The answers to one request of a stream."""
        number, message = numbered
        name = "" if isinstance(message, InvalidRequestError) else message.id
        try:
            if isinstance(message, InvalidRequestError):
                raise message
            header = given_request_id(context)
            request = await self._read(message, header)
            if header:
                part = request.generation.as_part(number, f"{header}/{number}")
                request = replace(request, generation=part)
            async with aclosing(self._steps(request, context)) as steps:
                async for response, is_last in steps:
                    yield streamed(response, is_final=is_last and not request.has_empty_final)
            if request.has_empty_final:
                yield streamed(empty(request, response.model_name), is_final=True)
        except InvalidRequestError as error:
            yield failed(name, in_clients_words(error))
        except HoldfastError as error:
            yield failed(name, error)
        except Exception as error:
            logger.exception("a request of a stream failed: internal error")
            yield failed(name, InternalError(f"the request failed: internal error ({type(error).__name__})"))

    async def _steps(
        self, request: InferRequest, context: Context
    ) -> AsyncGenerator[tuple[grpc_service_pb2.ModelInferResponse, bool], None]:
        """The answers to a request, and whether each is the last that has outputs."""
        if not request.is_streamed:
            yield await self._whole(request, context, is_unary=False), True
            return
        request.generation.check_streamable()
        self._note_unknown(request)
        with self._counts.counting(self._model(request.generation.model).name):
            async with self._request_processor.open(request.generation, context.time_remaining()) as answer:
                responses = self._responses(request, answer)
                async for delta in answer:
                    yield responses.step(delta), delta.usage is not None

    async def _whole(
        self, request: InferRequest, context: Context, *, is_unary: bool = True
    ) -> grpc_service_pb2.ModelInferResponse:
        self._note_unknown(request)
        generation, processor = request.generation, self._request_processor
        opening = processor.open if generation.sampling_params.beam_width is None else processor.search
        with self._counts.counting(self._model(generation.model).name):
            async with opening(generation, context.time_remaining()) as answer:
                if is_unary:
                    await context.send_initial_metadata(((REQUEST_ID_HEADER, answer.request.request_id),))
                return self._responses(request, answer).whole(await answer.whole())

    def _responses(self, request: InferRequest, answer: SampledAnswer | BeamAnswer) -> InferResponses:
        tokens = self._request_processor.tokenizer(answer.model).tokens
        return InferResponses(request, answer.model, len(answer.request.prompt_token_ids), tokens)

    def _model(self, name: str, version: str = "") -> ModelStatus:
        check_version(name, version)
        return self._request_processor.model(name)

    def _is_ready(self, model: ModelStatus) -> bool:
        return model.takes_requests and not self._request_processor.is_closed

    def _note_unknown(self, request: InferRequest) -> None:
        """Clients send parameters for other servers too; they are taken, and named in the log once."""
        for name in request.unknown_parameters:
            if name not in self._noted and len(self._noted) < MAX_NOTED:
                self._noted.add(name)
                logger.info("request parameter %r has no meaning here, and is ignored", loggable(name))


async def _numbered(
    messages: AsyncIterator[grpc_service_pb2.ModelInferRequest | InvalidRequestError],
) -> AsyncGenerator[tuple[int, grpc_service_pb2.ModelInferRequest | InvalidRequestError], None]:
    number = 0
    async for message in messages:
        yield number, message
        number += 1
