import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
from tests.builders import make_identity
from tests.tampering import make_frame
from tests.unit.worker.reserving import FakeCoordinator, new_reserver, reserving

from kvferry.proto.errors import (
    BadInputError,
    BusyError,
    ConfigError,
    IdentityMismatchError,
    InvariantError,
    MismatchError,
    TransferError,
    UnavailableError,
)
from kvferry.proto.identity import Identity
from kvferry.proto.ids import (
    FIRST_GROUP,
    BlockHash,
    BlockId,
    Epoch,
    GroupId,
    Incarnation,
    InstanceId,
    LeaseId,
    pack_group,
)
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Command, Reply
from kvferry.worker.actor import StoreConfig, WorkerActor
from kvferry.worker.block_io import gather
from kvferry.worker.device import open_device
from kvferry.worker.frames import Frame, Place, plan_frames
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.reservations import Reservation
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_wire import StoreAsk, make_store_ask

IDENTITY = make_identity(head_size=2)
HASHES = tuple(BlockHash(hashlib.sha256(bytes([i])).digest()) for i in range(3))


class FakeReserver:
    def __init__(self, block_ids: Sequence[int | None]) -> None:
        self._block_ids = block_ids
        self.ended: list[tuple[LeaseId, int]] = []
        self.num_resets = 0

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        block_ids = [None if i is None else BlockId(i) for i in self._block_ids]
        return Reservation(
            reservation_id=LeaseId("r1"), block_ids=block_ids, num_resets=self.num_resets
        )

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        self.ended.append((reservation_id, num_written))


def new_service(identity: Identity = IDENTITY) -> WorkerService:
    memory = KvMemory(open_device("cpu"), identity, num_blocks=5, layout=Layout(block_tokens=4))
    return WorkerService(incarnation=Incarnation(1), memory=memory)


def content(index: int) -> bytes:
    return bytes([index + 1]) * 64


def parts(service: WorkerService) -> list[StoreAsk | Frame]:
    """Return a header and one frame per block."""
    geometry = service.memory.groups[0].geometry
    frames = [
        make_frame(segments, content(segments[0].hash_index))
        for segments in plan_frames(len(HASHES), geometry, geometry.block_bytes)
    ]
    return [make_store_ask(IDENTITY, HASHES, geometry), *frames]


def block(service: WorkerService, block_id: int) -> bytes:
    return gather(service.memory.groups[0], [Place(BlockId(block_id), 0, 1)])


def resident_blocks(service: WorkerService) -> int:
    return service.describe().num_resident_blocks


def test_stored_blocks_are_in_place_and_resident_before_the_reservation_ends() -> None:
    service = new_service()

    class Checking(FakeReserver):
        def end(self, reservation_id: LeaseId, num_written: int) -> None:
            assert resident_blocks(service) == 3
            super().end(reservation_id, num_written)

    reserver = Checking([4, 2, 3])
    service.reserver = reserver
    assert service.accept_store(iter(parts(service))) == 3
    assert [block(service, i) for i in (4, 2, 3)] == [content(0), content(1), content(2)]
    assert reserver.ended == [("r1", 3)]


def test_a_block_that_is_here_already_is_counted_and_not_written() -> None:
    service = new_service()
    reserver = FakeReserver([4, None, 3])
    service.reserver = reserver
    assert service.accept_store(iter(parts(service))) == 3
    assert [block(service, i) for i in (1, 2)] == [bytes(64), bytes(64)]
    assert resident_blocks(service) == 2
    assert reserver.ended == [("r1", 3)]


def test_what_a_reserved_block_held_before_is_forgotten() -> None:
    service = new_service()
    old = BlockHash(b"o" * 32)
    service.written(FIRST_GROUP, [(old, BlockId(4))])
    service.reserver = FakeReserver([4, 2, 3])
    corrupt = parts(service)
    first = corrupt[1]
    assert isinstance(first, Frame)
    corrupt[1] = replace(first, checksum=0)
    with pytest.raises(TransferError, match="checksum is wrong"):
        service.accept_store(iter(corrupt))
    assert resident_blocks(service) == 0
    assert service.stats().num_checksum_failures == 1


def test_a_client_that_leaves_midway_keeps_its_prefix_and_ends_the_reservation() -> None:
    service = new_service()
    reserver = FakeReserver([4, 2, 3])
    service.reserver = reserver

    def leaving() -> Iterator[StoreAsk | Frame]:
        yield from parts(service)[:3]
        raise ConnectionError("the client is gone")

    with pytest.raises(ConnectionError):
        service.accept_store(leaving())
    assert reserver.ended == [("r1", 2)]
    assert resident_blocks(service) == 2


def test_a_short_store_fails_with_its_prefix_kept() -> None:
    service = new_service()
    reserver = FakeReserver([4, 2, 3])
    service.reserver = reserver
    with pytest.raises(TransferError, match="ended early"):
        service.accept_store(iter(parts(service)[:2]))
    assert reserver.ended == [("r1", 1)]


def test_a_reservation_of_a_wrong_size_is_ended_with_nothing_written() -> None:
    service = new_service()
    reserver = FakeReserver([4, 2])
    service.reserver = reserver
    with pytest.raises(InvariantError, match="wrong size; given: 2; allowed: 3"):
        service.accept_store(iter(parts(service)))
    assert reserver.ended == [("r1", 0)]
    assert resident_blocks(service) == 0


class Unreachable(FakeReserver):
    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        super().end(reservation_id, num_written)
        raise UnavailableError("no coordinator")


def test_an_end_that_fails_does_not_hide_what_ended_the_transfer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = new_service()
    reserver = Unreachable([4, 2, 3])
    service.reserver = reserver
    with pytest.raises(TransferError, match="ended early"):
        service.accept_store(iter(parts(service)[:2]))
    assert reserver.ended == [("r1", 1)]
    assert "reservation r1 was not ended" in caplog.text


def test_a_whole_store_whose_end_fails_is_no_success() -> None:
    service = new_service()
    service.reserver = Unreachable([4, 2, 3])
    with pytest.raises(UnavailableError, match="no coordinator"):
        service.accept_store(iter(parts(service)))


def test_a_second_header_is_refused() -> None:
    service = new_service()
    service.reserver = FakeReserver([4, 2, 3])
    header = parts(service)[0]
    with pytest.raises(TransferError, match="second header"):
        service.accept_store(iter([header, header]))


def test_a_worker_without_an_owner_of_its_blocks_takes_no_stores() -> None:
    service = new_service()
    with pytest.raises(MismatchError, match="takes no stores") as refused:
        service.accept_store(iter(parts(service)))
    assert refused.value.grpc_status == "FAILED_PRECONDITION"


@pytest.mark.parametrize("first", [0, 1])
def test_a_store_that_does_not_begin_with_a_header_reserves_nothing(first: int) -> None:
    service = new_service()
    reserver = FakeReserver([4, 2, 3])
    service.reserver = reserver
    frames = parts(service)[1 : 1 + first]
    with pytest.raises(BadInputError, match="must begin with a header"):
        service.accept_store(iter(frames))
    assert reserver.ended == []


def test_another_identity_is_refused_by_field_and_reserves_nothing() -> None:
    service = new_service(replace(IDENTITY, weight_version="2"))
    reserver = FakeReserver([4, 2, 3])
    service.reserver = reserver
    with pytest.raises(IdentityMismatchError, match="weight_version=1; allowed: weight_version=2"):
        service.accept_store(iter(parts(service)))
    assert reserver.ended == []


def test_other_block_sizes_are_refused_before_anything_is_reserved() -> None:
    service = new_service()
    reserver = FakeReserver([4, 2, 3])
    service.reserver = reserver
    header = parts(service)[0]
    assert isinstance(header, StoreAsk)
    wrong = replace(header, geometry=replace(header.geometry, block_tokens=8))
    with pytest.raises(TransferError, match="cut blocks differently"):
        service.accept_store(iter([wrong]))
    assert reserver.ended == []


def test_after_a_reset_only_what_is_written_for_it_is_resident() -> None:
    service = new_service()
    service.reserver = before = FakeReserver([1, 2, 3])
    assert service.accept_store(iter(parts(service))) == 3
    old = iter(parts(service))

    def reset_meanwhile() -> Iterator[StoreAsk | Frame]:
        yield from islice(old, 2)
        service.reserver = after = FakeReserver([4, None, None])
        after.num_resets = 3
        assert service.accept_store(iter(parts(service))) == 3
        yield from old

    before.num_resets = 2
    assert service.accept_store(reset_meanwhile()) == 3
    assert resident_blocks(service) == 1
    found = service.residency.find(pack_group(HASHES[0], FIRST_GROUP))
    assert found is not None
    assert found.block_id == 4


def test_no_room_at_the_coordinator_reaches_the_client_and_ends_nothing() -> None:
    def full(_: Command) -> Reply:
        raise BusyError("no free blocks", given=3, allowed=0)

    coordinator = FakeCoordinator(full)
    service = new_service()
    service.reserver = new_reserver(coordinator)
    with pytest.raises(BusyError, match="no free blocks"):
        service.accept_store(iter(parts(service)))
    assert len(coordinator.commands) == 1


def test_a_worker_actor_says_what_to_do_first() -> None:
    actor = WorkerActor()
    actor.stop()
    with pytest.raises(ConfigError, match=r"not started; allowed: start\(config\) first"):
        actor.set_coordinator(reserving, Epoch(1))


def test_a_worker_actor_with_an_impossible_config_stays_unstarted() -> None:
    actor = WorkerActor()
    config = StoreConfig(
        instance_id=InstanceId("store-0"),
        incarnation=Incarnation(1),
        identity=IDENTITY,
        num_blocks=0,
        block_tokens=4,
    )
    with pytest.raises(ConfigError, match="num_blocks must be an integer; given: 0"):
        actor.start(config)
    with pytest.raises(ConfigError, match="not started"):
        actor.stats()
