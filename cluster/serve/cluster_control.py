"""Cluster control of a router: changes models through Ray Serve, and reads the logs of its machine."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from holdfast.cluster.config.chat_templates import SETTING, is_template
from holdfast.cluster.config.config import HoldfastConfig, LoadedConfig, is_given, load_config
from holdfast.cluster.config.sources import mapping_layer
from holdfast.cluster.serve import models
from holdfast.cluster.serve.log_files import LogFile, Tail, log_files, merged
from holdfast.cluster.serve.ray_internals import session_folder
from holdfast.router.cluster_control import (
    AddModel,
    ClusterModel,
    LogLine,
    ModelChange,
    ModelChanged,
    Progress,
    RemoveModel,
    RollbackModel,
    ScaleModel,
    UpdateModel,
)
from holdfast.worker.errors import ConfigurationError, ReplicaError, RequestAbortedError
from holdfast.worker.progress import Report

SECTIONS: Final = ("model", "parallel", "cache", "scheduler", "health", "speculation", "scaling", "cluster")
"""Sections of settings that each model may have for itself; all others belong to the cluster."""

LOG_PERIOD_S: Final = 0.5
LOG_BATCH: Final = 200
"""Log lines in one message."""


class ServeControl:
    """Control of the cluster for one router, whose settings are `config`. One change runs at a time, on a thread: Ray
    Serve's calls block.
    """

    def __init__(self, config: HoldfastConfig) -> None:
        self._config = config
        self._changing: threading.Thread | None = None

    async def list_models(self) -> Sequence[ClusterModel]:
        return await asyncio.to_thread(models.list_models, self._namespace)

    async def change(self, change: ModelChange) -> AsyncGenerator[Progress | ModelChanged, None]:
        if self._changing is not None and self._changing.is_alive():
            raise ReplicaError("this router is changing a model already: try again when that is complete")
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Progress | ModelChanged | Exception] = asyncio.Queue()
        is_cancelled = threading.Event()

        def put(event: Progress | ModelChanged | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def report(phase: str, done: int, total: int) -> None:
            if is_cancelled.is_set():
                raise RequestAbortedError("the call was cancelled")
            put(Progress(phase, done, total))

        def run() -> None:
            try:
                put(self._done(change, report))
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                put(error)

        self._changing = threading.Thread(target=run, name="change of models", daemon=True)
        self._changing.start()
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, ModelChanged):
                    return
        finally:
            is_cancelled.set()

    async def read_logs(
        self, process: str, num_lines: int, *, follows: bool
    ) -> AsyncGenerator[Sequence[LogLine], None]:
        tails: dict[str, Tail] = {}
        lines = await asyncio.to_thread(self._new_lines, process, tails)
        if not tails:
            names = ", ".join(sorted({file.name for file in self._log_files()})) or "none"
            raise ConfigurationError(
                f"process = {process!r}: must be part of a process's name on this machine: {names}"
            )
        lines = lines[-num_lines:] if num_lines else []
        while True:
            for start in range(0, len(lines), LOG_BATCH):
                yield lines[start : start + LOG_BATCH]
            if not follows:
                return
            await asyncio.sleep(LOG_PERIOD_S)
            lines = await asyncio.to_thread(self._new_lines, process, tails)

    # --- inside ---

    @property
    def _namespace(self) -> str:
        return self._config.cluster.namespace

    def _done(self, change: ModelChange, report: Report) -> ModelChanged:
        from holdfast.cluster.serve import serving  # what starts clusters, which a router seldom needs

        report("checking", 0, 1)
        match change:
            case AddModel():
                config = self._settings(change.settings).config
                report("checking", 1, 1)
                return ModelChanged(model=config.model.name, num_replicas=serving.add_model(config, report))
            case UpdateModel():
                return self._updated(change, report)
            case ScaleModel():
                named = {"model": {"served_model_name": change.model}, "cluster": {"replicas": change.num_replicas}}
                config = self._settings(named).config
                report("checking", 1, 1)
                return ModelChanged(model=change.model, num_replicas=serving.scale_model(config, report))
            case RollbackModel():
                report("checking", 1, 1)
                removed = serving.rollback_model(self._namespace, change.model, self._drain_timeout_s(change))
                return ModelChanged(model=change.model, removed_applications=tuple(removed))
            case RemoveModel():
                report("checking", 1, 1)
                models.remove(self._namespace, change.model, self._drain_timeout_s(change))
                return ModelChanged(model=change.model)

    def _updated(self, change: UpdateModel, report: Report) -> ModelChanged:
        from holdfast.cluster.serve.models import over_running, running_settings
        from holdfast.cluster.serve.serving import update_model
        from holdfast.cluster.serve.updates import UpdatePlan

        given = self._settings({**change.settings, "model": _named(change)})
        plan = UpdatePlan(
            model=change.model,
            num_replicas=given.config.cluster.replicas if is_given(given, "cluster.replicas") else None,
            share=change.canary_share,
            watch_s=change.canary_s,
            min_requests=change.min_requests,
        )
        wanted = self._within_cluster(over_running(running_settings(self._namespace, change.model), given))
        report("checking", 1, 1)
        updated = update_model(wanted, plan, report)
        return ModelChanged(
            model=change.model,
            num_replicas=updated.num_replicas,
            old_version=updated.old_version,
            new_version=updated.new_version,
        )

    def _settings(self, settings: Mapping[str, Any]) -> LoadedConfig:
        """Raises `ConfigurationError` for a setting that is not known, or that a router must not read."""
        own = {section: values for section, values in settings.items() if section in SECTIONS}
        loaded = load_config(mapping_layer(HoldfastConfig, own, "ChangeModel"), environ={})
        template = loaded.config.model.chat_template
        if template is not None and not is_template(template):
            raise ConfigurationError(f"{SETTING} = {template[:100]!r}: must be a template's text, not a file's path")
        return replace(loaded, config=self._within_cluster(loaded.config))

    def _within_cluster(self, config: HoldfastConfig) -> HoldfastConfig:
        """The settings, with the cluster's where the model has no setting."""
        own = self._config
        place = {name: getattr(own.cluster, name) for name in ("namespace", "address", "host")}
        sections = {name: getattr(own, name) for name in ("router", "limits", "overload", "security", "telemetry")}
        cluster = config.cluster.model_copy(update={**place, "models": ()})
        return config.model_copy(update={**sections, "cluster": cluster})

    def _drain_timeout_s(self, change: RemoveModel | RollbackModel) -> float:
        own = self._config.cluster.drain_timeout_s
        return own if change.drain_timeout_s is None else change.drain_timeout_s

    def _log_files(self) -> list[LogFile]:
        """Log files of this cluster alone: others may run on the same Ray."""
        is_private = self._config.cluster.address is None
        return [
            file
            for file in log_files(session_folder() / "logs")
            if (file.namespace == self._namespace if file.namespace else is_private)
        ]

    def _new_lines(self, process: str, tails: dict[str, Tail]) -> list[LogLine]:
        for file in self._log_files():  # processes come and go
            if process in file.name:
                tails.setdefault(str(file.path), Tail(file))
        return [LogLine(name, line) for name, line in merged(list(tails.values()))]


def _named(change: UpdateModel) -> dict[str, Any]:
    model = change.settings.get("model", {})
    return {**(model if isinstance(model, dict) else {}), "served_model_name": change.model}
