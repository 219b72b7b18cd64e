"""Driver of Holdfast's HTTP API: a replica and a router, each in a process of its own.

No Ray is started: no token passes through it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from http_burst import HttpServer
from line_server import Generate, serve

_PARTS = "benchmarks.router_parts"


def load(model: str, settings: dict[str, Any]) -> Generate:
    shared = {name: settings[name] for name in ("dtype", "max_model_len", "max_num_seqs", "num_threads")}
    given = {**shared, "kv_cache_memory": settings["kv_cache_bytes"]}
    replica = _start("model_replica", model, "--settings", json.dumps(given))["address"]
    router = _start("served_router", replica, "--model", model, "--http")
    return HttpServer(int(router["address"].rpartition(":")[2]), Path(model).name, grpc=router["grpc_address"])


def _start(part: str, *arguments: str) -> dict[str, str]:
    """Starts a process that ends with this one's group; its addresses."""
    child = subprocess.Popen(
        [sys.executable, "-m", f"{_PARTS}.{part}", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        sys.exit(f"{part} has ended ({child.wait()})")
    _children.append(child)
    said: dict[str, str] = json.loads(line)
    return said


_children: list["subprocess.Popen[bytes]"] = []
"""They end when their standard input does, so it is kept open."""


if __name__ == "__main__":
    serve(load, ["holdfast", "torch", "transformers"])
