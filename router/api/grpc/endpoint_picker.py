"""gRPC servicer of an endpoint picker: tells Envoy which router gets an HTTP request (`ext_proc`).

The protocol is that of the Gateway API Inference Extension, proposal 004, version 1.0. The endpoints are routers: each
reaches every replica, so that the picker balances what routers do, and the router that is picked chooses the replica.
"""

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Final

from holdfast.foreign import external_processor_pb2 as pb
from holdfast.router.api.grpc.handlers import Context, Requests
from holdfast.router.dispatch.policy import RandomIndex
from holdfast.router.links.replica_directory import RouterEndpoint
from holdfast.worker.errors import InvalidRequestError

SERVICE: Final = pb.DESCRIPTOR.services_by_name["ExternalProcessor"]
HEALTH_NAMES: Final = ("readiness", SERVICE.full_name)
"""Names in gateways' health checks, besides `liveness`."""

DESTINATION: Final = "x-gateway-destination-endpoint"
_NAMESPACE: Final = "envoy.lb"
_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"
_MAX_PICKED: Final = 3
"""Endpoints of one answer: the proxy tries the next if one cannot be reached."""


def picked(loads: dict[str, int], random_index: RandomIndex) -> list[str]:
    """Endpoints for one request, the first choice first: the less loaded of two at random, then others by their load.

    Of two rather than of all, since pickers know each other's loads some seconds late (Mitzenmacher 2001).
    """
    if len(loads) < 2:
        return list(loads)
    addresses = sorted(loads)
    first = addresses.pop(random_index(len(addresses)))
    second = addresses.pop(random_index(len(addresses)))
    pair = sorted((first, second), key=lambda one: loads[one])
    return [*pair, *sorted(addresses, key=lambda one: loads[one])][:_MAX_PICKED]


class EndpointPicker:
    """Endpoint picker of one router: its view of all routers, and the requests sent to each since that view."""

    def __init__(self, own: Callable[[], RouterEndpoint | None], random_index: RandomIndex) -> None:
        """`own` is this router as it is now; None where it serves no HTTP."""
        self._own = own
        self._random_index = random_index
        self._announced: dict[str, RouterEndpoint] = {}
        self._num_sent = Counter[str]()

    def set_routers(self, routers: Collection[RouterEndpoint]) -> None:
        """Takes the directory's view of all routers."""
        known = {one.address: one for one in routers}
        for address in self._num_sent.keys() | known.keys():
            if known.get(address) != self._announced.get(address):
                del self._num_sent[address]
        self._announced = known

    def pick(self, subset: Collection[str] | None = None) -> list[str]:
        """Addresses, the first choice first; none where no router of the `subset`, or of all, has a replica."""
        known, own = dict(self._announced), self._own()
        if own is not None:
            known[own.address] = own
        loads = {
            address: one.num_open + (0 if one is own else self._num_sent[address])
            for address, one in known.items()
            if one.has_replicas and (subset is None or address in subset)
        }
        found = picked(loads, self._random_index)
        if found:
            self._num_sent[found[0]] += 1
        return found


class EndpointPickerServicer:
    """`envoy.service.ext_proc.v3.ExternalProcessor`: a stream for each HTTP request."""

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker

    async def Process(self, requests: Requests, context: Context) -> AsyncGenerator[pb.ProcessingResponse, None]:
        """Answers each message of Envoy's external processing stream. Raises InvalidRequestError for a message that
        cannot be parsed.
        """
        modes = pb.ProtocolConfiguration()
        async for message in requests:
            if isinstance(message, InvalidRequestError):
                raise message
            assert isinstance(message, pb.ProcessingRequest), "the handler parses it"
            if message.HasField("protocol_config"):
                modes = message.protocol_config
            if not message.observability_mode:
                yield self._answer(message, modes)

    def _answer(self, message: pb.ProcessingRequest, modes: pb.ProtocolConfiguration) -> pb.ProcessingResponse:
        kind = message.WhichOneof("request")
        match kind:
            case "request_headers":
                return self._destination(message)
            case "request_body":
                return pb.ProcessingResponse(request_body=_passed_on(message.request_body, modes.request_body_mode))
            case "response_body":
                return pb.ProcessingResponse(response_body=_passed_on(message.response_body, modes.response_body_mode))
            case "response_headers":
                return pb.ProcessingResponse(response_headers=pb.HeadersResponse())
            case "request_trailers":
                return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            case "response_trailers":
                return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())
            case _:
                raise InvalidRequestError("request", None, "must be headers, a body or trailers")

    def _destination(self, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        found = self._picker.pick(_subset(message))
        if not found:
            return pb.ProcessingResponse(immediate_response=_unavailable())
        value = ",".join(found)
        mutation = pb.HeaderMutation(set_headers=[_header(DESTINATION, value)])
        common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
        response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        response.dynamic_metadata.fields[_NAMESPACE].struct_value.fields[DESTINATION].string_value = value
        return response


def _passed_on(body: pb.HttpBody, mode: "pb.BodySendMode") -> pb.BodyResponse:
    """Response that passes a body on. In full-duplex mode a chunk is passed on only if it is sent back, in others
    unless it is replaced.
    """
    if mode != pb.FULL_DUPLEX_STREAMED:
        return pb.BodyResponse()
    chunk = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=chunk)))


def _subset(message: pb.ProcessingRequest) -> Sequence[str] | None:
    """The endpoints that the proxy lets the picker choose from; None: all."""
    hints = message.metadata_context.filter_metadata
    if _SUBSET_NAMESPACE not in hints or _SUBSET not in hints[_SUBSET_NAMESPACE].fields:
        return None
    return [value.string_value for value in hints[_SUBSET_NAMESPACE].fields[_SUBSET].list_value.values]


def _unavailable() -> pb.ImmediateResponse:
    error = {"message": "no router has a replica", "type": "server_error", "param": None, "code": "replica_unavailable"}
    return pb.ImmediateResponse(
        status=pb.HttpStatus(code=503),
        headers=pb.HeaderMutation(
            set_headers=[_header("content-type", "application/json"), _header("retry-after", "1")]
        ),
        body=json.dumps({"error": error}).encode(),
        details="no ready endpoint",
    )


def _header(name: str, value: str) -> pb.HeaderValueOption:
    return pb.HeaderValueOption(
        header=pb.HeaderValue(key=name, raw_value=value.encode()),
        append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
