"""`kvferry up` and `kvferry down`: options, and what is printed where."""

import json
import math
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.cluster import local_cluster
from kvferry.cluster.cli_options import (
    AsJson,
    Bind,
    HashSeed,
    Insecure,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
    credentials_of,
)
from kvferry.cluster.config_checks import require_ray_address
from kvferry.cluster.joining import joined
from kvferry.cluster.naming import DEFAULT_SERVICE, require_service_name
from kvferry.cluster.node_config import DEFAULT_MAX_MODELS, DEFAULT_PORT
from kvferry.cluster.progress import stderr_progress
from kvferry.cluster.signals import interrupts_held
from kvferry.cluster.up_config import (
    DEFAULT_HASH_BLOCK_TOKENS,
    Removed,
    ServicePlaces,
    UpConfig,
)
from kvferry.proto.credentials import DEFAULT_SERVER_NAME
from kvferry.proto.errors import ConfigError

TABLE_COLUMNS = 110
GIB = 1 << 30
UP_EXAMPLES = """
Examples:

kvferry up --store-gib 16                            on the Ray cluster that runs on this host

kvferry up --store-gib 4 --ray-address local         on a Ray cluster of its own, which stays

kvferry up --store-gib 64 --bind 0.0.0.0 --insecure  several hosts on a private network

ray job submit -- kvferry up --store-gib 16          as a Ray job; the service outlives it
"""
DOWN_EXAMPLES = """
Examples:

kvferry down

kvferry down --name experiments --ray-address 10.0.0.7:6379

kvferry down --ray-address local                     and the Ray cluster that up started
"""

StoreGib = Annotated[
    float,
    typer.Option(help="GiB for the cached blocks of each model on each host; taken as they fill."),
]
Name = Annotated[str, typer.Option(help="Name of the service in its Ray cluster.")]
RayAddress = Annotated[
    str,
    typer.Option(
        help="Ray cluster: auto, host:port, or local (one of this machine alone, started by up)."
    ),
]
Port = Annotated[int, typer.Option(help="Port of the front on every host.")]
HashBlockTokens = Annotated[
    int, typer.Option(help="Tokens of one hash; engines' blocks must be multiples of it.")
]
WarmShare = Annotated[
    float,
    typer.Option(help="Part of a new store, 0 to 1, that is filled with what is hot at others."),
]
MaxModels = Annotated[int, typer.Option(help="Models (identities) that each host may hold.")]


def up(
    *,
    store_gib: StoreGib,
    name: Name = DEFAULT_SERVICE,
    ray_address: RayAddress = "auto",
    port: Port = DEFAULT_PORT,
    bind: Bind = "127.0.0.1",
    insecure: Insecure = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_name: TlsName = DEFAULT_SERVER_NAME,
    token_file: TokenFile = None,
    hash_block_tokens: HashBlockTokens = DEFAULT_HASH_BLOCK_TOKENS,
    hash_seed: HashSeed = "0",
    max_models: MaxModels = DEFAULT_MAX_MODELS,
    warm_share: WarmShare = 0.0,
    as_json: AsJson = False,
) -> None:
    """Start a service for engines such as vLLM: a coordinator, and a node on every host.

    Returns when all of it serves; it goes on until `kvferry down`. Where it runs already with the
    same settings, hosts that have joined the cluster since get their node.
    """
    if not 0 < store_gib < math.inf:
        raise ConfigError("--store-gib must be a size", given=store_gib, allowed="> 0, in GiB")
    config = UpConfig(
        store_bytes=int(store_gib * GIB),
        name=name,
        hash_seed=hash_seed,
        hash_block_tokens=hash_block_tokens,
        max_models=max_models,
        warm_share=warm_share,
        bind=bind,
        port=port,
        insecure=insecure,
        credentials=credentials_of(tls_cert, tls_key, tls_ca, tls_name, token_file),
        ray_address=ray_address,
    )
    places = _up(config)
    if as_json:
        print(json.dumps(asdict(places)))
    else:
        _print_places(places)


def _up(config: UpConfig) -> ServicePlaces:
    progress = stderr_progress()
    starts_ray = config.ray_address == "local" and local_cluster.find(config.name) is None
    if starts_ray:
        progress("starting a Ray cluster that stays")
        local_cluster.start(config.name, config.start_timeout_s)
    try:
        with joined(config.ray_address, config.name):
            from kvferry.cluster import ray_services

            return ray_services.up(config, progress)
    except BaseException:
        if starts_ray:
            with interrupts_held():
                local_cluster.stop(config.name)
        raise


def down(
    *, name: Name = DEFAULT_SERVICE, ray_address: RayAddress = "auto", as_json: AsJson = False
) -> None:
    """Remove all of a service that `kvferry up` started, and what it had cached."""
    require_service_name(name)
    require_ray_address(ray_address)
    removed = _down(name, ray_address)
    if as_json:
        print(json.dumps(asdict(removed)))
    elif removed.coordinator or removed.hosts:
        what = ["its coordinator"] if removed.coordinator else []
        what += [f"its node at {host}" for host in removed.hosts]
        print(f"removed service {name}: {', '.join(what)}")
    else:
        print(f"no service {name} runs there")


def _down(name: str, ray_address: str) -> Removed:
    is_local = ray_address == "local"
    if is_local and local_cluster.find(name) is None:
        # Whoever started it may have been killed before it was up.
        return Removed(name=name, coordinator=local_cluster.stop(name), hosts=())
    try:
        with joined(ray_address, name):
            from kvferry.cluster import ray_services

            return ray_services.down(name)
    finally:
        if is_local:
            local_cluster.stop(name)


def _print_places(places: ServicePlaces) -> None:
    out = Console(file=sys.stdout, highlight=False)
    out.width = max(out.width, TABLE_COLUMNS)
    out.print(f"service {places.name}, coordinator at {places.coordinator}", markup=False)
    table = Table("host", "engines connect to", "Ray node", box=SIMPLE_HEAD)
    for node in places.nodes:
        table.add_row(node.host, node.address, node.node_id)
    out.print(table)
