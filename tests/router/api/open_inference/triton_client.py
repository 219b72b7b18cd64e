"""tritonclient against a router, as its samples call it. Run in a process of its own: ADDRESS, MODEL.

Prints what it got as JSON. It imports nothing of Holdfast's.
"""

import asyncio
import json
import queue
import sys
from functools import partial

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

SAMPLING = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "20", "seed": "1"}


def inputs(module, prompt: str, *, is_stream: bool, **flags: bool) -> list:
    tensors = [module.InferInput("text_input", [1], "BYTES"), module.InferInput("stream", [1], "BOOL")]
    tensors[0].set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    tensors[1].set_data_from_numpy(np.array([is_stream], dtype=bool))
    tensors.append(module.InferInput("sampling_parameters", [1], "BYTES"))
    tensors[2].set_data_from_numpy(np.array([json.dumps(SAMPLING).encode()], dtype=np.object_))
    for name, value in flags.items():
        tensors.append(module.InferInput(name, [1], "BOOL"))
        tensors[-1].set_data_from_numpy(np.array([value], dtype=bool))
    return tensors


def asked(client, model: str) -> dict[str, object]:
    """What is known without a request."""
    metadata, config = client.get_model_metadata(model, as_json=True), client.get_model_config(model, as_json=True)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": [
            client.is_model_ready(model),
            client.is_model_ready("gpt-9"),
            client.is_model_ready(model, "2"),
        ],
        "server": client.get_server_metadata(as_json=True)["name"],
        "inputs": [item["name"] for item in metadata["inputs"]],
        "decoupled": config["config"]["model_transaction_policy"]["decoupled"],
        "input_types": sorted({item["data_type"] for item in config["config"]["input"]}),
    }


def unary(client, model: str) -> dict[str, object]:
    flags = {"exclude_input_in_output": True, "return_finish_reason": True, "return_num_output_tokens": True}
    sent = inputs(triton, "hello", is_stream=False, **flags)
    answer = client.infer(model, sent, request_id="7", client_timeout=30)
    packed = client.infer(model, sent, compression_algorithm="gzip")
    assert packed.as_numpy("text_output").tolist() == answer.as_numpy("text_output").tolist()
    return {
        "id": answer.get_response().id,
        "text": answer.as_numpy("text_output")[0].decode(),
        "finish_reason": answer.as_numpy("finish_reason")[0].decode(),
        "num_output_tokens": int(answer.as_numpy("num_output_tokens")[0]),
    }


def streamed(client, model: str, count: int) -> dict[str, str]:
    """Many requests on one stream, as in the sample of the vLLM backend."""
    done: queue.Queue = queue.Queue()
    client.start_stream(callback=partial(lambda found, result, error: found.put((result, error)), done))
    for number in range(count):
        client.async_stream_infer(
            model,
            inputs(triton, f"prompt {number}", is_stream=True),
            request_id=str(number),
            outputs=[triton.InferRequestedOutput("text_output")],
            parameters=SAMPLING,
            enable_empty_final_response=True,
        )
    texts, num_final = {str(number): "" for number in range(count)}, 0
    while num_final < count:
        result, error = done.get(timeout=30)
        if error is not None:
            raise error
        response = result.get_response()
        num_final += response.parameters["triton_final_response"].bool_param
        if response.outputs:
            texts[response.id] += result.as_numpy("text_output")[0].decode()
    client.stop_stream()
    return texts


def failures(client, model: str) -> list[str]:
    found = []
    try:
        client.infer("gpt-9", inputs(triton, "x", is_stream=False))
    except InferenceServerException as error:
        found += [error.status(), error.message()]
    done: queue.Queue = queue.Queue()
    client.start_stream(callback=lambda result, error: done.put(error))
    client.async_stream_infer(model, inputs(triton, "", is_stream=True))
    found.append(done.get(timeout=30).message())
    client.stop_stream()
    return found


async def asynchronous(address: str, model: str) -> str:
    async with triton_aio.InferenceServerClient(address) as client:

        async def requests():
            yield {"model_name": model, "inputs": inputs(triton_aio, "hello", is_stream=True), "request_id": "a"}

        text = ""
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            text += result.as_numpy("text_output")[0].decode()
        return text


def main(address: str, model: str) -> None:
    with triton.InferenceServerClient(address) as client:
        found = {
            "asked": asked(client, model),
            "unary": unary(client, model),
            "streamed": streamed(client, model, 8),
            "failures": failures(client, model),
            "asynchronous": asyncio.run(asynchronous(address, model)),
            "statistics": client.get_inference_statistics(model, as_json=True)["model_stats"][0],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
