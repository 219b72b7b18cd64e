"""Command `holdfast run-batch`: computes the requests of a file, on a server or in this process, and writes the
answers.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from holdfast.cluster.commands.generate import check_for_server, clients_options, engine_here
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer
from holdfast.worker.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.cluster.client.batch_run import Outcome
    from holdfast.cluster.config.config import HoldfastConfig
    from holdfast.router.dispatch.dispatch_host import DispatchHost
    from holdfast.router.requests.request_processor import RequestProcessor
    from holdfast.worker.progress import Report


@takes_settings("model", "parallel", "cache", "scheduler", "speculation", "client", without=("model.seed",))
def run_batch(
    *,
    input_file: Annotated[
        Path | None,
        Parameter(name=("--input-file", "-i"), group=ESSENTIALS, help="file of requests, one JSON object per line"),
    ] = None,
    output_file: Annotated[
        Path | None, Parameter(name=("--output-file", "-o"), group=ESSENTIALS, help="file for the answers")
    ] = None,
    server: Annotated[
        str | None,
        Parameter(
            group=ESSENTIALS, help="http://host:port of a router with --store; unset: load the model in this process"
        ),
    ] = None,
    overwrite: Annotated[
        bool, Parameter(group=ESSENTIALS, negative=(), help="replace an existing output file")
    ] = False,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Compute the requests of a file as a batch, and write the answers in their order.

    Started again after it was interrupted, it goes on with the lines that have no answer.
    """
    from holdfast.cluster.config.config import load_config
    from holdfast.cluster.progress_bars import progress

    source, target = _checked_files(input_file, output_file, overwrite)
    if server is not None:
        check_for_server(settings, config)
        with progress(sys.stderr) as report:
            outcome = asyncio.run(_on_server(server, source, target, clients_options(settings), report))
    else:
        outcome = _here(load_config(settings, config).config, source, target)
    return _print_outcome(outcome, target)


def _checked_files(source: Path | None, target: Path | None, overwrite: bool) -> tuple[Path, Path]:
    if source is None or target is None:
        missing = "--input-file (-i)" if source is None else "--output-file (-o)"
        raise ConfigurationError(f"{missing}: is needed")
    if not source.is_file():
        raise ConfigurationError(f"--input-file {source}: no such file")
    if not target.absolute().parent.is_dir():
        raise ConfigurationError(f"--output-file {target}: no such folder: {target.absolute().parent}")
    if target.exists() and not overwrite:
        raise ConfigurationError(f"--output-file {target}: is there; add --overwrite to replace it")
    return source, target


async def _on_server(server: str, source: Path, target: Path, options: dict[str, Any], report: "Report") -> "Outcome":
    import aiohttp

    from holdfast.cluster.client.batch_run import BatchRun, Body, Unreachable

    base = server.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigurationError(f"--server {server}: must be a URL, such as http://127.0.0.1:8000")
    tls, key = options.get("tls"), options["api_key"]
    connector = aiohttp.TCPConnector(ssl=tls.client_context() if tls is not None else True)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    patient = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=patient) as session:

        async def call(
            method: str, path: str, body: Body | None = None, content_type: str = "application/json"
        ) -> tuple[int, bytes]:
            sent: dict[str, Any] = (
                {"data": body(), "headers": {"content-type": content_type}} if body is not None else {}
            )
            try:
                async with session.request(method, base + path, **sent) as response:
                    return response.status, await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise Unreachable(f"{base} does not answer: {error or type(error).__name__}") from error

        return await BatchRun(call, source, target, base, report).run()


def _here(config: "HoldfastConfig", source: Path, target: Path) -> "Outcome":
    from holdfast.cluster.progress_bars import progress

    engine = engine_here(config)
    try:
        with progress(sys.stderr) as report:
            return engine.on_router(partial(_in_process, config, source, target, report))
    finally:
        engine.stop()


async def _in_process(
    config: "HoldfastConfig",
    source: Path,
    target: Path,
    report: "Report",
    processor: "RequestProcessor",
    dispatch_host: "DispatchHost",
) -> "Outcome":
    from holdfast.cluster.client.batch_run import BatchRun, folder_of
    from holdfast.cluster.offline.local_api import local_api

    kept = {"store": str(folder_of(target)), "batch_concurrency": config.scheduler.max_num_seqs}
    router = config.router.model_copy(update=kept)
    async with local_api(processor, dispatch_host, config.limits, router) as call:
        return await BatchRun(call, source, target, f"model {config.model.model}", report).run()


def _print_outcome(outcome: "Outcome", target: Path) -> int:
    for problem in outcome.problems:
        print(problem, file=sys.stderr)
    if outcome.num_answers or outcome.num_errors:
        counts = f"{outcome.num_answers} answers, {outcome.num_errors} errors"
        print(f"{counts}: {target}", file=sys.stderr)
    return 1 if outcome.problems else 0
