"""Client of operators: one call to one router's `holdfast.v1.AdminService`.

What may not live here: retries, which operators decide, and what is printed (`cluster/commands/admin.py`).
"""

from collections.abc import Mapping
from typing import Any, Final

import grpc

from holdfast.router.wire.statuses import CallStatus, error_of
from holdfast.v1 import admin_pb2, admin_pb2_grpc
from holdfast.worker.security.loopback import reaching
from holdfast.worker.security.tls import Tls

TIMEOUT_S: Final = 30.0


def call_admin(
    server: str, method: str, fields: Mapping[str, object], api_key: str = "", tls: Tls | None = None
) -> Any:
    """The answer of the router at `server` (`host:port`) to a method, whose request has these fields. Blocking.

    Raises `HoldfastError`.
    """
    request = getattr(admin_pb2, f"{method}Request")(**fields)
    options = reaching(server, ())
    channel = (
        grpc.insecure_channel(server, options)
        if tls is None
        else grpc.secure_channel(server, tls.channel_credentials(), options)
    )
    metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
    with channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            return getattr(stub, method)(request, metadata=metadata, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            trailers: Any = error.trailing_metadata() or ()
            found = tuple(tuple(one) for one in trailers)
            status = CallStatus(code=error.code(), message=error.details() or "", trailing_metadata=found)
            raise error_of(status) from None
