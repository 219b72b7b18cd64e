"""Requests of vLLM's engine protocol as the router's own: the meaning of fields that are zero, and refusals."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from holdfast.foreign import vllm_engine_pb2
from holdfast.router.generation import OutputDelta
from holdfast.router.request import GenerationRequest
from holdfast.router.wire.resume_codec import in_pieces
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import TokenLogprob
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

_UNSUPPORTED: Final = {
    "kv_transfer_params": "KV caches are not transferred between engines",
    "kv_transfer_params_json": "KV caches are not transferred between engines",
    "mm_inputs": "models read text alone",
    "media_refs": "models read text alone",
}

_SHARED: Final = {
    name: field
    for name, field in vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items()
    if name in PARAMETERS and not field.is_repeated and name != "include_stop_str_in_output"
}
"""Fields of the message that are parameters of the same name, of one value."""

_IF_SET: Final = tuple(name for name, field in _SHARED.items() if field.has_presence)
_AS_THEY_ARE: Final = tuple(
    name for name, field in _SHARED.items() if not field.has_presence and PARAMETERS[name].allows(field.default_value)
)
_ONE_IF_ZERO: Final = tuple(name for name in _SHARED if name not in (*_IF_SET, *_AS_THEY_ARE))
"""Zero is no value of theirs: a client that leaves them out sends it."""

_KINDS: Final = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}


def generation_request(message: vllm_engine_pb2.GenerateRequest, request_id: str = "") -> GenerationRequest:
    """Raises `InvalidRequestError`, naming the field. `request_id` is for a message without one."""
    _check_supported(message)
    return GenerationRequest(
        prompt=_prompt(message),
        request_id=message.request_id or request_id,
        sampling_params=sampling_params(message.sampling_params),
    )


def sampling_params(message: vllm_engine_pb2.SamplingParams) -> SamplingParams:
    """Stop strings are kept in the text, which this protocol does not send; its last message names the matched one."""
    fields: dict[str, Any] = {"max_tokens": None}
    fields |= {name: getattr(message, name) or 1 for name in _ONE_IF_ZERO}
    fields |= {name: getattr(message, name) for name in _AS_THEY_ARE}
    fields |= {name: getattr(message, name) for name in _IF_SET if message.HasField(name)}
    return SamplingParams(
        **fields,
        stop=list(message.stop),
        stop_token_ids=list(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        structured_outputs=_structure(message),
        include_stop_str_in_output=True,
    )


def _check_supported(message: vllm_engine_pb2.GenerateRequest) -> None:
    for name, reason in _UNSUPPORTED.items():
        if message.HasField(name):
            raise InvalidRequestError(name, "set", f"must not be set: {reason}")
    if message.extra_mm_inputs:
        raise InvalidRequestError("extra_mm_inputs", "set", f"must not be set: {_UNSUPPORTED['mm_inputs']}")
    if message.data_parallel_rank:
        raise InvalidRequestError("data_parallel_rank", message.data_parallel_rank, "must be 0: there is one rank")


def _prompt(message: vllm_engine_pb2.GenerateRequest) -> str | tuple[int, ...]:
    match message.WhichOneof("input"):
        case "tokenized":
            return tuple(in_pieces(message.tokenized.input_ids))
        case "text":
            return str(message.text)
        case _:
            raise InvalidRequestError("input", None, "must be set: tokenized or text")


def _structure(message: vllm_engine_pb2.SamplingParams) -> StructuredOutputs | None:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        return None
    if kind == "structural_tag":
        limit = "is not known here; give a json_schema, a regex, a grammar, json_object or a choice"
        raise InvalidRequestError("sampling_params.structural_tag", message.structural_tag, limit)
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "choice":
        return StructuredOutputs(choice=list(message.choice.choices))
    return StructuredOutputs.of({_KINDS[kind]: getattr(message, kind)})


class GenerateResponses:
    """Responses to one request."""

    def __init__(self, prompt_token_ids: Sequence[int], *, stream: bool) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._stream = stream

    def of(self, delta: OutputDelta) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """The messages for one delta; without a stream, deltas are whole."""
        if self._stream:
            yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(delta))
        if delta.finish_reason is not None:
            yield vllm_engine_pb2.GenerateResponse(complete=self._complete(delta))

    def _chunk(self, delta: OutputDelta) -> vllm_engine_pb2.GenerateStreamChunk:
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.num_cached_tokens,
            output_logprobs=output_logprobs(delta.logprobs),
            input_logprobs=input_logprobs(self._prompt_token_ids, delta.prompt_logprobs),
            index=delta.sequence_index,
        )

    def _complete(self, delta: OutputDelta) -> vllm_engine_pb2.GenerateComplete:
        assert delta.finish_reason is not None
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=delta.token_ids,
            finish_reason=delta.finish_reason.value,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.num_cached_tokens,
            output_logprobs=output_logprobs(delta.logprobs),
            input_logprobs=input_logprobs(self._prompt_token_ids, delta.prompt_logprobs),
            index=delta.sequence_index,
        )
        matched = delta.stop_reason
        if isinstance(matched, int):
            complete.matched_token_id = matched
        elif matched is not None:
            complete.matched_stop_str = matched
        return complete


def output_logprobs(logprobs: Sequence[TokenLogprob]) -> vllm_engine_pb2.OutputLogProbs | None:
    """None where there are none."""
    if not logprobs:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[item.logprob for item in logprobs],
        token_ids=[item.token_id for item in logprobs],
        top_logprobs=_tops(logprobs),
    )


def input_logprobs(
    prompt_token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> vllm_engine_pb2.InputLogProbs | None:
    """None if none are requested; the first token has none."""
    known = [item for item in logprobs if item is not None]
    if not known:
        return None
    tops = _tops(known)
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[
            vllm_engine_pb2.InputTokenLogProb(),
            *(vllm_engine_pb2.InputTokenLogProb(value=item.logprob) for item in known),
        ],
        token_ids=prompt_token_ids,
        top_logprobs=[vllm_engine_pb2.TopLogProbs(), *tops] if tops else [],
    )


def _tops(logprobs: Sequence[TokenLogprob]) -> list[vllm_engine_pb2.TopLogProbs]:
    """One for each position, or none at all where no alternatives were asked for."""
    if not any(item.top for item in logprobs):
        return []
    return [
        vllm_engine_pb2.TopLogProbs(
            values=[logprob for _, logprob in item.top], token_ids=[token_id for token_id, _ in item.top]
        )
        for item in logprobs
    ]
