"""Sender over gRPC to our own API (`holdfast.v1.Inference`), without the client's retries: every failure counts."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

import grpc

from holdfast.cluster.bench.sender import Ask, OnPiece, Reply, SendFailed
from holdfast.cluster.client.submissions import submission
from holdfast.cluster.client.transport import CHANNEL_OPTIONS, CallFailed, GrpcTransport
from holdfast.foreign import grpc_service_pb2 as oip
from holdfast.foreign import grpc_service_pb2_grpc
from holdfast.router.wire.request_codec import generation_request_message
from holdfast.worker.errors import HoldfastError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.loopback import reaching
from holdfast.worker.wire.tls import Tls


class HoldfastSender:
    """Requests take turns over the routers."""

    def __init__(
        self,
        addresses: list[str],
        model: str,
        *,
        is_chat: bool,
        params: SamplingParams,
        api_key: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._addresses = addresses
        self._num_sent = 0
        self._model = model
        self._is_chat = is_chat
        self._params = params
        self._transport = GrpcTransport(api_key, tls)

    async def send(self, ask: Ask, on_piece: OnPiece) -> Reply:
        address = self._addresses[self._num_sent % len(self._addresses)]
        self._num_sent += 1
        texts: list[str] = []
        usage = None
        try:
            async for message in self._transport.call(address, "GenerateStream", self._message(ask)):
                if message.token_ids:
                    on_piece()
                texts.append(message.text)
                if message.HasField("usage"):
                    usage = message.usage
        except CallFailed as failed:
            kind = failed.status.code.name.lower().replace("_", " ")
            raise SendFailed(kind, failed.status.message) from failed
        if usage is None:
            raise SendFailed("cut off", "the stream ended before the answer did")
        return Reply(
            text="".join(texts),
            num_output_tokens=usage.completion_tokens,
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.cached_prompt_tokens,
        )

    async def close(self) -> None:
        await self._transport.close()

    def _message(self, ask: Ask) -> object:
        params = self._params.with_changes(max_tokens=ask.num_output_tokens)
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(ask.texts)]
        try:
            request = submission(
                None if self._is_chat else ask.prompt,
                params,
                messages if self._is_chat else None,
                model=self._model,
                request_id="",
            )
        except HoldfastError as error:
            raise SendFailed("invalid argument", str(error)) from error
        # It is not made again, so a router that stops lets it end rather than send it elsewhere.
        return generation_request_message(dataclasses.replace(request, attempt=0))


_FLAGS: Final = ("stream", "exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")


class OipSender:
    """All requests share a channel."""

    def __init__(
        self, address: str, model: str, *, params: Mapping[str, Any], api_key: str = "", tls: Tls | None = None
    ) -> None:
        self._model = model
        self._params = dict(params)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
        options = reaching(address, CHANNEL_OPTIONS)
        self._channel = (
            grpc.aio.insecure_channel(address, options=options)
            if tls is None
            else grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)
        )
        self._stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def send(self, ask: Ask, on_piece: OnPiece) -> Reply:
        call = self._stub.ModelStreamInfer(metadata=self._metadata)
        texts: list[bytes] = []
        num_input, num_output = None, 0
        try:
            await call.write(self._request(ask))
            await call.done_writing()
            async for message in call:
                if message.error_message:
                    code = message.infer_response.parameters["error_code"].string_param
                    raise SendFailed(code.lower().replace("_", " ") or "error in the stream", message.error_message)
                outputs = _outputs(message.infer_response)
                text = outputs.get("text_output")
                new = outputs.get("num_output_tokens")
                if text or new:
                    on_piece()
                    texts.append(text if isinstance(text, bytes) else b"")
                    num_output += new if isinstance(new, int) else 1
                if isinstance(prompt := outputs.get("num_input_tokens"), int):
                    num_input = prompt
        except grpc.aio.AioRpcError as error:
            raise SendFailed(error.code().name.lower().replace("_", " "), error.details() or "") from error
        finally:
            call.cancel()
        return Reply(
            text=b"".join(texts).decode(errors="replace"), num_output_tokens=num_output, num_prompt_tokens=num_input
        )

    async def close(self) -> None:
        await self._channel.close(None)

    def _request(self, ask: Ask) -> oip.ModelInferRequest:
        request = oip.ModelInferRequest(model_name=self._model)
        sampling = json.dumps({**self._params, "max_tokens": ask.num_output_tokens}).encode()
        for name, value in (("text_input", ask.prompt.encode()), ("sampling_parameters", sampling)):
            tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(value)
        for name in _FLAGS:
            tensor = request.inputs.add(name=name, datatype="BOOL", shape=[1])
            tensor.contents.bool_contents.append(True)
        return request


def _outputs(response: oip.ModelInferResponse) -> dict[str, bytes | int]:
    """The first element of each output, typed or raw."""
    values: dict[str, bytes | int] = {}
    for index, output in enumerate(response.outputs):
        contents = output.contents
        if response.raw_output_contents:
            raw = response.raw_output_contents[index]
            is_text = output.datatype == "BYTES"
            values[output.name] = raw[4:] if is_text else int.from_bytes(raw[:4], "little")
        elif contents.bytes_contents:
            values[output.name] = contents.bytes_contents[0]
        elif contents.uint_contents:
            values[output.name] = contents.uint_contents[0]
    return values
