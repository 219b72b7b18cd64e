"""`holdfast serve`: a cluster for as long as the command runs."""

import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cluster.config import HoldfastConfig, load_config
from cluster.config_sources import Layer, Setting
from cluster.flags import ESSENTIALS, takes_settings
from cluster.progress import progress

if TYPE_CHECKING:
    from cluster.serving import Serving


@takes_settings(*HoldfastConfig.model_fields, without=("model.model",))
def serve(
    model: Annotated[
        str | None, Parameter(help="a Hugging Face folder, a hub id, or the bundled demo [default]")
    ] = None,
    /,
    *,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Start a cluster, or join one with --address, and serve a model over gRPC until Ctrl-C.

    On SIGINT and SIGTERM running requests get drain_timeout_s to finish; a second signal ends them at once.
    """
    if model is not None:
        settings = {**settings, "model.model": Setting(model, "MODEL")}
    run(load_config(settings, config).config)
    return 0


def run(config: HoldfastConfig) -> None:
    """Serves until a signal comes. Interrupted while it starts, raises `KeyboardInterrupt`."""
    from cluster.serving import serving

    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        with progress(sys.stderr) as report:
            cluster = stack.enter_context(serving(config, report))
        _announce(cluster, config, time.monotonic() - started_s)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("stopping: running requests may finish; once more ends them", file=sys.stderr, flush=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """SIGTERM means the same as Ctrl-C."""
    raise KeyboardInterrupt


def _announce(cluster: "Serving", config: HoldfastConfig, seconds: float) -> None:
    ranks = config.parallel.tensor_parallel_size
    replicas = f"{cluster.num_replicas} replica{'s' if cluster.num_replicas > 1 else ''} x tensor parallel {ranks}"
    print(f"ready after {seconds:.1f} s: {cluster.model}, {replicas}, gRPC on {' and '.join(cluster.routers)}")
    print(f'try: holdfast generate --server {",".join(cluster.routers)} "The capital of France is"', flush=True)
