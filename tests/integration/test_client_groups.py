"""The public client with layers of two kinds: a window's layers move only where it still reaches.

The store is a real one; the coordinator is played by an object that applies each group's rule.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvferry.cluster.client_cache import ModelCache
from kvferry.cluster.control_client import ControlClient
from kvferry.proto.errors import BusyError, ConfigError, InvariantError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import BlockHash, BlockId, Epoch, GroupId, Incarnation, InstanceId, LeaseId
from kvferry.proto.messages import (
    AcquireLease,
    Command,
    Done,
    EndReservation,
    Holder,
    Leased,
    Locate,
    Located,
    ReleaseLease,
    Reply,
    Reserve,
    Reserved,
)
from kvferry.proto.step_messages import Source
from kvferry.worker.actor import StoreConfig, WorkerActor
from kvferry.worker.transfer_client import TransferClient

BLOCK_TOKENS = 4
BLOCK_BYTES = 2 * BLOCK_TOKENS * 3 * 8 * 4
FULL, WINDOW = GroupId(0), GroupId(1)
# The window of 6 reaches from token 16 back to token 11: of four blocks the last two are needed.
IDENTITY = Identity(
    model="hybrid",
    weight_version="v1",
    weight_dtype="float32",
    kv_dtype="float32",
    kv_scales="",
    rope="default",
    num_layers=3,
    num_kv_heads=3,
    head_size=8,
    groups=(
        GroupSpec(kind="full", layers=(1,)),
        GroupSpec(kind="sliding_window", layers=(0, 2), window_tokens=6),
    ),
)


class PlayedCoordinator(ControlClient):
    """One store and a pool that forgets nothing, asked without a network."""

    def __init__(self, *, num_blocks: int) -> None:
        self.timeout_s = 5.0
        self.free = [BlockId(block_id) for block_id in range(1, num_blocks)]
        self.block_of: dict[tuple[GroupId, BlockHash], BlockId] = {}
        self.reserved: dict[LeaseId, tuple[Reserve, Reserved]] = {}
        self.source: Source

    def call(self, command: Command, timeout_s: float | None = None) -> Reply:
        match command:
            case Locate():
                holder = Holder(
                    source=self.source,
                    role="store",
                    num_blocks=self.num_usable(command.hashes),
                    num_requests=0,
                    num_free_blocks=len(self.free),
                )
                return Located(epoch=Epoch(1), holders=(holder,))
            case AcquireLease():
                num_blocks = self.num_usable(command.hashes)
                return Leased(
                    lease_id=LeaseId("lease-1"),
                    source=self.source if num_blocks else None,
                    num_blocks=num_blocks,
                    ttl_s=command.ttl_s,
                )
            case ReleaseLease():
                return Done(changed=True)
            case Reserve():
                return self._reserve(command)
            case EndReservation():
                reserve, reserved = self.reserved.pop(command.reservation_id)
                assert command.num_written == len(reserve.hashes)
                for block_hash, block_id in zip(reserve.hashes, reserved.block_ids, strict=True):
                    if block_id is not None:
                        self.block_of[reserve.group_id, block_hash] = block_id
                return Done(changed=True)
        raise InvariantError("nobody sends this here", given=type(command).__name__)

    def num_usable(self, hashes: tuple[BlockHash, ...]) -> int:
        """Return the longest prefix of which every group's needed blocks are held."""
        for length in range(len(hashes), 0, -1):
            if all(
                (GroupId(group_id), block_hash) in self.block_of
                for group_id, group in enumerate(IDENTITY.groups)
                for block_hash in hashes[group.first_needed_block(length, BLOCK_TOKENS) : length]
            ):
                return length
        return 0

    def held(self, group_id: GroupId) -> int:
        return sum(group == group_id for group, _ in self.block_of)

    def _reserve(self, command: Reserve) -> Reserved:
        missing = [h for h in command.hashes if (command.group_id, h) not in self.block_of]
        if len(missing) > len(self.free):
            raise BusyError("no room", given=len(missing), allowed=len(self.free))
        taken = {block_hash: self.free.pop(0) for block_hash in missing}
        reserved = Reserved(
            reservation_id=LeaseId(f"r{len(self.free)}"),
            block_ids=tuple(taken.get(block_hash) for block_hash in command.hashes),
        )
        self.reserved[reserved.reservation_id] = (command, reserved)
        return reserved


@pytest.fixture
def store() -> Iterator[WorkerActor]:
    worker = WorkerActor()
    yield worker
    worker.stop()


@pytest.fixture
def coordinator(store: WorkerActor) -> PlayedCoordinator:
    config = StoreConfig(
        instance_id=InstanceId("store-0"),
        incarnation=Incarnation(1),
        identity=IDENTITY,
        num_blocks=17,
        block_tokens=BLOCK_TOKENS,
    )
    played = PlayedCoordinator(num_blocks=config.num_blocks)
    played.source = Source(
        instance_id=config.instance_id,
        incarnation=config.incarnation,
        address=store.start(config).address,
    )
    store.set_coordinator(played.call, Epoch(1))
    return played


@pytest.fixture
def cache(coordinator: PlayedCoordinator) -> Iterator[ModelCache]:
    transfer = TransferClient()
    scheme = make_scheme(hash_block_tokens=BLOCK_TOKENS)
    yield ModelCache(coordinator, transfer, scheme, IDENTITY)
    transfer.close()


def random_layers(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, num_tokens, 3, 8, generator=generator) for _ in range(3)]


def blank_layers(num_tokens: int) -> list[torch.Tensor]:
    return [torch.full((2, num_tokens, 3, 8), -7.0) for _ in range(3)]


def assert_in_place(
    into: list[torch.Tensor], stored: list[torch.Tensor], *, window_start: int, end: int
) -> None:
    """Tokens up to `end`, in window layers from `window_start` on, are there and nothing else."""
    expected = blank_layers(into[0].shape[1])
    for layer, start in ((0, window_start), (1, 0), (2, window_start)):
        expected[layer][:, start:end] = stored[layer][:, start:end]
        assert torch.equal(into[layer], expected[layer])


@pytest.mark.parametrize("max_staging_bytes", [1 << 20, 1])
def test_a_stored_prefix_comes_back_without_what_left_the_window(
    store: WorkerActor,
    coordinator: PlayedCoordinator,
    cache: ModelCache,
    max_staging_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With 1 byte, every block is a part of its own.
    monkeypatch.setattr("kvferry.cluster.client_staging.MAX_STAGING_BYTES", max_staging_bytes)
    stored, into = random_layers(18), blank_layers(18)
    assert cache.store(range(18), stored) == 16
    assert (coordinator.held(FULL), coordinator.held(WINDOW)) == (4, 2)
    assert store.stats().num_bytes_stored == (4 * 1 + 2 * 2) * BLOCK_BYTES

    assert cache.lookup(range(18)).num_tokens == 16
    assert cache.fetch(range(18), into) == 16
    assert_in_place(into, stored, window_start=8, end=16)


def test_what_was_fetched_and_grew_can_be_stored_again(
    store: WorkerActor, coordinator: PlayedCoordinator, cache: ModelCache
) -> None:
    computed, engine, into = random_layers(24), blank_layers(24), blank_layers(24)
    cache.store(range(16), computed)
    cache.fetch(range(16), engine)
    for layer, whole in zip(engine, computed, strict=True):
        layer[:, 16:] = whole[:, 16:]
    before = store.stats().num_bytes_stored

    assert cache.store(range(24), engine) == 24
    # Two more blocks: of the one full layer, and of the two window layers.
    assert store.stats().num_bytes_stored - before == 2 * 3 * BLOCK_BYTES
    assert cache.fetch(range(24), into) == 24
    assert_in_place(into, computed, window_start=16, end=24)


def test_a_shorter_prefix_whose_window_was_not_stored_is_a_miss_until_it_is(
    cache: ModelCache,
) -> None:
    stored = random_layers(16)
    cache.store(range(16), stored)
    assert cache.lookup(range(8)).num_tokens == 0

    assert cache.store(range(8), stored) == 8
    assert cache.lookup(range(8)).num_tokens == 8
    assert cache.lookup(range(16)).num_tokens == 16


@pytest.mark.parametrize("group_id", [FULL, WINDOW])
def test_a_block_that_one_group_lost_makes_the_fetch_a_miss(
    store: WorkerActor, coordinator: PlayedCoordinator, cache: ModelCache, group_id: GroupId
) -> None:
    cache.store(range(16), random_layers(16))
    lost = [block for (group, _), block in coordinator.block_of.items() if group == group_id][-1]
    # The coordinator does not know of the loss.
    store._started().reused([lost])
    assert cache.fetch(range(16), blank_layers(16)) == 0


def test_a_store_without_room_for_every_group_says_so(
    coordinator: PlayedCoordinator, cache: ModelCache
) -> None:
    del coordinator.free[5:]
    with pytest.raises(BusyError, match="no room; given: 2; allowed: 1"):
        cache.store(range(16), random_layers(16))
    assert cache.lookup(range(16)).num_tokens == 0


def test_recurrent_states_are_refused_before_anybody_is_asked(
    coordinator: PlayedCoordinator,
) -> None:
    recurrent = GroupSpec(kind="mamba", layers=(0, 2), state_bytes=64)
    identity = replace(IDENTITY, groups=(IDENTITY.groups[0], recurrent))
    transfer = TransferClient()
    scheme = make_scheme(hash_block_tokens=BLOCK_TOKENS)
    cache = ModelCache(coordinator, transfer, scheme, identity)
    for call in (cache.store, cache.fetch):
        with pytest.raises(ConfigError, match="states of group 1; given: mamba"):
            call(range(16), random_layers(16))
    assert len(coordinator.free) == 16
    transfer.close()
