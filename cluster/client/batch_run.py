"""Run of a file of requests as a batch: upload, wait, and write the answers; begun again, it goes on where it was.

The state of an unfinished run is a file in a folder beside the output. The batch itself is the server's, and
is computed whether this process is there or not.
"""

import asyncio
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from holdfast.worker.errors import ConfigurationError, HoldfastError, ReplicaError
from holdfast.worker.progress import Report

WINDOW: Final = "30d"
"""The completion window: there is no deadline."""

_READ_BYTES: Final = 2**18
_LOOK_EVERY_S: Final = 0.5
_GONE_S: Final = 120.0
"""A server that does not answer for so long is given up."""

_BOUNDARY: Final = "holdfast-" + "-" * 16
_RUNNING: Final = ("validating", "in_progress", "finalizing", "cancelling")

Body = Callable[[], AsyncIterator[bytes]]


class Unreachable(ReplicaError):
    """No server answers."""


class Caller(Protocol):
    """Calls an HTTP API. Raises `Unreachable`."""

    async def __call__(
        self, method: str, path: str, body: Body | None = None, content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        """Status and body of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a run."""

    num_answers: int
    num_errors: int
    problems: tuple[str, ...] = ()
    """Why no line was computed: errors of the input."""


class BatchRun:
    """The requests of `source`, whose answers are written to `target`, line by line in their order."""

    def __init__(self, call: Caller, source: Path, target: Path, where: str, report: Report) -> None:
        """`where` names the server or the model: a run goes on only there."""
        self._call = call
        self._source = source
        self._target = target
        self._where = where
        self._report = report

    async def run(self) -> Outcome:
        """Raises `ConfigurationError` for a run of another input, `Unreachable`, and `ReplicaError`."""
        folder = folder_of(self._target)
        folder.mkdir(parents=True, exist_ok=True)
        state = self._state(folder)
        batch = await self._until_over(await self._batch(folder, state))
        if batch["status"] == "failed":
            problems = tuple(_problem(one) for one in batch["errors"]["data"])
            outcome = Outcome(num_answers=0, num_errors=0, problems=problems)
        else:
            outcome = await self._written(batch)
            if batch["status"] != "completed":
                outcome = Outcome(
                    num_answers=outcome.num_answers,
                    num_errors=outcome.num_errors,
                    problems=(f"the batch is {batch['status']}",),
                )
        await self._tidy(state, batch)
        shutil.rmtree(folder)
        return outcome

    # --- steps ---

    def _state(self, folder: Path) -> dict[str, str]:
        """State of the run so far."""
        wanted = {"input": _digest(self._source), "where": self._where}
        file = folder / "run.json"
        if file.exists():
            state: dict[str, str] = json.loads(file.read_text())
            for name, value in wanted.items():
                if state[name] != value:
                    message = f"is that of another run ({name}: {state[name]}, not {value}); delete it to start over"
                    raise ConfigurationError(f"{folder} {message}")
            return state
        return self._noted(folder, {**wanted, "run": uuid.uuid4().hex})

    def _noted(self, folder: Path, state: dict[str, str]) -> dict[str, str]:
        new = folder / "run.json.new"
        new.write_text(json.dumps(state))
        os.replace(new, folder / "run.json")
        return state

    async def _batch(self, folder: Path, state: dict[str, str]) -> dict[str, Any]:
        """The batch of this run, made if there is none."""
        if (batch_id := state.get("batch")) is not None:
            return await self._asked("GET", f"/v1/batches/{batch_id}")
        for batch in (await self._asked("GET", "/v1/batches?limit=100"))["data"]:
            if (batch["metadata"] or {}).get("holdfast_run") == state["run"]:
                return self._of_run(folder, state, batch)
        self._report("upload", 0, 1)
        form = f"multipart/form-data; boundary={_BOUNDARY}"
        file = await self._asked("POST", "/v1/files", lambda: _form(self._source), form)
        self._report("upload", 1, 1)
        asked = {
            "input_file_id": file["id"],
            "endpoint": _endpoint(self._source),
            "completion_window": WINDOW,
            "metadata": {"holdfast_run": state["run"]},
        }
        batch = await self._asked("POST", "/v1/batches", _json(asked))
        return self._of_run(folder, state, batch)

    def _of_run(self, folder: Path, state: dict[str, str], batch: dict[str, Any]) -> dict[str, Any]:
        state["batch"] = batch["id"]
        self._noted(folder, state)
        return batch

    async def _until_over(self, batch: dict[str, Any]) -> dict[str, Any]:
        waited_s = 0.0
        while batch["status"] in _RUNNING:
            counts = batch["request_counts"]
            self._report("lines", min(counts["completed"] + counts["failed"], counts["total"] - 1), counts["total"])
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                batch = await self._asked("GET", f"/v1/batches/{batch['id']}")
                waited_s = 0.0
            except Unreachable:
                if (waited_s := waited_s + _LOOK_EVERY_S) > _GONE_S:
                    raise
        total = max(1, batch["request_counts"]["total"])
        self._report("lines", total, total)
        return batch

    async def _written(self, batch: Mapping[str, Any]) -> Outcome:
        """Writes the output: all of it, or nothing."""
        found: dict[str, bytes] = {}
        counts = []
        for name in ("output_file_id", "error_file_id"):
            lines = await self._lines(batch[name])
            found |= lines
            counts.append(len(lines))
        new = self._target.with_name(f"{self._target.name}.new")
        with new.open("wb") as output:
            for custom_id in _custom_ids(self._source):
                if custom_id in found:
                    output.write(found[custom_id] + b"\n")
            output.flush()
            os.fsync(output.fileno())
        os.replace(new, self._target)
        return Outcome(num_answers=counts[0], num_errors=counts[1])

    async def _lines(self, file_id: str | None) -> dict[str, bytes]:
        if file_id is None:
            return {}
        status, content = await self._call("GET", f"/v1/files/{file_id}/content")
        _check("GET", f"/v1/files/{file_id}/content", status, content)
        return {json.loads(line)["custom_id"]: line for line in content.splitlines()}

    async def _tidy(self, state: Mapping[str, str], batch: Mapping[str, Any]) -> None:
        """Deletes the files of the run on the server."""
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch[name] is not None:
                await self._call("DELETE", f"/v1/files/{batch[name]}")

    async def _asked(
        self, method: str, path: str, body: Body | None = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        status, content = await self._call(method, path, body, content_type)
        _check(method, path, status, content)
        answer: dict[str, Any] = json.loads(content)
        return answer


def folder_of(target: Path) -> Path:
    """Folder of a run's state."""
    return target.with_name(f"{target.name}.holdfast")


def _check(method: str, path: str, status: int, content: bytes) -> None:
    if status == 200:
        return
    try:
        reason = json.loads(content)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        reason = content[:200].decode(errors="replace")
    error: type[HoldfastError] = ConfigurationError if 400 <= status < 500 else ReplicaError
    raise error(f"{method} {path}: {status}: {reason}")


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(asked: object) -> Body:
    async def body() -> AsyncIterator[bytes]:
        yield json.dumps(asked).encode()

    return body


async def _form(source: Path) -> AsyncIterator[bytes]:
    """The upload of a file."""
    part = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{{}}"{{}}\r\n\r\n'
    yield (part.format("purpose", "") + "batch\r\n" + part.format("file", '; filename="input.jsonl"')).encode()
    with source.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece
    yield f"\r\n--{_BOUNDARY}--\r\n".encode()


def _endpoint(source: Path) -> str:
    """Endpoint of the first line which names one: a batch has one."""
    with source.open("rb") as file:
        for line in file:
            try:
                return str(json.loads(line)["url"])
            except (ValueError, LookupError, TypeError):
                continue
    return "/v1/chat/completions"


def _custom_ids(source: Path) -> list[str]:
    with source.open("rb") as file:
        return [json.loads(line)["custom_id"] for line in file if line.strip()]


def _problem(one: Mapping[str, Any]) -> str:
    line = "" if one["line"] is None else f"line {one['line']}: "
    return f"{line}{one['message']}"
