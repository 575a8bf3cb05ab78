"""An HTTP server for a process's metrics: a page or two, a thread a request."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from kvferry.proto.bind import join_address, require_safe_plain_bind
from kvferry.proto.errors import KvferryError
from kvferry.proto.listening import why_not_listening

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0
"""A request takes milliseconds; one that takes so long has a client that stalls."""

POLL_S = 0.1
STOP_TIMEOUT_S = REQUEST_TIMEOUT_S + 1.0

_PLAIN_TEXT = ("Content-Type", "text/plain; charset=utf-8")

ReadMetrics = Callable[[], Iterable[Metric]]


class MetricsServer:
    """A listening server from construction to `stop`.

    Args:
        pages: what is served at which path.
        bind: host to listen on.
        port: 0 lets the system choose.
        insecure: allow a host beyond loopback.

    Raises:
        InsecureBindError: `bind` is not loopback and `insecure` is False.
        PortTakenError: another process listens on the port.
        ConfigError: this machine cannot listen on `bind`.
    """

    def __init__(
        self, pages: Mapping[str, WSGIApplication], *, bind: str, port: int = 0, insecure: bool
    ) -> None:
        require_safe_plain_bind(bind, insecure)
        try:
            self._server = _Server(bind, port)
        except OSError as error:
            raise why_not_listening(bind, port, error) from error
        self._server.set_app(_by_path(pages))
        self.address = join_address(bind, self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="kvferry-metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Let a request under way end, and close. Repeating is fine."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP_TIMEOUT_S)


def metrics_page(read: ReadMetrics) -> WSGIApplication:
    """Return a page of what `read` returns when it is asked for, and of this process itself."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(_Reading(read))
    ProcessCollector(registry=registry)
    page: WSGIApplication = make_wsgi_app(registry)
    return page


class _Reading(Collector):
    def __init__(self, read: ReadMetrics) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def _by_path(pages: Mapping[str, WSGIApplication]) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        page = pages.get(environ["PATH_INFO"])
        if page is None:
            start_response("404 Not Found", [_PLAIN_TEXT])
            return [f"there is {' and '.join(pages)}\n".encode()]
        try:
            return page(environ, start_response)
        except KvferryError as error:
            start_response("503 Service Unavailable", [_PLAIN_TEXT])
            return [f"{error}\n".encode()]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    # A client that says nothing is dropped after a while, and holds up no other meanwhile.
    daemon_threads = True
    # Another process may not take the port over, whatever the library's default becomes.
    allow_reuse_port = False

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _QuietHandler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the resolver for the host's name, however long that takes.
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(REQUEST_TIMEOUT_S, _hang_up, [request])
        end.daemon = True
        end.start()
        try:
            super().finish_request(request, client_address)
        finally:
            end.cancel()
            end.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.info("a request from %s failed", client_address, exc_info=True)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a scrape comes every few seconds."""


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        connection.shutdown(socket.SHUT_RDWR)
