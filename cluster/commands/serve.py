"""`holdfast serve`: a cluster for as long as the command runs."""

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

from cyclopts import Parameter

from cluster.config import HoldfastConfig, load_config
from cluster.config_sources import Layer, Setting
from cluster.flags import ESSENTIALS, takes_settings
from cluster.progress import progress


@takes_settings(*HoldfastConfig.model_fields, without=("model.model",))
def serve(
    model: Annotated[str | None, Parameter(help="a Hugging Face folder, a hub id, or the bundled demo [default]")] = None,
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
    from cluster.serving import Serving, serving

    signal.signal(signal.SIGTERM, _interrupt)
    started_s = time.monotonic()
    with progress(sys.stderr) as report, serving(config, report) as cluster:
        _announce(cluster, config, time.monotonic() - started_s)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("stopping: running requests may finish; Ctrl-C again ends them", file=sys.stderr)
