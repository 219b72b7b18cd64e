"""tritonclient with many streams at once. Run in a process of its own: ADDRESS MODEL COUNT TOKENS.

Prints a line for each stream when all have ended: its number and its text. It imports nothing of Holdfast's.
"""

import json
import queue
import sys
from functools import partial

import numpy as np
import tritonclient.grpc as triton


def inputs(prompt: str, num_tokens: int) -> list:
    sampling = {"temperature": "0", "max_tokens": str(num_tokens), "seed": "1", "ignore_eos": "true"}
    values = {"text_input": prompt.encode(), "sampling_parameters": json.dumps(sampling).encode()}
    tensors = []
    for name, value in values.items():
        tensors.append(triton.InferInput(name, [1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([value], dtype=np.object_))
    tensors.append(triton.InferInput("stream", [1], "BOOL"))
    tensors[-1].set_data_from_numpy(np.array([True]))
    return tensors


def main(address: str, model: str, count: int, num_tokens: int) -> None:
    answers: queue.Queue = queue.Queue()
    texts, num_open = [""] * count, count
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=partial(lambda found, result, error: found.put((result, error)), answers))
        for number in range(count):
            client.async_stream_infer(model, inputs(f"prompt {number}", num_tokens), request_id=str(number))
        while num_open:
            result, error = answers.get(timeout=60)
            assert error is None, error
            response = result.get_response()
            texts[int(response.id)] += result.as_numpy("text_output")[0].decode()
            num_open -= response.parameters["triton_final_response"].bool_param
        client.stop_stream()
    for number, text in enumerate(texts):
        print(number, text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
