"""How every client of kvferry connects: in plaintext, or with its credentials.

Here because worker and cluster must agree with both fronts on it.
"""

import ssl
from pathlib import Path
from typing import Any

import grpc

from kvferry.proto.credentials import Credentials, client_ssl_context
from kvferry.proto.current_tokens import CurrentTokens
from kvferry.proto.grpc_options import CHANNEL_OPTIONS
from kvferry.proto.grpc_status import TOKEN_METADATA_KEY, bearer


def open_channel(address: str, credentials: Credentials | None) -> grpc.Channel:
    """Return a channel to `address` ("host:port"); it connects at its first call.

    Certificates are read now, and never again for this channel: after a change open another.

    Raises:
        ConfigError: a file cannot be used.
    """
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    # gRPC would take any bytes here, and fail at every call.
    client_ssl_context(credentials)
    # Without a file of its own gRPC would take a list that comes with it.
    ca = credentials.ca or ssl.get_default_verify_paths().cafile
    channel = grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(
            root_certificates=Path(ca).read_bytes() if ca else None,
            private_key=credentials.key.read_bytes() if credentials.key else None,
            certificate_chain=(
                credentials.certificate.read_bytes() if credentials.certificate else None
            ),
        ),
        # Peers' addresses change, the name in their certificates does not.
        options=(*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", credentials.server_name)),
    )
    if credentials.token_file is None:
        return channel
    return grpc.intercept_channel(channel, _WithToken(CurrentTokens(credentials)))


class _WithToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the token to every call; gRPC's own call credentials start a thread for each."""

    def __init__(self, tokens: CurrentTokens) -> None:
        self._tokens = tokens

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Start the call with the token."""
        return continuation(self._with_token(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        """Start the call with the token."""
        return continuation(self._with_token(details), request)

    def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Start the call with the token."""
        return continuation(self._with_token(details), requests)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Start the call with the token."""
        return continuation(self._with_token(details), requests)

    def _with_token(self, details: Any) -> Any:
        token = (TOKEN_METADATA_KEY, bearer(self._tokens.read()[0]))
        return details._replace(metadata=(*(details.metadata or ()), token))
