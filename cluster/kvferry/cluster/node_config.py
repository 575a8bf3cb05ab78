"""What one node is made of."""

from dataclasses import dataclass

from kvferry.cluster.config_checks import require_port
from kvferry.proto.bind import require_safe_bind
from kvferry.proto.credentials import Credentials, server_ssl_context
from kvferry.proto.specs import require_integer

DEFAULT_PORT = 7400
DEFAULT_MAX_MODELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """A node: the front that the engines of a host know, and the stores behind it.

    Raises:
        ConfigError: a value is out of range; the message names it.
        InsecureBindError: `bind` is beyond loopback, `insecure` is not set, and the credentials do
            not keep strangers out.
    """

    host: str
    """Address of this host as others reach it; part of its stores' names."""

    coordinator: str
    """`host:port` of the coordinator's control front."""

    store_bytes: int
    """Bytes for the cached blocks of each identity; memory is taken as they fill up."""

    max_models: int = DEFAULT_MAX_MODELS
    """Identities that may attach; each has a store of its own."""

    bind: str = "127.0.0.1"
    """Host that the front and the stores' transfer servers listen on."""

    port: int = DEFAULT_PORT
    """Port of the front; 0 takes a free one. Transfer servers always take free ones."""

    insecure: bool = False
    """Allow a bind beyond loopback without credentials."""

    credentials: Credentials | None = None
    """Speak TLS with everybody."""

    def __post_init__(self) -> None:
        require_integer("store_bytes", self.store_bytes, at_least=1)
        require_integer("max_models", self.max_models, at_least=1)
        require_port("port", self.port)
        require_safe_bind(self.bind, self.insecure, self.credentials)
        if self.credentials is not None:
            server_ssl_context(self.credentials)
