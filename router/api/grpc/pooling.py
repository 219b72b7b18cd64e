"""Methods of `holdfast.v1.Inference` for pooled models: vectors, scores by label, and scores of pairs of texts."""

import uuid
from functools import partial
from typing import Final

from holdfast.router.api.grpc.handlers import Context
from holdfast.router.api.grpc.interceptors import REQUEST_ID_HEADER, Named, with_request_id
from holdfast.router.api.intake import DecodeWorker
from holdfast.router.request import naming
from holdfast.router.requests.poison_watch import expect_prompts
from holdfast.router.requests.pooling import PooledPrompt, PoolingDesk
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.wire.pooling_codec import floats_of, pool_request, score_request
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError

_BYTES_OF_OUTPUT: Final = 64
"""Bytes that an output takes in a message beside its numbers, at most."""

_BYTES_OF_NUMBER: Final = 4
"""Bytes of a float32."""


class PoolingCalls:
    """Pooling calls at one router. Errors are raised as `HoldfastError`."""

    def __init__(self, processor: RequestProcessor, decode_worker: DecodeWorker, max_message_bytes: int) -> None:
        self._desk = PoolingDesk(processor)
        self._decode_worker = decode_worker
        self._max_message_bytes = max_message_bytes

    async def pool(self, message: inference_pb2.PoolRequest, context: Context) -> inference_pb2.PoolResponse:
        """A vector, or scores by label, of each input."""
        named = await _named(message, context)
        bare, prompts = await self._decode_worker.run(named.ByteSize(), partial(pool_request, named))
        with naming(bare.names):
            facts = self._desk.facts(bare.model)
            self._check_answer(len(prompts), named.dimensions or facts.num_outputs)
        expect_prompts(len(prompts))
        found = await self._desk.each(bare, prompts, context.time_remaining())
        return inference_pb2.PoolResponse(
            request_id=named.request_id, model=found[0].model, outputs=map(_output, found), labels=facts.labels
        )

    async def score(self, message: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        """A score for each pair of texts."""
        named = await _named(message, context)
        bare = await self._decode_worker.run(named.ByteSize(), partial(score_request, named))
        expect_prompts(len(named.queries) + len(named.documents))
        texts = named.queries, named.documents
        found = await self._desk.scores(bare, *texts, named.instruction or None, context.time_remaining())
        return inference_pb2.ScoreResponse(
            request_id=named.request_id,
            model=found.prompts[0].model,
            scores=found.scores,
            prompt_tokens=sum(len(one.token_ids) for one in found.prompts),
            cached_tokens=sum(one.num_cached_tokens for one in found.prompts),
        )

    def _check_answer(self, num_inputs: int, num_outputs: int) -> None:
        """Raises `InvalidRequestError` for inputs whose answer would be too long for a message."""
        most = self._max_message_bytes // (_BYTES_OF_OUTPUT + _BYTES_OF_NUMBER * num_outputs)
        if num_inputs > most:
            limit = f"must be at most {most} with {num_outputs} numbers each, so that the answer fits into a message"
            raise InvalidRequestError("inputs", num_inputs, f"{limit} (limits.max_message_bytes)")


async def _named(message: Named, context: Context) -> Named:
    """The message with a request id, which the call's initial metadata have too."""
    named = with_request_id(message, context)
    named.request_id = named.request_id or uuid.uuid4().hex
    await context.send_initial_metadata(((REQUEST_ID_HEADER, named.request_id),))
    return named


def _output(one: PooledPrompt) -> inference_pb2.PooledOutput:
    return inference_pb2.PooledOutput(
        values=floats_of(one.values), prompt_tokens=len(one.token_ids), cached_tokens=one.num_cached_tokens
    )
