"""Command `holdfast front`: one HTTP address before several routers."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.worker.errors import ConfigurationError


def front(
    *,
    routers: Annotated[
        str, Parameter(help="HTTP addresses of the routers: host:port or https://host:port, by commas")
    ] = "127.0.0.1:8000,127.0.0.1:8001",
    host: Annotated[str, Parameter(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="port to listen on; 0: any free port")] = 8080,
    tls_cert: Annotated[Path | None, Parameter(help="certificate chain, in PEM")] = None,
    tls_key: Annotated[Path | None, Parameter(help="its private key")] = None,
    tls_client_ca: Annotated[
        Path | None, Parameter(help="CA (PEM) that must have signed clients' certificates")
    ] = None,
    routers_ca: Annotated[
        Path | None, Parameter(help="CA of the routers' certificates (PEM), or the certificate itself")
    ] = None,
    routers_cert: Annotated[
        Path | None, Parameter(help="client certificate for routers that require one (PEM)")
    ] = None,
    routers_key: Annotated[Path | None, Parameter(help="its private key")] = None,
) -> int:
    """Serve HTTP before several routers: a stream whose router is lost goes on at another one, whatever its client.

    Keys are asked for by the routers, and what clients send is handed on to them.
    """
    import uvloop

    from holdfast.cluster.front.front import FrontOptions, serve
    from holdfast.worker.wire.tls import Tls

    addresses = [one.strip() for one in routers.split(",") if one.strip()]
    try:
        tls = Tls(cert=tls_cert, key=tls_key, ca=tls_client_ca) if tls_cert or tls_key or tls_client_ca else None
        routers_tls = Tls(cert=routers_cert, key=routers_key, ca=routers_ca)
        options = FrontOptions(routers=addresses, host=host, port=port, tls=tls, routers_tls=routers_tls)
        uvloop.run(serve(options, lambda text: print(f"holdfast: {text}", file=sys.stderr, flush=True)))
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"front: {error}") from error
    return 0
