"""Calls that are late: turned away by a router that has a newer one, and left alone where nobody has."""

import random
from typing import Any

from holdfast.cluster.simulate.actors.messages import Generate, Straggler
from holdfast.cluster.simulate.kernel.network import Connection, Network
from holdfast.cluster.simulate.kernel.process import Process
from holdfast.cluster.simulate.kernel.timeline import Timeline
from holdfast.router.events import Fail
from holdfast.router.generation import OutputDelta
from holdfast.worker.errors import RequestAbortedError, RequestSupersededError
from holdfast.worker.request import EngineRequest, SequenceKey
from holdfast.worker.sampling_params import SamplingParams

CALL = Generate(
    request=EngineRequest(request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams(seed=0)),
    resume=None,
    timeout_s=1.0,
)


class Router(Process):
    """Answers each call with one word, and says what it has heard."""

    def __init__(self, network: Network, answer: Any) -> None:
        super().__init__("router", network)
        self.heard: list[object] = []
        self._answer = answer

    def on_message(self, connection: Connection, message: Any) -> None:
        self.heard.append(message)
        connection.send(self, self._answer)

    def on_closed(self, connection: Connection) -> None:
        self.heard.append("closed")


def late_call(answer: object, *, given_up: bool = False) -> tuple[Straggler, list[object]]:
    """A straggler that has come through, and what its router has heard."""
    timeline = Timeline()
    network = Network(timeline, random.Random(0), 0.01)
    router = Router(network, answer)
    router.start()
    straggler = Straggler(CALL, network, network.path("clients", "router"), router)
    if given_up:
        straggler.give_up()
    straggler.arrive()
    while timeline.step():
        pass
    return straggler, router.heard


def test_it_knows_when_it_was_turned_away_for_a_newer_one():
    straggler, heard = late_call(Fail(key=SequenceKey("", "r"), error=RequestSupersededError("a newer one goes on")))
    assert (straggler.was_turned_away, heard) == (True, [CALL])
    straggler, heard = late_call(Fail(key=SequenceKey("", "r"), error=RequestAbortedError("this router is stopping")))
    assert (straggler.was_turned_away, heard) == (False, [CALL])


def test_it_hangs_up_where_it_is_served():
    delta = OutputDelta(request_id="r", first_token_index=0, token_ids=(1,), text="a")
    assert late_call(delta)[1] == [CALL, "closed"]


def test_given_up_before_it_arrives_it_comes_with_its_end():
    assert late_call(OutputDelta(request_id="r", first_token_index=0, token_ids=(1,), text="a"), given_up=True)[1] == [
        CALL,
        "closed",
    ]
