"""One registered instance: its pool, its requests, its loads in flight and its reservations."""

from dataclasses import dataclass

from kvferry.coordinator.block_sampling import BlockSampler
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.moves import Draining, MoveInFlight, Wanted, Warming
from kvferry.coordinator.prefix_rules import rules_of
from kvferry.coordinator.request_state import RequestState
from kvferry.coordinator.token_accounts import TokenAccounts
from kvferry.proto.group_specs import specs_of, takes_partial_loads
from kvferry.proto.ids import (
    NULL_BLOCK,
    BlockHash,
    BlockId,
    GroupId,
    InstanceId,
    LeaseId,
    RequestId,
)
from kvferry.proto.instance_stats import InstanceStats
from kvferry.proto.messages import InstanceInfo, InstanceState
from kvferry.proto.shared_chain import hashes_per_block
from kvferry.proto.step_messages import AdmitAsk, Source


@dataclass(slots=True, kw_only=True)
class LoadInFlight:
    """A request's blocks are being fetched; until its `LoadResult`, a writer may be open.

    `hit_tokens` were in place before, `asked_tokens` counts them and what was asked for, from the
    prompt's start. `deadline_s`: until when it may go on, at whichever holder. `tried`: who was
    asked, now the last one. `ahead`: the request follows a prefill and is not admitted.
    `cancelled`: the engine was told to stop. `released`: the request has ended meanwhile.
    """

    lease_id: LeaseId
    hit_tokens: int
    asked_tokens: int
    deadline_s: float
    tried: tuple[InstanceId, ...]
    ahead: bool = False
    cancelled: bool = False
    released: bool = False


@dataclass(slots=True, kw_only=True)
class Follower:
    """A request whose prompt a prefill instance is computing, and what it will ask for then.

    `looked_at_tokens`: the prefill had written so many when they were last looked at (None: never).
    `may_load`: no load ahead of it has failed or had to give way.
    """

    ask: AdmitAsk
    looked_at_tokens: int | None = None
    may_load: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Destination blocks of content that a client is about to store.

    `block_ids[i]` is None where the instance holds `hashes[i]` already; those holders are `kept`
    in place, so that the prefix is whole when the rest has arrived. `num_resets` are those of the
    instance when it was made: after another one it is of no use. `deadline_s`: it ends by itself
    then, as one whose id was lost on the way must. `move`: it is filled from a peer, for no client.
    """

    group_id: GroupId
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId | None, ...]
    kept: tuple[BlockId, ...]
    num_resets: int
    deadline_s: float
    move: MoveInFlight | None = None


class Instance:
    """State of one instance in one life.

    `block_tokens` is what a block covers over all ranks, `hashes_per_block` how many hashes of the
    service's chain that are, `hash_block_tokens` what one of them covers. `rules` are those of its
    own blocks, `rules_of_hashes` those of whoever takes single hashes of the chain.

    `returning_as`: the call_id of the registration by which it comes back; None as soon as it has
    told all that it holds. `num_resets`: how often the identity of a store was ever reset.
    `heard_s` and `is_suspect` are kept by `Silence`.

    `requests` holds running and loading requests; `loads` those of them whose blocks are still
    being fetched, oldest first. `followers` wait for a prefill elsewhere. `sampler`, if any,
    follows the blocks of its pool.

    `wanted` is what it is going to pull from peers for no request. `warming` and `draining` are
    None for one that is neither new nor going.

    Raises:
        ConfigError: a pool or groups that no cache can be made of, as `CacheConfig`, or blocks
            that are no whole hashes.

    """

    def __init__(self, info: InstanceInfo, sampler: BlockSampler | None = None) -> None:
        self.info = info
        self.identity_digest = info.identity.digest()
        self.block_tokens = info.layout.virtual_block_tokens
        self.hash_block_tokens = info.scheme.hash_block_tokens
        self.hashes_per_block = hashes_per_block(self.block_tokens, self.hash_block_tokens)
        self.rules = rules_of(info.identity, self.hash_block_tokens, self.hashes_per_block)
        self.rules_of_hashes = rules_of(info.identity, self.hash_block_tokens, 1)
        specs = specs_of(info.identity, self.block_tokens)
        self.takes_partial_loads = takes_partial_loads(specs)
        self.manager = CacheManager(
            CacheConfig(
                num_blocks=info.num_blocks,
                groups=specs,
                hash_block_tokens=self.hash_block_tokens,
                shared_chain=True,
                # A store has no model; no request of its own could be longer than its pool.
                max_model_len=info.max_model_len or info.num_blocks * self.block_tokens,
                max_in_flight_tokens=info.max_in_flight_tokens or None,
            )
        )
        self.manager.pool.sampler = sampler
        self.accounts = TokenAccounts()
        self.requests: dict[RequestId, RequestState] = {}
        self.loads: dict[RequestId, LoadInFlight] = {}
        self.followers: dict[RequestId, Follower] = {}
        self.reservations: dict[LeaseId, Reservation] = {}
        self.wanted: Wanted = {}
        self.warming: Warming | None = None
        self.draining: Draining | None = None
        self.num_resets = 0
        self.returning_as: str | None = None
        self.heard_s = 0.0
        self.is_suspect = False

    @property
    def source(self) -> Source:
        """Where blocks of this instance can be fetched."""
        return self.info.source

    @property
    def state(self) -> InstanceState:
        """What others may expect of it now."""
        if self.is_suspect:
            return "suspect"
        if self.draining is not None:
            return "draining"
        return "live" if self.returning_as is None else "returning"

    @property
    def num_requests(self) -> int:
        """Running and loading requests."""
        return len(self.requests)

    def is_running(self, request_id: RequestId) -> bool:
        """Tell whether a request is here and none of its blocks are being fetched."""
        return request_id in self.requests and request_id not in self.loads

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool without the null block."""
        return self.info.num_blocks - 1

    def stats(self) -> InstanceStats:
        """Return what this instance's requests and blocks have done since it registered."""
        first, preempted = self.accounts.read()
        sampler = self.manager.pool.sampler
        residency = None if sampler is None else sampler.read()
        return InstanceStats(first=first, preempted=preempted, residency=residency)

    def tables(self, request_id: RequestId) -> tuple[tuple[BlockId, ...], ...]:
        """Return a request's blocks per group in order of its tokens, null where one is skipped."""
        return tuple(tuple(blocks) for blocks in self.manager.block_table(request_id))

    def blocks_of(self, request_id: RequestId, num_blocks: int | None = None) -> list[BlockId]:
        """Return the blocks of a request's first `num_blocks` positions (None: all), per group."""
        return [
            block
            for table in self.manager.block_table(request_id)
            for block in table[:num_blocks]
            if block != NULL_BLOCK
        ]

    def forget_request(self, request_id: RequestId) -> None:
        """Free a request's blocks and drop it."""
        self.manager.free(request_id)
        self.accounts.ended(request_id)
        del self.requests[request_id]
