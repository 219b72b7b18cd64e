"""Streams that decode while something else is done beside them, and the CPU time that it takes; for benchmarks."""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.request_handle import RequestHandle
from holdfast.worker.sampling_params import SamplingParams

MIN_ID: Final = 100
MAX_ID: Final = 20_000
"""Token ids of prompts: of any vocabulary that real models have."""
STREAM_PROMPT: Final = 32


def parser_of(doc: str | None, num_tokens: int, num_new_tokens: int) -> argparse.ArgumentParser:
    """The options of a benchmark with a prompt and streams, with these defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=num_tokens)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=num_new_tokens)
    return parser


def prompt_of(number: int, num_tokens: int) -> list[int]:
    generator = random.Random(number)
    return [generator.randrange(MIN_ID, MAX_ID) for _ in range(num_tokens)]


def begin_streams(engine: InferenceEngine, arguments: argparse.Namespace) -> list[RequestHandle]:
    """Submits the streams."""
    params = SamplingParams(temperature=0.0, max_tokens=arguments.new_tokens, ignore_eos=True)
    prompts = [prompt_of(number + 3, STREAM_PROMPT) for number in range(arguments.streams)]
    return [engine.submit_request(prompt, params) for prompt in prompts]


@contextmanager
def cpu_times(methods: Mapping[tuple[type[Any], str], str]) -> Iterator[dict[str, float]]:
    """CPU seconds of calls of these methods, none of which calls another, by the kind that each is given."""
    spent = dict.fromkeys(methods.values(), 0.0)
    originals = {method: getattr(*method) for method in methods}

    def timed(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            began_s = time.thread_time()
            try:
                return original(*given)
            finally:
                spent[kind] += time.thread_time() - began_s

        return call

    for method, original in originals.items():
        setattr(*method, timed(methods[method], original))
    try:
        yield spent
    finally:
        for method, original in originals.items():
            setattr(*method, original)
