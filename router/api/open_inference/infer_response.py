"""Inference responses of the Open Inference Protocol: a request's completions, or a step of its stream, as tensors.

Each output has one element for each completion; in a stream, the new part.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from holdfast.foreign import grpc_service_pb2
from holdfast.router.api.open_inference.infer_request import OUTPUTS, VERSION, InferRequest
from holdfast.router.api.open_inference.tensors import Tensor, Value, add_outputs
from holdfast.router.api.public_answer import by_token_id
from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.router.text.token_table import TokenTable
from holdfast.router.wire.statuses import call_status
from holdfast.worker.errors import HoldfastError

FINAL: Final = "triton_final_response"


class InferResponses:
    """Makes the answers to one request."""

    def __init__(self, request: InferRequest, model: str, num_input_tokens: int, tokens: TokenTable) -> None:
        self._request = request
        self._model = model
        self._num_input_tokens = num_input_tokens
        self._tokens = tokens
        self._rows = [OutputDelta("", 0, (), "")] * request.generation.sampling_params.n

    def whole(self, generation: Generation) -> grpc_service_pb2.ModelInferResponse:
        """All completions at once."""
        message = self._message(generation.completions)
        _add_figures(message, generation.usage)
        return message

    def step(self, delta: OutputDelta) -> grpc_service_pb2.ModelInferResponse:
        """Response to a delta. Completions other than the delta's have nothing new; finish reasons and sums stay."""
        index, total = delta.sequence_index, self._rows[delta.sequence_index].cumulative_logprob
        if delta.logprobs:
            total = (total or 0.0) + math.fsum(one.logprob for one in delta.logprobs)
        self._rows[index] = delta._replace(cumulative_logprob=total)
        message = self._message(self._rows)
        self._rows[index] = self._rows[index]._replace(text="", logprobs=(), token_ids=())
        if delta.usage is not None:
            _add_figures(message, delta.usage)
        return message

    def _message(self, rows: Sequence[OutputDelta]) -> grpc_service_pb2.ModelInferResponse:
        message = empty(self._request, self._model)
        tensors = [
            Tensor(name=name, datatype=OUTPUTS[name], values=self._values(name, rows)) for name in self._request.outputs
        ]
        add_outputs(message, tensors, are_raw=self._request.are_raw)
        return message

    def _values(self, name: str, rows: Sequence[OutputDelta]) -> list[Value]:
        match name:
            case "text_output":
                return [row.text.encode() for row in rows]
            case "finish_reason":
                return [str(row.finish_reason).encode() for row in rows]
            case "cumulative_logprob":
                return [math.nan if row.cumulative_logprob is None else row.cumulative_logprob for row in rows]
            case "logprobs":
                are_best = not self._request.generation.sampling_params.logprob_token_ids
                return [
                    json.dumps([by_token_id(item, self._tokens, are_best=are_best) for item in row.logprobs]).encode()
                    for row in rows
                ]
            case "num_input_tokens":
                return [self._num_input_tokens]
            case _:
                return [len(row.token_ids) for row in rows]


def _add_figures(message: grpc_service_pb2.ModelInferResponse, usage: Usage) -> None:
    """Adds how the request went as parameters of its last answer, by the names of `RequestFigures` over gRPC."""
    if (figures := usage.figures) is None:
        return
    message.parameters["cached_tokens"].int64_param = usage.num_cached_tokens
    for name, value in asdict(figures).items():
        if isinstance(value, float):
            message.parameters[name].double_param = value
        else:
            message.parameters[name.removeprefix("num_")].int64_param = value


def empty(request: InferRequest, model: str) -> grpc_service_pb2.ModelInferResponse:
    """An answer without outputs."""
    return grpc_service_pb2.ModelInferResponse(model_name=model, model_version=VERSION, id=request.id)


def streamed(
    response: grpc_service_pb2.ModelInferResponse, *, is_final: bool
) -> grpc_service_pb2.ModelStreamInferResponse:
    """An answer on a stream, which says whether it is its request's last."""
    response.parameters[FINAL].bool_param = is_final
    return grpc_service_pb2.ModelStreamInferResponse(infer_response=response)


def failed(request_id: str, error: HoldfastError) -> grpc_service_pb2.ModelStreamInferResponse:
    """The last response of a failed request. The stream continues, so the error's status is in parameters."""
    response = grpc_service_pb2.ModelInferResponse(id=request_id)
    response.parameters[FINAL].bool_param = True
    response.parameters["error_code"].string_param = call_status(error).code.name
    if error.retry_after_s is not None:
        response.parameters["retry_after_ms"].int64_param = round(error.retry_after_s * 1000)
    return grpc_service_pb2.ModelStreamInferResponse(error_message=str(error), infer_response=response)
