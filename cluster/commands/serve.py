"""Commands `holdfast serve`, a cluster for as long as the command runs, and `holdfast front`, before its routers."""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from holdfast.cluster.config.flags import ESSENTIALS, SECTIONS, takes_settings
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.reaper import STOP_SIGNALS, stop_signals
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig
    from holdfast.cluster.serve.start_up import Serving

SETTLE_S: Final = 0.3
"""Signals that come so soon after the first are no second one: `timeout` and terminals may send the same one twice."""


@takes_settings(*SECTIONS, without=("model.model", "cluster.models"))
def serve(
    model: Annotated[
        list[str] | None,
        Parameter(
            name="--model",
            help="a Hugging Face folder, a GGUF file, a hub id, smollm2, or the bundled demo [default]; several: each "
            "has its own replicas",
            negative=(),
            group=ESSENTIALS,
        ),
    ] = None,
    *,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Start a cluster, or join one with --address, and serve models over gRPC and HTTP until Ctrl-C.

    On SIGINT and SIGTERM running requests get drain_timeout_s to finish; a second signal ends them at once.
    """
    from holdfast.cluster.config.config import load_config

    if model and len(model) == 1:
        settings = {**settings, "model.model": Setting(model[0], "MODEL"), "cluster.models": Setting((), "MODEL")}
    elif model:
        settings = {**settings, "cluster.models": Setting(model, "MODEL")}
    return run(load_config(settings, config).config)


def run(config: "HoldfastConfig") -> int:
    """Serves until a signal comes. A cluster of this machine runs in separate processes, which replace each other."""
    if config.cluster.address is not None:
        host(config)
        return 0
    from holdfast.cluster.config.machine import Machine, crowding
    from holdfast.cluster.config.model_files import uneven_heads
    from holdfast.cluster.serve import life_starter
    from holdfast.cluster.serve.life_starter import IMPORTED
    from holdfast.cluster.serve.preflight import check_here
    from holdfast.cluster.serve.supervisor import STOP_SLACK_S, supervise

    check_here(config)
    if crowded := crowding(config.each_model, Machine.here()):
        _say(crowded)
    for one in config.each_model:
        if (message := uneven_heads(one)) is not None:
            _say(message)
    starter = [sys.executable, "-m", life_starter.__name__, "holdfast.cluster.commands.hosted", *IMPORTED]
    limit_s = config.cluster.drain_timeout_s + STOP_SLACK_S
    return supervise(starter, config.model_dump_json(), limit_s, _say)


def host(config: "HoldfastConfig", forks: Path | None = None) -> None:
    """Serves in this process until a signal comes. Interrupted while it starts, raises `KeyboardInterrupt`.

    `forks`: the socket of a fork server for the processes of a Ray of our own, which else starts one. Where the Ray is
    our own and is lost, this process ends at once, with `EXIT_LOST`.
    """
    from holdfast.cluster.serve.serving import serving

    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        with progress(sys.stderr) as report:
            cluster = stack.enter_context(serving(config, report, _end_as_lost, forks))
        _announce(cluster, config, time.monotonic() - started_s)
        wait_for_stop()
        print("stopping: running requests may finish; a second signal ends them now", file=sys.stderr, flush=True)


def wait_for_stop(settle_s: float = SETTLE_S) -> None:
    """Returns after the first SIGINT or SIGTERM, with those of the next `settle_s` taken in too. On the main thread."""
    with stop_signals() as news:
        while os.read(news, 1)[0] not in STOP_SIGNALS:
            pass
        time.sleep(settle_s)


def _end_as_lost(process: str) -> None:
    """Ends this process at once: calls to a lost Ray would wait for a minute."""
    from holdfast.cluster.serve.supervisor import EXIT_LOST

    _say(f"Ray's {process} has ended, and the cluster with it")
    os._exit(EXIT_LOST)


def _say(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    """SIGTERM means the same as Ctrl-C."""
    raise KeyboardInterrupt


def _announce(cluster: "Serving", config: "HoldfastConfig", seconds: float) -> None:
    print(f"ready after {seconds:.1f} s: {_models(cluster, config)}, gRPC on {' and '.join(cluster.routers)}")
    security = config.security
    scheme = "http" if security.tls_cert is None else "https"
    header = "" if security.api_keys is None else ' -H "Authorization: Bearer $HOLDFAST_API_KEY"'
    if cluster.front:
        print(f"HTTP, at which streams outlive a router: {scheme}://{cluster.front}/v1")
    if cluster.http:
        print(f"HTTP, for OpenAI's clients: {' and '.join(f'{scheme}://{address}/v1' for address in cluster.http)}")
        body = f'{{"model": "{cluster.models[0]}", "prompt": "The capital of France is", "max_tokens": 16}}'
        print(f"try: curl {scheme}://{cluster.http[0]}/v1/completions{header} --json '{body}'")
    if cluster.engines:
        print(f"vLLM's engine protocol, replica by replica: {' and '.join(cluster.engines)}")
    chosen = f" --model {cluster.models[0]}" if len(cluster.models) > 1 else ""
    print(f'try: holdfast generate --server {",".join(cluster.routers)}{chosen} "The capital of France is"', flush=True)


def _models(cluster: "Serving", config: "HoldfastConfig") -> str:
    """Each model with its replicas."""
    shown = []
    for one in config.each_model:
        number, ranks = cluster.num_replicas[one.model.name], one.parallel.tensor_parallel_size
        shown.append(f"{one.model.name}, {number} replica{'s' if number > 1 else ''} x tensor parallel {ranks}")
    return " and ".join(shown)


# --- a front before routers ---


def front(
    *,
    routers: Annotated[
        str, Parameter(help="HTTP addresses of the routers: host:port or https://host:port, separated by commas")
    ] = "127.0.0.1:8000,127.0.0.1:8001",
    host: Annotated[str, Parameter(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="port to listen on; 0: any free port")] = 8080,
    tls_cert: Annotated[Path | None, Parameter(help="certificate chain (PEM)")] = None,
    tls_key: Annotated[Path | None, Parameter(help="private key of the certificate (PEM)")] = None,
    tls_client_ca: Annotated[
        Path | None, Parameter(help="CA (PEM) that must have signed clients' certificates")
    ] = None,
    routers_ca: Annotated[
        Path | None, Parameter(help="CA of the routers' certificates (PEM), or the certificate itself")
    ] = None,
    routers_cert: Annotated[
        Path | None, Parameter(help="client certificate for routers that require one (PEM)")
    ] = None,
    routers_key: Annotated[Path | None, Parameter(help="private key of the certificate (PEM)")] = None,
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
