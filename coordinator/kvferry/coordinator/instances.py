"""One registered instance: its pool, its requests, its loads in flight and its reservations."""

from dataclasses import dataclass

from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.cache_specs import FullSpec
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.ids import (
    BlockHash,
    BlockId,
    GroupedHash,
    GroupId,
    LeaseId,
    RequestId,
    pack_group,
)
from kvferry.proto.messages import InstanceInfo, Source

# The one group that prefixes are located and moved by today.
GROUP = GroupId(0)


@dataclass(slots=True, kw_only=True)
class LoadInFlight:
    """A request's blocks are being fetched; until its `LoadResult`, a writer may be open.

    `hit_tokens` were local, `asked_tokens` counts them and what was asked for, from the prompt's
    start. `cancelled`: the engine was told to stop. `released`: the request has ended meanwhile.
    """

    lease_id: LeaseId
    hit_tokens: int
    asked_tokens: int
    first_admission: bool
    cancelled: bool = False
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Destination blocks of content that a client is about to store.

    `block_ids[i]` is None where the instance holds `hashes[i]` already; those holders are `kept`
    in place, so that the prefix is whole when the rest has arrived.
    """

    hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId | None, ...]
    kept: tuple[BlockId, ...]


class Instance:
    """State of one instance in one life.

    `requests` holds running and loading requests; `loads` those of them whose blocks are still
    being fetched, oldest first.
    """

    def __init__(self, info: InstanceInfo) -> None:
        self.info = info
        self.identity_digest = info.identity.digest()
        block_tokens = info.layout.virtual_block_tokens
        self.manager = CacheManager(
            CacheConfig(
                num_blocks=info.num_blocks,
                groups=(FullSpec(block_tokens=block_tokens),),
                hash_block_tokens=block_tokens,
                # A store has no model; no request of its own could be longer than its pool.
                max_model_len=info.max_model_len or info.num_blocks * block_tokens,
            )
        )
        self.requests: dict[RequestId, RequestState] = {}
        self.loads: dict[RequestId, LoadInFlight] = {}
        self.reservations: dict[LeaseId, Reservation] = {}

    @property
    def source(self) -> Source:
        """Where blocks of this instance can be fetched."""
        return Source(
            instance_id=self.info.instance_id,
            incarnation=self.info.incarnation,
            address=self.info.address,
        )

    @property
    def num_requests(self) -> int:
        """Running and loading requests."""
        return len(self.requests)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool without the null block."""
        return self.info.num_blocks - 1

    def table(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Return a request's blocks in order of its tokens."""
        return tuple(self.manager.block_table(request_id)[GROUP])

    def forget_request(self, request_id: RequestId) -> None:
        """Free a request's blocks and drop it."""
        self.manager.free(request_id)
        del self.requests[request_id]


def index_keys(hashes: tuple[BlockHash, ...]) -> list[GroupedHash]:
    """Return the location index keys of a chain of hashes."""
    suffix = pack_group(BlockHash(b""), GROUP)
    return [GroupedHash(block_hash + suffix) for block_hash in hashes]
