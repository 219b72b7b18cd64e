"""Command `holdfast logs`: what the processes of a cluster on this machine have written."""

import sys
import time
from typing import Annotated, Final

from cyclopts import Parameter

from holdfast.worker.errors import ConfigurationError

_PERIOD_S: Final = 0.5


def logs(
    which: Annotated[
        str, Parameter(help="only of processes whose name has this: router, replica, demo, a number")
    ] = "",
    /,
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative=(), help="go on until Ctrl-C")] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="at most so many lines, the last ones")] = 200,
    paths: Annotated[bool, Parameter(negative=(), help="say where the files are, and no more")] = False,
    namespace: Annotated[str, Parameter(help="the cluster's name")] = "holdfast",
    pid: Annotated[
        int | None, Parameter(help="the process of `holdfast serve`, where several clusters run here")
    ] = None,
) -> int:
    """Show what routers and replicas of a cluster on this machine have written, in order of time.

    Of the cluster that runs; if none does, of the last one that did.
    """
    from holdfast.cluster.serve.log_files import Tail, log_files, merged, session_folder

    if lines < 0:
        raise ConfigurationError(f"--lines {lines}: must not be below 0")
    folder = session_folder(_process(namespace, pid))
    files = [file for file in log_files(folder) if which in file.name]
    if not files:
        names = ", ".join(sorted({file.name for file in log_files(folder)}))
        raise ConfigurationError(f"{which}: no process of the cluster is called so; there are: {names}")
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
    """Of the cluster that is meant; None: none runs. Raises `ConfigurationError` where several do."""
    from holdfast.cluster.serve.running import living

    running = [one for one in living() if one.namespace == namespace]
    found = [one for one in running if pid is None or one.is_below(pid)]
    if not found:
        return pid
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} clusters run here; choose one by --pid: {'; '.join(map(str, found))}")
    return found[0].pid


def _show(new: list[tuple[str, str]]) -> None:
    for name, line in new:
        print(f"{name} | {line}", flush=True)
