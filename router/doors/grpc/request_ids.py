"""Request ids in metadata: `x-request-id`, which proxies and clients set, and which every answer says.

What may not live here: checks of an id (`router/request.py`).
"""

from typing import Final

from holdfast.router.doors.grpc.handlers import Context
from holdfast.v1 import inference_pb2

REQUEST_ID_HEADER: Final = "x-request-id"


def given_request_id(context: Context) -> str:
    """The id that the call's metadata gives; empty if it gives none."""
    for name, value in context.invocation_metadata() or ():
        if name == REQUEST_ID_HEADER:
            return str(value)
    return ""


def with_request_id(message: inference_pb2.GenerateRequest, context: Context) -> inference_pb2.GenerateRequest:
    """The message with the id of the metadata, where it has none of its own."""
    if not message.request_id:
        message.request_id = given_request_id(context)
    return message
