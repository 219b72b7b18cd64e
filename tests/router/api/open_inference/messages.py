"""Requests and answers of the Open Inference Protocol as tests write and read them, by the stubs alone."""

import json
import struct

from holdfast.foreign import grpc_service_pb2 as pb

STUBS = "/inference.GRPCInferenceService/"
STREAM = f"{STUBS}ModelStreamInfer"


def raw_bytes(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def infer(text: str = "hello", *, raw: bool = True, outputs=(), parameters=None, sampling=None, **inputs):
    """A request. Sampling parameters by default ask for eight tokens of seed 1."""
    sampling = {"max_tokens": "8", "seed": "1"} if sampling is None else sampling
    given = {"text_input": text.encode(), "sampling_parameters": json.dumps(sampling).encode()}
    given |= {name: value for name, value in inputs.items() if name not in ("id", "model_name", "model_version")}
    named = {name: inputs[name] for name in ("id", "model_name", "model_version") if name in inputs}
    message = pb.ModelInferRequest(**named, outputs=[{"name": name} for name in outputs])
    for name, value in given.items():
        is_flag = isinstance(value, bool)
        tensor = message.inputs.add(name=name, datatype="BOOL" if is_flag else "BYTES", shape=[1])
        if raw:
            message.raw_input_contents.append(bytes([value]) if is_flag else raw_bytes(value))
        elif is_flag:
            tensor.contents.bool_contents.append(value)
        else:
            tensor.contents.bytes_contents.append(value)
    for name, value in (parameters or {}).items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], field, value)
    return message


def unary(place, method: str):
    """A method of the service, by name."""
    answer = getattr(pb, f"{method}Response")
    request = getattr(pb, f"{method}Request")
    return place.channel.unary_unary(f"{STUBS}{method}", request.SerializeToString, answer.FromString)


def stream(place, requests=None, **options):
    """A call of ModelStreamInfer."""
    method = place.channel.stream_stream(
        STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    return method(requests, **options)


def values(response: pb.ModelInferResponse) -> dict[str, list]:
    """The elements of each output, whichever form they are in."""
    found = {}
    for index, output in enumerate(response.outputs):
        raw = response.raw_output_contents[index] if response.raw_output_contents else None
        found[output.name] = _elements(output, raw)
        assert list(output.shape) == [len(found[output.name])]
    return found


def text(responses) -> str:
    """The text of the stream of one completion."""
    return b"".join(values(item.infer_response).get("text_output", [b""])[0] for item in responses).decode()


def is_final(response: pb.ModelStreamInferResponse) -> bool:
    return response.infer_response.parameters["triton_final_response"].bool_param


def _elements(output, raw: bytes | None) -> list:
    if raw is None:
        field = {"BYTES": "bytes_contents", "FP32": "fp32_contents", "UINT32": "uint_contents"}[output.datatype]
        assert [descriptor.name for descriptor, _ in output.contents.ListFields()] == [field]
        return list(getattr(output.contents, field))
    assert not output.HasField("contents")
    if output.datatype != "BYTES":
        return [value for (value,) in struct.iter_unpack({"FP32": "<f", "UINT32": "<I"}[output.datatype], raw)]
    elements, position = [], 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        elements.append(raw[position + 4 : position + 4 + length])
        position += 4 + length
    return elements
