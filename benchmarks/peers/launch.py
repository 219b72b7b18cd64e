"""Launch of a server: the command and the environment variables that a row of the table stands for."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import quantized_models
from benchmarks.peers.folders import Folders
from benchmarks.peers.install import DRIVERS, installed
from benchmarks.peers.machine import num_cpus
from benchmarks.peers.peers import ENVIRONMENTS, Peer
from benchmarks.peers.server import Server

_REPOSITORY: Final = Path(__file__).parents[2]
KV_GIB: Final = 1
SETTINGS: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "kv_cache_bytes": KV_GIB << 30,
}
"""What every driver is given. `ours` is added: settings of `LLM` that the command line asked for."""


def start(peer: Peer, folders: Folders, model: str, ours: Mapping[str, object], log: Path) -> Server:
    """Starts the driver's process. Its model is loading when this returns."""
    environment = ENVIRONMENTS.get(peer.environment)
    converts = environment is not None and not quantized_models.is_gguf(model)
    path = folders.converted(model, environment.form) if environment and converts else folders.served(model)
    settings = {**SETTINGS, "num_threads": num_cpus(), **peer.settings, "ours": dict(ours)}
    python = folders.python(peer.environment) if environment else sys.executable
    command = [python, DRIVERS / peer.driver, path, json.dumps(settings)]
    return Server(peer.name, command, variables_of(peer, folders), log)


def reason_to_leave_out(peer: Peer, folders: Folders, model: str) -> str:
    """Why the peer cannot be started with the model; empty if it can."""
    if not peer.environment:
        return ""
    if quantized_models.is_gguf(model) and ENVIRONMENTS[peer.environment].form != "gguf":
        return "it does not read GGUF files"
    if quantized_models.is_folder(model) and not ENVIRONMENTS[peer.environment].has_quantized_folders:
        return "it is compared on quantized models by GGUF files, or not at all"
    report = installed(ENVIRONMENTS[peer.environment], folders)
    if not report:
        return f"not installed: python -m benchmarks.peers.install {peer.environment}"
    return str(report.get("failed", ""))


def variables_of(peer: Peer, folders: Folders) -> dict[str, str]:
    """Environment variables of its driver: those of this process without what would lead astray, and the peer's own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    facts = {
        "cpus": f"0-{num_cpus() - 1}",
        "num_threads": num_cpus(),
        "kv_gib": KV_GIB,
        "root": folders.root,
    }
    own = {name: value.format_map(facts) for name, value in peer.variables.items()}
    if peer.preload:
        own["LD_PRELOAD"] = str(folders.environment(peer.environment) / peer.preload)
    if not peer.environment:
        own["PYTHONPATH"] = os.pathsep.join(map(str, (_REPOSITORY, _REPOSITORY / "proto")))
    return kept | own
