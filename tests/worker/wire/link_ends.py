"""Messages of a link as the other end reads them."""

from holdfast.v1 import engine_pb2
from holdfast.worker.request import EngineLoad
from holdfast.worker.step_update import Heartbeat, Hello, StepUpdate
from holdfast.worker.wire import link_responses

NO_LOAD = EngineLoad(num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=9, num_total_blocks=9)


def sent_down(message: engine_pb2.LinkRequest) -> engine_pb2.LinkRequest:
    return engine_pb2.LinkRequest.FromString(message.SerializeToString())


def sent_up(message: engine_pb2.LinkResponse) -> Hello | StepUpdate | Heartbeat:
    return link_responses.read_response(engine_pb2.LinkResponse.FromString(message.SerializeToString()))
