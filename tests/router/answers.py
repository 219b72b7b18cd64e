"""Answers without a dispatch host behind them."""

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.router.dispatch.request_stream import OutputStream, RequestStream
from holdfast.router.events import ModelStatus
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.requests.request_stats import AdmittedRequest, RequestStats
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from tests.router.core import facts


def new_answer(request_id: str = "r", model: str = "m", **params) -> SampledAnswer:
    """Needs a running event loop; `read_from` gives it streams."""
    request = EngineRequest(
        request_id=request_id, prompt_token_ids=(), sampling_params=SamplingParams(seed=0, **params)
    )
    status = ModelStatus(name=model, facts=facts(model=model), num_replicas=1)
    return SampledAnswer(AdmittedRequest(request, status, RequestStats(), lambda: 0.0))


def read_from(stream: RequestStream, streams: Sequence[OutputStream]) -> None:
    """Has it read the output of these streams, as `open` does with those that it opens."""
    stream.streams, stream._unread, stream.is_over = [*streams], dict(enumerate(streams)), not streams


def without_times(usage: Mapping[str, Any]) -> dict[str, Any]:
    """A usage without the times of its request, which differ each time, and without its attempts."""
    return {name: value for name, value in usage.items() if "time" not in name and name != "attempts"}
