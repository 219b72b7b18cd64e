"""HTTP server of a watch: the gauges of its last audit, for a monitor that scrapes them."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from holdfast.worker.errors import ConfigurationError

_PATHS = ("/", "/metrics")


class MetricsServer:
    """Answers `GET /metrics` with the text that was set last; before the first text with 503."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Begins to listen; `port` 0 takes a free one. Raises `ConfigurationError` if the port cannot be taken."""
        self.text = ""
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"--metrics-port {port}: cannot be taken: {error}") from None
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = 404 if self.path not in _PATHS else 200 if owner.text else 503
                content = owner.text.encode() if status == 200 else b""
                self.send_response(status)
                self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not logged."""

        return Handler
