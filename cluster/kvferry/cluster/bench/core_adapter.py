"""All that the benchmarks know of the cache manager's interface and of the pool's events."""

from collections.abc import Sequence
from typing import cast

from kvferry.cluster.bench.pool_operations import BLOCK_TOKENS
from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.pool_events import Removed, Stored
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.ids import BlockHash, BlockId, GroupId, RequestId
from kvferry.proto.specs import FullSpec

MAX_MODEL_TOKENS = 1 << 20
GROUP = GroupId(0)


class KvferryManager:
    """See `pool_operations.Manager`.

    Without events, as the other side's manager is by default: telling them is no part of what is
    compared. In a service they are told, and `step_call@256` and `ingest_event` hold their cost.
    """

    def __init__(self, num_blocks: int) -> None:
        spec = FullSpec(block_tokens=BLOCK_TOKENS, kv_heads=1, head_dim=1, dtype="float32")
        self._manager = CacheManager(
            CacheConfig(
                num_blocks=num_blocks,
                groups=(spec,),
                hash_block_tokens=BLOCK_TOKENS,
                max_model_len=MAX_MODEL_TOKENS,
                record_events=False,
            )
        )

    def make_request(self, name: str, hashes: list[bytes]) -> RequestState:
        """See `Manager.make_request`."""
        return RequestState(
            request_id=RequestId(name),
            num_tokens=len(hashes) * BLOCK_TOKENS + 1,
            hashes=cast("list[BlockHash]", hashes),
        )

    def lookup(self, request: RequestState) -> int:
        """See `Manager.lookup`."""
        _, num_tokens = self._manager.get_computed_blocks(request)
        return num_tokens

    def allocate(self, request: RequestState) -> bool:
        """See `Manager.allocate`."""
        return self._manager.allocate_slots(request, request.num_tokens - 1) is not None

    def free(self, request: RequestState) -> None:
        """See `Manager.free`."""
        self._manager.free(request.request_id)

    def settle(self) -> None:
        """See `Manager.settle`; a step begins."""
        self._manager.start_step()


def stored_event(hashes: Sequence[BlockHash]) -> Stored:
    """Return the event of blocks that became findable under `hashes`."""
    return Stored(_blocks(hashes), tuple(hashes), GROUP)


def removed_event(hashes: Sequence[BlockHash]) -> Removed:
    """Return the event of blocks that are no longer findable under `hashes`."""
    return Removed(_blocks(hashes), tuple(hashes), GROUP)


def _blocks(hashes: Sequence[BlockHash]) -> tuple[BlockId, ...]:
    return tuple(BlockId(i + 1) for i in range(len(hashes)))
