"""Transfers between workers with two groups of layers, over gRPC: each group's own bytes."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from tests.builders import make_identity
from tests.integration.transfer_peer import hash_of
from tests.pulling import pull_blocks

from kvferry.proto.errors import BadInputError, InvariantError
from kvferry.proto.identity import GroupSpec
from kvferry.proto.ids import BlockHash, BlockId, GroupId, Incarnation, LeaseId, pack_group
from kvferry.proto.layout import Layout
from kvferry.worker.device import open_device
from kvferry.worker.frames import Geometry, Header
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.pull import BlockRun, PullOutcome
from kvferry.worker.reservations import Reservation
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_client import TransferClient
from kvferry.worker.transfer_wire import FetchAsk, make_fetch_ask, make_store_ask

FULL, WINDOW = GroupId(0), GroupId(1)
IDENTITY = make_identity(
    groups=(
        GroupSpec(kind="full", layers=(0, 3)),
        GroupSpec(kind="sliding_window", layers=(1, 2, 4), window_tokens=4),
    )
)
NUM_BLOCKS = 9
HASHES = [hash_of(index) for index in range(4)]
# A prefix of four blocks of two tokens: the window still reaches the last two.
AT_SOURCE = {
    FULL: list(zip(HASHES, map(BlockId, (1, 2, 3, 4)), strict=True)),
    WINDOW: list(zip(HASHES[2:], map(BlockId, (5, 6)), strict=True)),
}
RUNS = (
    BlockRun(group_id=FULL, hashes=HASHES, block_ids=[BlockId(i) for i in (8, 7, 6, 5)]),
    BlockRun(group_id=WINDOW, hashes=HASHES[2:], block_ids=[BlockId(i) for i in (4, 3)]),
)


def new_worker(incarnation: int = 1, kind: type[WorkerService] = WorkerService) -> WorkerService:
    memory = KvMemory(
        open_device("cpu"), IDENTITY, num_blocks=NUM_BLOCKS, layout=Layout(block_tokens=2)
    )
    return kind(incarnation=Incarnation(incarnation), memory=memory, paths=())


def content(group_id: GroupId, layer: int, block_hash: BlockHash) -> torch.Tensor:
    """Return K and V of one block in one layer; no two are alike."""
    index = HASHES.index(block_hash)
    return torch.arange(32.0).view(2, 2, 1, 8) + 1000 * (1 + index + 10 * layer + 100 * group_id)


def fill(worker: WorkerService) -> None:
    for group_id, pairs in AT_SOURCE.items():
        for block_hash, block_id in pairs:
            for layer in IDENTITY.groups[group_id].layers:
                worker.memory.layers[layer][:, block_id] = content(group_id, layer, block_hash)
        worker.written(group_id, pairs)


@contextmanager
def source(kind: type[WorkerService] = WorkerService) -> Iterator[tuple[WorkerService, str]]:
    worker = new_worker(kind=kind)
    fill(worker)
    try:
        yield worker, worker.serve()
    finally:
        worker.stop()


@pytest.fixture
def here() -> Iterator[WorkerService]:
    worker = new_worker(incarnation=50)
    yield worker
    worker.stop()


def pull(
    worker: WorkerService,
    address: str,
    runs: Sequence[BlockRun] = RUNS,
    *,
    timeout_s: float = 20.0,
    cancel: threading.Event | None = None,
) -> PullOutcome:
    return pull_blocks(worker, address, runs, timeout_s=timeout_s, cancel=cancel)


def assert_exactly_in_place(worker: WorkerService, num_blocks_of_run: tuple[int, ...]) -> None:
    """The first blocks of each run hold their group's bytes; no other byte was written."""
    expected = new_worker().memory.layers
    for run, arrived in zip(RUNS, num_blocks_of_run, strict=True):
        for position, (block_hash, block_id) in enumerate(
            zip(run.hashes, run.block_ids, strict=True)
        ):
            resident = worker.residency.find(pack_group(block_hash, run.group_id))
            assert (resident is not None) == (position < arrived)
            for layer in IDENTITY.groups[run.group_id].layers if position < arrived else ():
                expected[layer][:, block_id] = content(run.group_id, layer, block_hash)
    for found, wanted in zip(worker.memory.layers, expected, strict=True):
        assert torch.equal(found, wanted)


def test_one_pull_moves_both_groups_into_their_own_layers(here: WorkerService) -> None:
    with source() as (_, address):
        page_bytes = 2 * 2 * 8 * 4
        assert pull(here, address) == PullOutcome(
            num_blocks_of_run=(4, 2), num_bytes=(4 * 2 + 2 * 3) * page_bytes
        )
    assert_exactly_in_place(here, (4, 2))
    assert here.stats().num_blocks_pulled == 6


def test_a_hash_held_in_one_group_is_not_found_in_the_other(here: WorkerService) -> None:
    with source() as (worker, address):
        worker.reused([block_id for _, block_id in AT_SOURCE[WINDOW]])
        outcome = pull(here, address, RUNS[1:])
    assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "NotFoundError")
    assert outcome.error == (
        f"{address} holds only the first blocks of group 1; given: 0; allowed: 2"
    )
    assert here.residency.num_blocks() == 0


def test_a_missing_block_of_the_last_group_leaves_the_groups_before_it_whole(
    here: WorkerService,
) -> None:
    with source() as (worker, address):
        worker.reused([BlockId(6)])
        outcome = pull(here, address)
    assert (outcome.num_blocks_of_run, outcome.error_type) == ((4, 1), "NotFoundError")
    assert_exactly_in_place(here, (4, 1))


def test_a_missing_block_of_the_first_group_ends_the_pull(here: WorkerService) -> None:
    with source() as (worker, address):
        worker.reused([BlockId(2)])
        outcome = pull(here, address)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((1, 0), "NotFoundError")
        assert_exactly_in_place(here, (1, 0))
        assert worker.stats().of("served").num_started == 1
        assert pull(here, address, RUNS[1:]).num_blocks_of_run == (2,)
    assert_exactly_in_place(here, (1, 2))


class Interrupted(WorkerService):
    """Does something in the middle of serving the window group."""

    interrupt: Callable[[], object]

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | OutgoingFrame]:
        for message in super().open_fetch(ask):
            if ask.group_id == WINDOW and isinstance(message, Header):
                self.interrupt()
            yield message


@contextmanager
def interrupted(interrupt: Callable[[WorkerService], object]) -> Iterator[str]:
    with source(Interrupted) as (worker, address):
        assert isinstance(worker, Interrupted)
        worker.interrupt = lambda: interrupt(worker)
        yield address


def test_a_block_handed_to_the_other_group_meanwhile_ends_only_its_own_group(
    here: WorkerService,
) -> None:
    def hand_over(worker: WorkerService) -> None:
        worker.reused([BlockId(6)])
        worker.written(FULL, [(hash_of(100), BlockId(6))])

    with interrupted(hand_over) as address:
        outcome = pull(here, address)
    assert (outcome.num_blocks_of_run, outcome.error_type) == ((4, 1), "NotFoundError")
    assert_exactly_in_place(here, (4, 1))


def test_a_cancel_between_two_groups_ends_the_pull(here: WorkerService) -> None:
    cancel = threading.Event()
    with interrupted(lambda _: cancel.set()) as address:
        outcome = pull(here, address, cancel=cancel)
    assert (outcome.num_blocks_of_run, outcome.error_type) == ((4, 0), "Cancelled")
    assert_exactly_in_place(here, (4, 0))


def test_all_groups_share_one_deadline(here: WorkerService) -> None:
    with interrupted(lambda _: time.sleep(3.0)) as address:
        started = time.monotonic()
        outcome = pull(here, address, timeout_s=1.0)
        assert time.monotonic() - started < 2.5
    assert (outcome.num_blocks_of_run, outcome.error_type) == ((4, 0), "DeadlineError")
    assert_exactly_in_place(here, (4, 0))


def test_for_a_group_that_needs_nothing_nobody_is_called(here: WorkerService) -> None:
    nothing = BlockRun(group_id=WINDOW, hashes=(), block_ids=())
    outcome = pull(here, "127.0.0.1:9", [nothing])
    assert outcome == PullOutcome(num_blocks_of_run=(0,), num_bytes=0)


def test_a_block_cannot_be_the_destination_of_two_groups(here: WorkerService) -> None:
    runs = [
        BlockRun(group_id=group_id, hashes=HASHES[:1], block_ids=[BlockId(3)])
        for group_id in (FULL, WINDOW)
    ]
    with pytest.raises(BadInputError, match=r"named twice; given: \[3, 3\]"):
        pull(here, "127.0.0.1:9", runs)


def test_an_unknown_group_is_refused_everywhere_with_those_there_are(here: WorkerService) -> None:
    unknown = GroupId(2)
    here.reserver = GroupReserver()
    geometry = here.memory.group(FULL).geometry
    for call in (
        lambda: here.written(unknown, [(HASHES[0], BlockId(1))]),
        lambda: pull(
            here,
            "127.0.0.1:9",
            [BlockRun(group_id=unknown, hashes=HASHES[:1], block_ids=[BlockId(1)])],
        ),
        lambda: next(here.open_fetch(make_fetch_ask(IDENTITY, HASHES, group_id=unknown))),
        lambda: here.accept_store(
            iter([make_store_ask(IDENTITY, HASHES, geometry, group_id=unknown)])
        ),
    ):
        with pytest.raises(BadInputError, match=r"no such group .* given: 2; allowed: \[0, 1\]"):
            call()
    assert here.reserver.reserved == []


def test_a_block_is_of_one_group_at_a_time(here: WorkerService) -> None:
    here.written(FULL, [(HASHES[0], BlockId(1))])
    with pytest.raises(InvariantError, match="still held another hash"):
        here.written(WINDOW, [(HASHES[0], BlockId(1))])
    here.reused([BlockId(1)])
    here.written(WINDOW, [(HASHES[0], BlockId(1))])
    assert here.residency.find(pack_group(HASHES[0], FULL)) is None
    assert here.residency.find(pack_group(HASHES[0], WINDOW)) is not None


class GroupReserver:
    """Hands blocks out from the first on, whatever the group."""

    def __init__(self) -> None:
        self.reserved: list[tuple[GroupId, int]] = []

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        first = 1 + sum(num_blocks for _, num_blocks in self.reserved)
        self.reserved.append((group_id, len(hashes)))
        block_ids = [BlockId(first + i) for i in range(len(hashes))]
        return Reservation(reservation_id=LeaseId("r1"), block_ids=block_ids)

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        pass


def test_a_store_takes_blocks_of_each_group_and_serves_them(here: WorkerService) -> None:
    store, client = new_worker(), TransferClient()
    reserver = store.reserver = GroupReserver()
    writer = new_worker(incarnation=60)
    fill(writer)
    try:
        address = store.serve()
        num_stored = [
            client.store(
                address,
                BlockRun(
                    group_id=group_id,
                    hashes=[block_hash for block_hash, _ in pairs],
                    block_ids=[block_id for _, block_id in pairs],
                ),
                identity=IDENTITY,
                memory=writer.memory,
                timeout_s=20.0,
            )
            for group_id, pairs in AT_SOURCE.items()
        ]
        assert num_stored == [4, 2]
        assert reserver.reserved == [(FULL, 4), (WINDOW, 2)]
        assert pull(here, address).num_blocks_of_run == (4, 2)
    finally:
        client.close()
        store.stop()
    assert_exactly_in_place(here, (4, 2))


def test_a_worker_describes_every_group() -> None:
    client = TransferClient()
    with source() as (_, address):
        described = client.describe(address, timeout_s=10.0)
    client.close()
    assert described.identity == IDENTITY
    assert described.num_resident_blocks == 6
    assert described.geometry_of_group == {
        FULL: Geometry(num_layers=2, page_bytes=128, block_tokens=2),
        WINDOW: Geometry(num_layers=3, page_bytes=128, block_tokens=2),
    }
