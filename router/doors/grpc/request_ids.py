"""Request ids in metadata: `x-request-id`, which proxies and clients set, and which every answer says. With it comes
the caller's trace context, `traceparent`.

What may not live here: checks of an id (`router/request.py`).
"""

from typing import Final

from holdfast.router.doors.grpc.handlers import Context
from holdfast.router.requests.poison_watch import current_reading
from holdfast.router.requests.tracing import TRACEPARENT, note_incoming
from holdfast.router.router_losses import ROUTERS_LOST, routers_lost
from holdfast.v1 import inference_pb2

REQUEST_ID_HEADER: Final = "x-request-id"


def given_request_id(context: Context) -> str:
    """The id that the call's metadata gives; empty if it gives none. Notes the trace context of its task, and how many
    routers its client has lost with it: raises `ReplicaError` if it is to come again.
    """
    given = dict(context.invocation_metadata() or ())
    if ROUTERS_LOST in given and (reading := current_reading()) is not None:
        reading.suspect(routers_lost(str(given[ROUTERS_LOST])))
    note_incoming(str(given.get(TRACEPARENT, "")))
    return str(given.get(REQUEST_ID_HEADER, ""))


def with_request_id(message: inference_pb2.GenerateRequest, context: Context) -> inference_pb2.GenerateRequest:
    """The message with the id of the metadata, where it has none of its own."""
    given = given_request_id(context)
    if not message.request_id:
        message.request_id = given
    return message
