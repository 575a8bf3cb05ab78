"""What a service is made of: frozen settings, checked when built, units in their names."""

import math
from dataclasses import dataclass, replace
from typing import get_args

from kvferry.cluster.config_checks import (
    require_hash_seed,
    require_port,
    require_ray_address,
    require_seconds,
)
from kvferry.cluster.serving.limits import Policy
from kvferry.cluster.serving.pool_size import KvSize, LengthLimit
from kvferry.cluster.serving.pulse import HANGS_AFTER_S
from kvferry.proto.bind import is_loopback, require_safe_bind, require_safe_plain_bind
from kvferry.proto.credentials import Credentials, server_ssl_context
from kvferry.proto.errors import ConfigError
from kvferry.proto.kv_events import HashForm
from kvferry.proto.kv_events_codec import EventEncoding
from kvferry.proto.kv_events_endpoint import (
    binds_by_vllm_rule,
    endpoint_of_rank,
    require_safe_endpoint,
)
from kvferry.proto.layout import Layout
from kvferry.proto.layout_text import DEFAULT_BLOCK_TOKENS
from kvferry.proto.messages import Role
from kvferry.proto.scheme import Algorithm, KeyFormat
from kvferry.proto.specs import require_one_of
from kvferry.worker.model.computable import require_computable

DEFAULT_LAYOUT = Layout(block_tokens=DEFAULT_BLOCK_TOKENS)
DEFAULT_KV_SIZE = KvSize(num_blocks=512)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """How the coordinator publishes the KV events of its instances (docs/kv-events.md).

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    endpoint: str = "tcp://127.0.0.1:*"
    """Where the first instance's events are published; the port of the next one is one higher,
    unless the system chooses (`*`)."""

    replay_endpoint: str | None = "tcp://127.0.0.1:*"
    """Where replays are asked for, counted likewise; None offers none."""

    bind: bool | None = None
    """Listen at `endpoint` (True), connect to a reader there (False), or go by vLLM's rule."""

    hash_form: HashForm = "uint64"
    """Hashes as 64-bit numbers, which all readers know, or as all of their `bytes`."""

    encoding: EventEncoding = "map"
    """`map` for readers made for vLLM from 0.24 on, `array` for earlier ones."""

    buffer_batches: int = 10_000
    """Batches per instance that are remembered for replays."""

    def __post_init__(self) -> None:
        require_one_of("hash_form", self.hash_form, get_args(HashForm))
        require_one_of("encoding", self.encoding, get_args(EventEncoding))
        _at_least(self, 1, "buffer_batches")

    def require_usable(self, *, insecure: bool, num_instances: int) -> None:
        """Refuse endpoints at which not all instances of a service could be published.

        Raises:
            ConfigError: not an endpoint, or one that cannot be shared out.
            InsecureBindError: it listens beyond loopback and `insecure` is False.
        """
        listens = binds_by_vllm_rule(self.endpoint) if self.bind is None else self.bind
        for endpoint in (self.endpoint if listens else None, self.replay_endpoint):
            if endpoint is not None:
                require_safe_endpoint(endpoint, insecure)
                endpoint_of_rank(endpoint, num_instances - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """One service: a coordinator and the instances of one model.

    What depends on the model or the machine (dtype, device, sizes) is checked when they are read.

    Raises:
        ConfigError: a value is out of range; the message names it.
        InsecureBindError: `bind` is beyond loopback, `insecure` is not set, and the credentials do
            not keep strangers out.
    """

    model: str
    """Local folder of a Hugging Face model, or a hub id."""

    num_prefill: int = 1
    """Prefill instances."""

    num_decode: int = 2
    """Decode instances."""

    prefill_layout: Layout = DEFAULT_LAYOUT
    """How the ranks of a prefill instance share tokens."""

    decode_layout: Layout = DEFAULT_LAYOUT
    """How the ranks of a decode instance share tokens."""

    kv_size: KvSize = DEFAULT_KV_SIZE
    """Size of the pool, on each rank of an instance."""

    max_model_len: LengthLimit = None
    """Most tokens of a request: a number, `auto` (the longest that fits the pool), or the model's
    own limit."""

    hash_seed: str = "0"
    """Text of PYTHONHASHSEED in every process; the root of the hash chain is made from it."""

    algorithm: Algorithm = "sha256_cbor"
    key_format: KeyFormat = "0.32"
    dtype: str = "float32"
    """dtype of weights and KV cache, a torch name without prefix."""

    device: str = "cpu"
    """Torch device of every rank."""

    token_budget: int = 256
    """Tokens per forward pass; longer prompts are computed in chunks."""

    max_running: int = 16
    """Requests per instance that hold blocks at one time."""

    policy: Policy = "fcfs"
    bind: str = "127.0.0.1"
    """Host that the gRPC servers listen on."""

    port: int = 0
    """Port of the control front; 0 takes a free one. Transfer servers always take free ones."""

    metrics_port: int | None = None
    """Port of the coordinator's metrics, 0 for a free one; those of ranks always take free ones.
    None serves no metrics."""

    insecure: bool = False
    """Allow a bind beyond loopback without credentials."""

    credentials: Credentials | None = None
    """Speak TLS between all processes, with files that every node has at the same paths."""

    reflection: bool = False
    """Tell clients of the gRPC services and messages."""

    ray_address: str = "local"
    """`local` starts a Ray cluster of our own; `auto` or host:port joins one."""

    start_timeout_s: float = 120.0
    """Time for all actors to be placed, load the model and register."""

    rank_timeout_s: float = 30.0
    """How long the ranks of an instance wait for each other in a pass before they give it up."""

    hangs_after_s: float = HANGS_AFTER_S
    """How long one pass through the model may take; an instance that needs longer is given up."""

    kv_events: KvEventsConfig | None = None
    """Publish what every instance has cached; None publishes nothing."""

    sample_block_every: int | None = None
    """Follow every n-th block handed out for the residency histograms; None follows none."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_prefill", "num_decode", "token_budget", "max_running")
        for role, layout in self.layouts.items():
            require_computable(layout, who=role)
        if self.device != "cpu" and self.num_ranks > self.num_instances:
            raise ConfigError(
                "several ranks of an instance compute on the CPU only",
                given=self.device,
                allowed="cpu, or layouts of one rank",
            )
        if self.max_model_len is not None and self.max_model_len != "auto":
            _at_least(self, 1, "max_model_len")
        require_port("port", self.port)
        if self.metrics_port is not None:
            require_port("metrics_port", self.metrics_port)
        require_seconds("start_timeout_s", self.start_timeout_s)
        require_seconds("rank_timeout_s", self.rank_timeout_s)
        require_seconds("hangs_after_s", self.hangs_after_s)
        require_hash_seed(self.hash_seed)
        require_one_of("algorithm", self.algorithm, get_args(Algorithm))
        require_one_of("key_format", self.key_format, get_args(KeyFormat))
        require_one_of("policy", self.policy, get_args(Policy))
        require_ray_address(self.ray_address)
        self._require_safe_servers()
        if self.sample_block_every is not None:
            _at_least(self, 1, "sample_block_every")
        if self.kv_events is not None:
            self.kv_events.require_usable(insecure=self.insecure, num_instances=self.num_instances)

    def _require_safe_servers(self) -> None:
        require_safe_bind(self.bind, self.insecure, self.credentials)
        if self.credentials is not None:
            server_ssl_context(self.credentials)
        # Metrics, and the rows that several ranks of an instance exchange, have no TLS.
        if self.metrics_port is not None or self.num_ranks > self.num_instances:
            require_safe_plain_bind(self.bind, self.insecure)

    def with_model(self, model: str) -> "ServiceConfig":
        """Return the same settings for another model."""
        return replace(self, model=model)

    @property
    def num_instances(self) -> int:
        """Instances of all roles."""
        return self.num_prefill + self.num_decode

    @property
    def num_ranks(self) -> int:
        """Ranks of all instances, a process each."""
        ranks = self.num_prefill * self.prefill_layout.num_ranks
        return ranks + self.num_decode * self.decode_layout.num_ranks

    @property
    def layouts(self) -> dict[Role, Layout]:
        """The layout of each role's instances."""
        return {"prefill": self.prefill_layout, "decode": self.decode_layout}

    @property
    def hash_block_tokens(self) -> int:
        """Tokens of one hash: the most of which the blocks of all instances are multiples."""
        return math.gcd(*(layout.virtual_block_tokens for layout in self.layouts.values()))


def require_reachable_bind(bind: str, node_hosts: frozenset[str]) -> None:
    """Refuse loopback servers in a cluster of several machines: their peers cannot reach them.

    Args:
        bind: host that the gRPC servers listen on.
        node_hosts: addresses of the cluster's nodes; nodes on one machine share one.

    Raises:
        ConfigError: showing the bind and all addresses.
    """
    if len(node_hosts) < 2 or not is_loopback(bind):
        return
    raise ConfigError(
        "the cluster has nodes at several addresses, and what listens on loopback is reached from "
        "none but its own",
        given={"bind": bind, "nodes": sorted(node_hosts)},
        allowed="--bind 0.0.0.0 with credentials or (on a private network) with --insecure, or a "
        "cluster of one machine",
    )


def _at_least(config: ServiceConfig | KvEventsConfig, smallest: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < smallest:
            raise ConfigError(
                f"{name} must be an integer of at least {smallest}",
                given=value,
                allowed=f">= {smallest}",
            )
