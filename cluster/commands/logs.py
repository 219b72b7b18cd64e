"""Command `holdfast logs`: the logs of a cluster's processes, on this machine or on that of a router."""

import sys
import time
from collections.abc import Iterable
from typing import Annotated, Final

from cyclopts import Parameter

from holdfast.cluster.config.flags import takes_settings
from holdfast.cluster.config.layers import Layer
from holdfast.worker.errors import ConfigurationError

_PERIOD_S: Final = 0.5


@takes_settings("client")
def logs(
    which: Annotated[
        str, Parameter(help="only processes whose name contains this: router, replica, demo, a process id")
    ] = "",
    /,
    *,
    server: Annotated[
        str | None, Parameter(help="host:port of a running router: the logs of its machine; unset: of this machine")
    ] = None,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative=(), help="print new lines until Ctrl-C")
    ] = False,
    lines: Annotated[
        int, Parameter(name=["--lines", "-n"], help="maximum lines printed at first, the last ones")
    ] = 200,
    paths: Annotated[bool, Parameter(negative=(), help="print the paths of the log files only")] = False,
    namespace: Annotated[str | None, Parameter(help="name of the cluster [default: holdfast]")] = None,
    pid: Annotated[
        int | None,
        Parameter(help="process id of `holdfast serve`, where this machine runs several clusters of one name"),
    ] = None,
    settings: Layer,
) -> int:
    """Show the logs of a cluster's routers and replicas, in order of time."""
    if lines < 0:
        raise ConfigurationError(f"--lines {lines}: must not be below 0")
    if server is not None:
        given = {"--paths": paths, "--namespace": namespace is not None, "--pid": pid is not None}
        if flags := ", ".join(name for name, is_given in given.items() if is_given):
            raise ConfigurationError(f"{flags} (with --server): means log files of this machine; leave it out")
        return _remote(server, which, lines, follow, settings)
    return _local(which, lines, follow, paths, namespace or "holdfast", pid)


def _remote(server: str, which: str, lines: int, follow: bool, settings: Layer) -> int:
    from holdfast.cluster.client.transport import stream_admin
    from holdfast.cluster.config.config import load_config

    options = load_config(settings).config.client.options
    request = {"process": which, "num_lines": lines, "follow": follow}
    for message in stream_admin(server, "ReadLogs", request, **options):
        _show((one.process, one.text) for one in message.lines)
    return 0


def _local(which: str, lines: int, follow: bool, paths: bool, namespace: str, pid: int | None) -> int:
    """Prints logs of the running cluster, or of the last one if none runs."""
    from holdfast.cluster.serve.log_files import Tail, log_files, merged, session_folder

    folder = session_folder(_process(namespace, pid))
    files = [file for file in log_files(folder) if which in file.name]
    if not files:
        names = ", ".join(sorted({file.name for file in log_files(folder)}))
        raise ConfigurationError(f"{which}: no process of the cluster has this in its name; there are: {names}")
    if paths:
        for file in files:
            print(f"{file.path}  {file.name}")
        return 0
    tails = {file.path: Tail(file) for file in files}
    print(f"logs in {folder}", file=sys.stderr)
    _show(merged(list(tails.values()))[-lines:] if lines else [])
    while follow:
        time.sleep(_PERIOD_S)
        for file in log_files(folder):  # processes come and go
            if which in file.name and file.path not in tails:
                tails[file.path] = Tail(file)
        _show(merged(list(tails.values())))
    return 0


def _process(namespace: str, pid: int | None) -> int | None:
    """Process id of the cluster that is meant; None: none runs. Raises `ConfigurationError` if several do."""
    from holdfast.cluster.serve.running import living

    running = [one for one in living() if one.namespace == namespace]
    found = [one for one in running if pid is None or one.is_below(pid)]
    if not found:
        return pid
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} clusters run here; choose one by --pid: {'; '.join(map(str, found))}")
    return found[0].pid


def _show(new: Iterable[tuple[str, str]]) -> None:
    for name, line in new:
        print(f"{name} | {line}", flush=True)
