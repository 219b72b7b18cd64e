"""Sender over the Open Inference Protocol (KServe's, version 2): a stream for each request, tensors as in Triton's vLLM
backend. It speaks to our door, and to others that serve `ModelStreamInfer` so.

What may not live here: what our own door makes of the tensors (`router/doors/oip/`).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import grpc

from holdfast.cluster.bench.sender import Ask, OnPiece, Reply, SendFailed
from holdfast.cluster.client.transport import CHANNEL_OPTIONS
from holdfast.foreign import grpc_service_pb2 as oip
from holdfast.foreign import grpc_service_pb2_grpc
from holdfast.worker.security.loopback import reaching
from holdfast.worker.security.tls import Tls

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
