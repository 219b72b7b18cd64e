"""HAProxy or nginx on one core, passing gRPC streams to one bare server under as many names as there are replicas.

Orders ask for the CPU time of its processes. It knows no model, reads no message and holds no stream.
"""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.free_port import pick_port
from benchmarks.router_parts.orders import run, say, take_orders

_CPU_CLOCK: Final = 2
START_S: Final = 10.0

HAPROXY: Final = """
global
  nbthread 1
  maxconn 8000
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend gateway
  bind 127.0.0.1:{port} proto h2
  default_backend replicas
backend replicas
  balance leastconn
{servers}
"""
NGINX: Final = """
worker_processes 1;
daemon off;
pid nginx.pid;
error_log error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  http2_max_concurrent_streams 10000;
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  upstream replicas {{
    least_conn;
{servers}
    keepalive 256;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} http2;
    location / {{ grpc_pass grpc://replicas; grpc_read_timeout 600s; }}
  }}
}}
"""


def command(kind: str, program: str, backend: str, num_servers: int, port: int, folder: Path) -> list[str]:
    """Writes the configuration, and says how to start the proxy with it."""
    file = folder / "gateway.conf"
    if kind == "haproxy":
        servers = "".join(f"  server r{number} {backend} proto h2\n" for number in range(num_servers))
        file.write_text(HAPROXY.format(port=port, servers=servers))
        return [program, "-db", "-f", str(file)]
    servers = f"    server {backend};\n" * num_servers
    file.write_text(NGINX.format(port=port, servers=servers))
    return [program, "-p", str(folder), "-c", str(file)]


def until_listening(port: int, process: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    process.kill()
    raise RuntimeError(f"{process.args!r} does not listen on port {port}")


def serve_until_the_end(kind: str, program: str, backend: str, num_servers: int) -> None:
    port = pick_port()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command(kind, program, backend, num_servers, port, Path(folder)), stdout=sys.stderr, stderr=sys.stderr
        )
        try:
            until_listening(port, process)

            async def carry_out(order: dict[str, Any]) -> dict[str, Any]:
                one = psutil.Process(process.pid)
                every = (one, *one.children(recursive=True))
                return {"proxy": sum(time.clock_gettime((~each.pid << 3) | _CPU_CLOCK) for each in every)}

            say(address=f"127.0.0.1:{port}")
            run(take_orders(carry_out))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("haproxy", "nginx"))
    parser.add_argument("program")
    parser.add_argument("backend", help="address of the bare server")
    parser.add_argument("--servers", type=int, default=1, help="names of the backend")
    arguments = parser.parse_args()
    serve_until_the_end(arguments.kind, arguments.program, arguments.backend, arguments.servers)
