"""What `kvferry up` starts: a coordinator, and a node on every host of a Ray cluster."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

from kvferry.cluster.config_checks import (
    require_hash_seed,
    require_port,
    require_ray_address,
    require_seconds,
)
from kvferry.cluster.naming import DEFAULT_SERVICE, require_service_name
from kvferry.cluster.node_config import DEFAULT_MAX_MODELS, DEFAULT_PORT, NodeConfig
from kvferry.coordinator.warming import require_share
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import ConfigError, MismatchError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.scheme import HashScheme

DEFAULT_HASH_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """What a service's coordinator is made of, beside its scheme; see `UpConfig`."""

    bind: str
    insecure: bool
    credentials: Credentials | None
    warm_share: float


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """One service of nodes, which outlives the process that starts it.

    Raises:
        ConfigError: a value is out of range; the message names it.
        InsecureBindError: `bind` is beyond loopback, `insecure` is not set, and the credentials do
            not keep strangers out.
    """

    store_bytes: int
    """Bytes for the cached blocks of each identity, on each host."""

    name: str = DEFAULT_SERVICE
    """Name by which the service is found in its Ray cluster."""

    hash_seed: str = "0"
    """Text of PYTHONHASHSEED in every process; the root of the hash chain is made from it."""

    hash_block_tokens: int = DEFAULT_HASH_BLOCK_TOKENS
    """Tokens of one hash: engines' blocks must be multiples of it."""

    max_models: int = DEFAULT_MAX_MODELS
    """Identities that may attach to a node."""

    warm_share: float = 0.0
    """Part of its blocks, 0 to 1, that a store which is new fills with what is hot at others."""

    bind: str = "127.0.0.1"
    """Host that all servers listen on."""

    port: int = DEFAULT_PORT
    """Port of every node's front."""

    insecure: bool = False
    """Allow a bind beyond loopback without credentials."""

    credentials: Credentials | None = None
    """Speak TLS between all processes, with files that every host has at the same paths."""

    ray_address: str = "auto"
    """`auto` or host:port joins a Ray cluster; `local` starts one that stays."""

    start_timeout_s: float = 120.0
    """Time for all actors to serve."""

    def __post_init__(self) -> None:
        require_service_name(self.name)
        require_hash_seed(self.hash_seed)
        require_ray_address(self.ray_address)
        require_seconds("start_timeout_s", self.start_timeout_s)
        require_port("port", self.port)
        require_share(self.warm_share)
        if self.port == 0:
            # A node that comes back has to be where its engines know it.
            raise ConfigError("the fronts need a port of their own", given=0, allowed="1 to 65535")
        self.node("localhost", coordinator="")
        _ = self.scheme

    @cached_property
    def scheme(self) -> HashScheme:
        """The service's hash scheme."""
        return make_scheme(seed=self.hash_seed, hash_block_tokens=self.hash_block_tokens)

    @property
    def coordinator(self) -> CoordinatorConfig:
        """The settings of the coordinator."""
        return CoordinatorConfig(
            bind=self.bind,
            insecure=self.insecure,
            credentials=self.credentials,
            warm_share=self.warm_share,
        )

    def node(self, host: str, *, coordinator: str) -> NodeConfig:
        """Return the settings of the node on one host.

        Args:
            host: the host's address.
            coordinator: `host:port` of the coordinator's front.
        """
        return NodeConfig(
            host=host,
            coordinator=coordinator,
            store_bytes=self.store_bytes,
            max_models=self.max_models,
            bind=self.bind,
            port=self.port,
            insecure=self.insecure,
            credentials=self.credentials,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """One node: Ray's id of its host's Ray node, the host, and its front's `host:port`."""

    node_id: str
    host: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlaces:
    """Where a service of nodes serves; `was_running` if it did so before."""

    name: str
    coordinator: str
    nodes: tuple[NodePlace, ...]
    was_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was removed of a service; nothing if it was not there."""

    name: str
    coordinator: bool
    hosts: tuple[str, ...]


_Settings = TypeVar("_Settings", NodeConfig, CoordinatorConfig)


def require_same(running: _Settings, asked: _Settings, *, service: str) -> None:
    """Refuse settings that a running node, or coordinator, does not have.

    Raises:
        MismatchError: naming each differing field with what was asked and what runs.
    """
    differing = [
        field.name
        for field in fields(running)
        if getattr(running, field.name) != getattr(asked, field.name)
    ]
    if differing:
        raise MismatchError(
            f"service {service} runs with other settings; kvferry down ends it",
            given={name: _plain(getattr(asked, name)) for name in differing},
            allowed={name: _plain(getattr(running, name)) for name in differing},
        )


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)
