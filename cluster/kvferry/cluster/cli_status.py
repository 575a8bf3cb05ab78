"""`kvferry status`: options, and what is printed where."""

import contextlib
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from kvferry.cluster.cli_options import (
    AsJson,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
    credentials_of,
)
from kvferry.cluster.cli_up import Name, RayAddress
from kvferry.cluster.config_checks import require_ray_address
from kvferry.cluster.engine_info import AttachedEngine
from kvferry.cluster.joining import joined
from kvferry.cluster.naming import DEFAULT_SERVICE, require_service_name
from kvferry.cluster.service_report import ServiceStatus, print_tables, to_json
from kvferry.proto.credentials import DEFAULT_SERVER_NAME, Credentials
from kvferry.proto.errors import KvferryError
from kvferry.proto.messages import Describe, Description

TABLE_COLUMNS = 140
TIMEOUT_S = 10.0
EXAMPLES = """
Examples:

kvferry status                                  the service in the Ray cluster of this host

kvferry status --address 10.0.0.7:7400 --json   through any node or the coordinator, without Ray

kvferry status --name experiments --ray-address 10.0.0.7:6379
"""

Address = Annotated[
    str | None,
    typer.Option(help="host:port of a node or of the coordinator; asked instead of Ray."),
]


def status(
    *,
    address: Address = None,
    name: Name = DEFAULT_SERVICE,
    ray_address: RayAddress = "auto",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_name: TlsName = DEFAULT_SERVER_NAME,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what a service holds, which engines have attached, and which cannot share and why."""
    require_service_name(name)
    require_ray_address(ray_address)
    credentials = credentials_of(tls_cert, tls_key, tls_ca, tls_name, token_file)
    shown = _ask(address or front_of(name, ray_address), credentials)
    if as_json:
        print(json.dumps(to_json(shown)))
    else:
        out = Console(file=sys.stdout, highlight=False)
        out.width = max(out.width, TABLE_COLUMNS)
        print_tables(shown, out)


def front_of(name: str, ray_address: str) -> str:
    """Return the address of a front of a service in a Ray cluster.

    Raises:
        KvferryError: no such service, or nobody answers.
    """
    with joined(ray_address, name):
        from kvferry.cluster import ray_services

        return ray_services.any_front(name)


def _ask(address: str, credentials: Credentials | None) -> ServiceStatus:
    # They load gRPC and torch, which the command line starts without.
    from kvferry.cluster.control_client import ControlClient
    from kvferry.cluster.node_client import NodeClient

    with contextlib.closing(ControlClient(address, TIMEOUT_S, credentials)) as client:
        description = client.ask(Describe(), Description)
    engines: dict[str, tuple[AttachedEngine, ...]] = {}
    for front in _fronts(description, address):
        with contextlib.closing(NodeClient(front, credentials)) as node:
            try:
                engines[front] = node.engines(timeout_s=TIMEOUT_S)
            except KvferryError as error:
                print(f"no engines are known of {front}: {error}", file=sys.stderr)
    return ServiceStatus(description=description, engines=engines)


def _fronts(description: Description, address: str) -> list[str]:
    """Return the fronts of a service's nodes: where stores are, at the port that all have."""
    port = address.rpartition(":")[2]
    stores = [one.info for one in description.instances if one.info.role == "store"]
    hosts = [info.rank_addresses[0].rpartition(":")[0] for info in stores]
    return list(dict.fromkeys(f"{host}:{port}" for host in hosts))
