"""Requests of one call that run together: submitted as the queue of the engine takes them; if one fails, all end."""

import sys
from collections.abc import Iterable, Sequence
from concurrent import futures
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from holdfast.cluster.call_options import ServiceOptions
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.cluster.offline.prompts import Given
from holdfast.cluster.offline.request_handle import RequestHandle
from holdfast.cluster.progress_bars import progress
from holdfast.worker.sampling_params import SamplingParams


class Enqueued(NamedTuple):
    request_id: str
    given: Given
    params: SamplingParams
    options: ServiceOptions


class CallRequests(NamedTuple):
    """Requests of one call."""

    given: list[Given]
    params: list[SamplingParams]
    """One for each prompt, as the options."""
    options: list[ServiceOptions]
    show: bool
    """Show a progress bar."""

    def numbered(self, request_ids: Iterable[str]) -> list[Enqueued]:
        """One request for each prompt. Empty ids are chosen by the engine."""
        return list(map(Enqueued, request_ids, self.given, self.params, self.options))


def run_together(
    engine: InferenceEngine, requests: Sequence[Enqueued], most: int, *, show: bool
) -> list[RequestHandle]:
    """Requests that have finished. Keeps as many sequences submitted as the engine's queue takes, `most`; one request
    by itself may always try. If one fails, so does the call, and none is left running. `show` shows a progress bar if
    stderr is a terminal.
    """
    handles: list[RequestHandle] = []
    widths: list[int] = []
    num_done = num_open = 0
    bar = progress(sys.stderr) if show and sys.stderr.isatty() else nullcontext()
    try:
        with bar as report:
            while num_done < len(requests):
                while len(handles) < len(requests):
                    request_id, given, params, options = requests[len(handles)]
                    width = params.beam_width or params.num_sequences
                    if num_open and num_open + width > most:
                        break
                    handles.append(engine.enqueue_request(given.prompt, params, request_id=request_id, **options))
                    widths.append(width)
                    num_open += width
                handles[num_done].result()
                num_open -= widths[num_done]
                num_done += 1
                if report is not None:
                    report("generating", num_done, len(requests))
    finally:
        if left := handles[num_done:]:
            for handle in left:
                handle.cancel()
            futures.wait([handle.future for handle in left])
    return handles


def outputs_of(requests: Sequence[Enqueued], handles: Sequence[RequestHandle]) -> list[RequestOutput]:
    """The output of each, with the text of its prompt, where it was given in token ids and the text is known."""
    outputs = [handle.result() for handle in handles]
    texts = [request.given.text for request in requests]
    return [one if text is None else replace(one, prompt=text) for one, text in zip(outputs, texts, strict=True)]
