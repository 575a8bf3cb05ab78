"""What both gRPC fronts share: how they listen, whom they let in, and how they refuse.

Here because coordinator and worker may share code nowhere else, and must agree on it with clients.
"""

import hmac
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeAlias

import grpc

from kvferry.proto.bind import join_address
from kvferry.proto.credentials import Credentials, server_ssl_context
from kvferry.proto.current_tokens import CurrentTokens
from kvferry.proto.errors import ConfigError, CredentialsError, KvferryError, MessageTooLargeError
from kvferry.proto.file_changes import FileChanges
from kvferry.proto.grpc_options import SERVER_OPTIONS
from kvferry.proto.grpc_status import (
    ERROR_METADATA_KEY,
    MAX_DETAILS_CHARS,
    TOKEN_METADATA_KEY,
    bearer,
    encode_error,
)
from kvferry.proto.listening import why_not_listening

# Probes have no token, and learn nothing but whether the process serves.
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_log = logging.getLogger(__name__)


def make_server(
    threads: ThreadPoolExecutor,
    credentials: Credentials | None,
    *,
    max_calls: int | None = None,
) -> grpc.Server:
    """Return a server that has to `listen` and to be started.

    Args:
        threads: run the handlers.
        credentials: with a token, calls without it are refused, but for health checks.
        max_calls: number of calls at once beyond which one more is refused at once.

    Raises:
        ConfigError: the token cannot be read.
    """
    checks: list[grpc.ServerInterceptor] = []
    if credentials is not None and credentials.token_file is not None:
        checks.append(_TokenCheck(CurrentTokens(credentials)))
    return grpc.server(
        threads,
        options=SERVER_OPTIONS,
        interceptors=checks,
        maximum_concurrent_rpcs=max_calls,
    )


def listen(server: grpc.Server, bind: str, port: int, credentials: Credentials | None) -> int:
    """Let a server listen, and return its port.

    With credentials it speaks TLS only, and takes new certificates as soon as their files change:
    connections that are open stay open.

    Args:
        server: one that was not started.
        bind: host to listen on.
        port: 0 lets the system choose.
        credentials: what it shows, and asks for.

    Raises:
        PortTakenError: another process listens on the port.
        ConfigError: this machine cannot listen on `bind`, or there is no certificate to show.
    """
    address = join_address(bind, port)
    certificates = None if credentials is None else _Certificates(credentials)
    try:
        if certificates is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, certificates.as_grpc()))
    except RuntimeError as error:
        raise why_not_listening(bind, port, error) from error


def add_reflection(server: grpc.Server, service_names: Sequence[str]) -> None:
    """Let clients ask a server for its services and messages: for people with tools, off normally.

    Raises:
        ConfigError: grpcio-reflection is not installed.
    """
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError:
        raise ConfigError(
            "reflection needs grpcio-reflection", allowed="pip install 'kvferry[reflection]'"
        ) from None
    reflection.enable_server_reflection((*service_names, reflection.SERVICE_NAME), server)


def abort(context: grpc.ServicerContext, error: KvferryError) -> NoReturn:
    """End a call with the status of `error`; what only an operator can mend is logged here too."""
    if isinstance(error, CredentialsError | MessageTooLargeError):
        _log.warning("refused a call of %s: %s", context.peer(), error)
    context.set_trailing_metadata(((ERROR_METADATA_KEY, encode_error(error)),))
    context.abort(grpc.StatusCode[error.grpc_status], str(error)[:MAX_DETAILS_CHARS])
    raise AssertionError("abort returned")


class _Certificates:
    """A server's certificates, read anew when a connection comes after their files have changed."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        server_ssl_context(credentials)
        self._files = FileChanges(credentials.tls_files)

    def as_grpc(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._read(),
            self._read_if_changed,  # type: ignore[arg-type]  # its types do not know None
            require_client_authentication=self._credentials.ca is not None,
        )

    def _read(self) -> grpc.ServerCertificateConfiguration:
        one = self._credentials
        assert one.key is not None
        assert one.certificate is not None
        return grpc.ssl_server_certificate_configuration(
            [(one.key.read_bytes(), one.certificate.read_bytes())],
            root_certificates=None if one.ca is None else one.ca.read_bytes(),
        )

    def _read_if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what gRPC takes from now on; None where it keeps what it has."""
        try:
            if not self._files.changed():
                return None
            # Between the two writes of a new pair the key is not the certificate's.
            server_ssl_context(self._credentials)
            read = self._read()
        except (OSError, ConfigError) as error:
            _log.warning("the server keeps its certificate, since the new one fails: %s", error)
            return None
        _log.info("the server took a new certificate from %s", self._credentials.certificate)
        return read


class _TokenCheck(grpc.ServerInterceptor):
    """Lets calls through that carry the service's token, and health checks."""

    def __init__(self, tokens: CurrentTokens) -> None:
        self._tokens = tokens

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "_Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """Return the handler of a call, or one that refuses it."""
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method == HEALTH_CHECK:
            return handler
        given = [
            str(value).encode()
            for key, value in handler_call_details.invocation_metadata
            if key == TOKEN_METADATA_KEY
        ]
        if not given:
            return _refusing(handler, "the call has no token", "none")
        known = [bearer(token).encode() for token in self._tokens.read()]
        if not any(hmac.compare_digest(given[0], one) for one in known):
            return _refusing(handler, "the call has another token than this service", "another one")
        return handler


def _refusing(handler: _Handler, message: str, given: str) -> _Handler:
    """Return a handler of the same kind of call that refuses it."""
    error = CredentialsError(message, given=given, allowed="the service's token (--token-file)")

    def refuse(_: Any, context: grpc.ServicerContext) -> NoReturn:
        abort(context, error)

    made: _Handler = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming](refuse)
    return made
