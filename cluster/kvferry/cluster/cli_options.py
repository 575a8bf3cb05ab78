"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from kvferry.proto.credentials import DEFAULT_SERVER_NAME, Credentials
from kvferry.proto.errors import ConfigError

HashSeed = Annotated[
    str, typer.Option(help="PYTHONHASHSEED of every process: the root of the block hashes.")
]
Bind = Annotated[str, typer.Option(help="Host that the gRPC servers listen on.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow a bind beyond loopback without credentials.")
]
TlsCert = Annotated[
    Path | None,
    typer.Option(help="PEM file of the certificate that every process shows; all speak TLS then."),
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file of its private key.")]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        help="PEM file of the authorities that certificates must be of; clients must have one then."
    ),
]
TlsName = Annotated[
    str, typer.Option(help="Name that servers' certificates must hold, whatever their address.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File that holds a token, without which no call is answered; needs TLS."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def credentials_of(
    cert: Path | None, key: Path | None, ca: Path | None, name: str, token_file: Path | None
) -> Credentials | None:
    """Return what the TLS options say; None where none was given.

    Raises:
        ConfigError: files that cannot be used, or a name without certificates.
    """
    if cert is None and key is None and ca is None and token_file is None:
        if name != DEFAULT_SERVER_NAME:
            raise ConfigError(
                "--tls-name says nothing without certificates",
                given=name,
                allowed="with --tls-cert and --tls-key, or --tls-ca",
            )
        return None
    return Credentials(certificate=cert, key=key, ca=ca, server_name=name, token_file=token_file)
