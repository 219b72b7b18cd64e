"""Answers find those who wait for them, also when they come too late."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from holdfast.cluster.offline.completion import Completion
from holdfast.cluster.offline.delivery import Delivery
from holdfast.worker.errors import DeadlineExceededError, ReplicaError
from holdfast.worker.request import EngineLoad, EngineRequest, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import Rejection, StepUpdate
from tests.fakes import byte_tokenizer

LOAD = EngineLoad(num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=1, num_total_blocks=1)


@dataclass
class FakeEngine:
    """Remembers what it is asked."""

    submitted: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def attach(self, listener: Delivery) -> None: ...

    def submit(self, request: EngineRequest, listener: Delivery) -> None:
        self.submitted.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def opened(delivery: Delivery, request_id: str, **params) -> Completion:
    params = SamplingParams(**{"seed": 1, **params})
    request = EngineRequest(request_id=request_id, prompt_token_ids=(1,), sampling_params=params)
    completion = Completion(request, None, byte_tokenizer(), None)
    delivery.open(completion)
    return completion


def update(*deltas: TokenDelta, rejections: tuple[Rejection, ...] = ()) -> StepUpdate:
    return StepUpdate(step_id=1, deltas=deltas, rejections=rejections, load=LOAD)


def test_a_rejection_after_a_stop_string_harms_nobody():
    engine = FakeEngine()
    delivery = Delivery(SimpleNamespace(engine=engine))
    stopped, other = opened(delivery, "a", stop="."), opened(delivery, "b")
    delivery.on_update(update(TokenDelta(attempt="a", first_token_index=0, token_ids=tuple(b"x."))))
    late = Rejection(attempt="a", error=DeadlineExceededError("too late"))
    unknown = Rejection(attempt="nobody", error=DeadlineExceededError("too late"))
    delivery.on_update(update(rejections=(late, unknown)))
    delivery.on_failure(ReplicaError("the end"))
    delivery.join()
    assert stopped.future.result(timeout=0).outputs[0].finish_reason == "stop"
    assert engine.aborted == ["a"]
    assert isinstance(other.future.exception(timeout=0), ReplicaError)
