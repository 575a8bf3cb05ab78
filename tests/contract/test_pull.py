"""What every source of blocks must give a pull: an in-memory fake and the real gRPC server."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.builders import make_identity
from tests.pulling import pull_blocks
from tests.tampering import TamperingService, corrupted, make_frame

from kvferry.cluster.sim.blocking import simulated
from kvferry.cluster.sim.fetching import FetchClient, Served
from kvferry.cluster.sim.network import Network
from kvferry.cluster.sim.world import Process, World
from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, Incarnation
from kvferry.proto.layout import Layout
from kvferry.proto.memory_order import DEFAULT_ORDER
from kvferry.worker import bulk_server, layout_pull
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.device import open_device
from kvferry.worker.frames import Frame, Header, Place, Segment, places_of
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.paths import Path
from kvferry.worker.pull import BlockRun, PullOutcome, receive
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import FetchAsk, make_fetch_ask

IDENTITY = make_identity(num_layers=2)
NUM_BLOCKS = 9
HASHES = [BlockHash(hashlib.sha256(bytes([i])).digest()) for i in range(8)]
DESTINATIONS = [BlockId(block_id) for block_id in (8, 3, 5, 1, 7, 2, 6, 4)]

# What a source may do to its own messages before they leave.
Tamper = Callable[[Iterator[Header | Frame]], Iterator[Header | Frame]]
Source = Callable[[list[BlockHash], Tamper], AbstractContextManager["Pull"]]


def new_memory(order: str = DEFAULT_ORDER) -> KvMemory:
    return KvMemory(
        open_device("cpu"),
        IDENTITY,
        num_blocks=NUM_BLOCKS,
        layout=Layout(block_tokens=4, memory=order),
    )


def block_content(block_hash: BlockHash) -> bytes:
    """Return the canonical bytes that belong to a hash."""
    return (block_hash * 32)[: new_memory().groups[0].geometry.block_bytes]


class Pull:
    """Ends with these facts, whatever the source: prefix, error class, and the memory."""

    def __init__(
        self, run: Callable[[KvMemory], tuple[int, str | None]], *, verified_first: bool = True
    ) -> None:
        self._run = run
        # Whether only verified bytes are written, or others too, into blocks that nobody sees yet.
        self.verified_first = verified_first
        self.memory = new_memory()

    def __call__(self) -> tuple[int, str | None]:
        return self._run(self.memory)

    def block(self, index: int) -> bytes:
        return gather(self.memory.groups[0], [Place(DESTINATIONS[index], 0, 2)])


class FakeSource:
    """A dictionary that speaks the protocol."""

    def __init__(self, held: Sequence[BlockHash]) -> None:
        self._held = {block_hash: block_content(block_hash) for block_hash in held}

    def messages(self, ask: FetchAsk) -> Iterator[Header | Frame]:
        geometry = new_memory().groups[0].geometry
        found = []
        for block_hash in ask.hashes:
            if block_hash not in self._held:
                break
            found.append(self._held[block_hash])
        yield Header(incarnation=1, num_found=len(found), geometry=geometry)
        for index, content in enumerate(found):
            for layer in range(2):
                page = content[layer * geometry.page_bytes : (layer + 1) * geometry.page_bytes]
                segment = Segment(
                    hash_index=index,
                    layer_start=layer,
                    layer_end=layer + 1,
                    offset=0,
                    length=len(page),
                )
                yield make_frame((segment,), page)


@contextmanager
def fake(held: list[BlockHash], tamper: Tamper) -> Iterator[Pull]:
    source = FakeSource(held)

    def run(memory: KvMemory) -> tuple[int, str | None]:
        (group,) = memory.groups
        session = PullSession(len(HASHES), group.geometry)
        ask = make_fetch_ask(IDENTITY, HASHES)

        def place(frame: Frame) -> None:
            scatter(group, places_of(frame.segments, DESTINATIONS), frame.payload)

        try:
            receive(tamper(source.messages(ask)), session, place)
        except KvferryError as error:
            return session.num_complete, type(error).__name__
        whole = session.num_complete == len(HASHES)
        return session.num_complete, None if whole else "NotFoundError"

    yield Pull(run)


@contextmanager
def real(held: list[BlockHash], tamper: Tamper, *, paths: Sequence[Path] = ()) -> Iterator[Pull]:
    memory = new_memory()
    source = TamperingService(incarnation=Incarnation(1), memory=memory, paths=paths)
    source.tamper = lambda _, messages: tamper(messages)
    for block_id, block_hash in enumerate(held, start=1):
        scatter(memory.groups[0], [Place(BlockId(block_id), 0, 2)], block_content(block_hash))
        source.written(FIRST_GROUP, [(block_hash, BlockId(block_id))])
    address = source.serve()
    clients: list[WorkerService] = []

    def run(destination: KvMemory) -> tuple[int, str | None]:
        client = WorkerService(incarnation=Incarnation(2), memory=destination, paths=paths)
        clients.append(client)
        run = BlockRun(group_id=FIRST_GROUP, hashes=HASHES, block_ids=DESTINATIONS)
        outcome = pull_blocks(client, address, [run], lease_id="")
        (num_blocks,) = outcome.num_blocks_of_run
        assert client.residency.num_blocks() == num_blocks
        return num_blocks, outcome.error_type

    try:
        yield Pull(run, verified_first="bulk" not in paths)
    finally:
        for client in clients:
            client.stop()
        source.stop()


@contextmanager
def simulated_network(held: list[BlockHash], tamper: Tamper) -> Iterator[Pull]:
    """What the simulator has in the place of gRPC."""
    world = World(seed=1)
    network = Network(world)
    memory = new_memory()
    source = TamperingService(incarnation=Incarnation(1), memory=memory)
    source.tamper = lambda _, messages: tamper(messages)
    for block_id, block_hash in enumerate(held, start=1):
        scatter(memory.groups[0], [Place(BlockId(block_id), 0, 2)], block_content(block_hash))
        source.written(FIRST_GROUP, [(block_hash, BlockId(block_id))])
    served = {"source": Served(Process("source"), source)}
    fetcher = FetchClient(network, served, frame_bytes=1 << 20, shared=0.0)
    outcomes: list[PullOutcome] = []

    def run(destination: KvMemory) -> tuple[int, str | None]:
        client = WorkerService(incarnation=Incarnation(2), memory=destination, fetcher=fetcher)
        run = BlockRun(group_id=FIRST_GROUP, hashes=HASHES, block_ids=DESTINATIONS)
        world.spawn(lambda: outcomes.append(pull_blocks(client, "source", [run], lease_id="")))
        with simulated(world):
            world.run()
        (outcome,) = outcomes
        return outcome.num_blocks_of_run[0], outcome.error_type

    yield Pull(run)


@pytest.fixture(
    params=[fake, real, partial(real, paths=["bulk"]), simulated_network],
    ids=["fake", "grpc", "bulk", "simulated"],
)
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    chosen: Source = request.param
    return chosen


def honest(messages: Iterator[Header | Frame]) -> Iterator[Header | Frame]:
    return messages


def frames_apart(messages: Iterator[Header | Frame]) -> Iterator[Header | Frame]:
    """Send every segment as a frame of its own, so that a fault hits one of them."""
    for message in messages:
        if isinstance(message, Header):
            yield message
            continue
        for part in message.segments:
            payload = bytes(message.payload[part.offset : part.offset + part.length])
            yield make_frame((replace(part, offset=0),), payload)


def assert_prefix_in_place(pull: Pull, num_blocks: int) -> None:
    for index in range(len(HASHES) if pull.verified_first else num_blocks):
        expected = (
            block_content(HASHES[index])
            if index < num_blocks
            else bytes(pull.memory.groups[0].geometry.block_bytes)
        )
        assert pull.block(index) == expected, index


def test_everything_held_arrives_in_the_blocks_meant_for_it(source: Source) -> None:
    with source(HASHES, honest) as pull:
        assert pull() == (8, None)
        assert_prefix_in_place(pull, 8)
    assert torch.equal(pull.memory.layers[0][:, 0], torch.zeros(2, 4, 1, 8))


@pytest.mark.parametrize("num_held", [0, 5])
def test_only_the_prefix_that_is_held_arrives(source: Source, num_held: int) -> None:
    with source(HASHES[:num_held], honest) as pull:
        assert pull() == (num_held, "NotFoundError")
        assert_prefix_in_place(pull, num_held)


def test_a_hole_in_what_is_held_ends_the_prefix(source: Source) -> None:
    with source(HASHES[:2] + HASHES[3:], honest) as pull:
        assert pull() == (2, "NotFoundError")
        assert_prefix_in_place(pull, 2)


def test_a_corrupt_frame_ends_the_transfer_and_leaves_nothing_behind_it(source: Source) -> None:
    def corrupt(messages: Iterator[Header | Frame]) -> Iterator[Header | Frame]:
        for message in frames_apart(messages):
            if isinstance(message, Frame) and message.segments[0].hash_index == 3:
                yield corrupted(message)
            else:
                yield message

    with source(HASHES, corrupt) as pull:
        assert pull() == (3, "TransferError")
        assert_prefix_in_place(pull, 3)


def test_a_frame_that_comes_twice_ends_the_transfer(source: Source) -> None:
    def repeat(messages: Iterator[Header | Frame]) -> Iterator[Header | Frame]:
        for message in frames_apart(messages):
            yield message
            if isinstance(message, Frame) and message.segments[0].hash_index == 0:
                yield message

    with source(HASHES, repeat) as pull:
        _, error = pull()
        assert error == "TransferError"


def test_a_stream_that_ends_early_keeps_its_whole_prefix(source: Source) -> None:
    def shorten(messages: Iterator[Header | Frame]) -> Iterator[Header | Frame]:
        for message in frames_apart(messages):
            if isinstance(message, Frame) and message.segments[0].hash_index == 6:
                return
            yield message

    with source(HASHES, shorten) as pull:
        assert pull() == (6, "TransferError")
        assert_prefix_in_place(pull, 6)


def test_an_end_that_fails_after_everything_arrived_is_no_failure(source: Source) -> None:
    def fail_late(messages: Iterator[Header | Frame]) -> Iterator[Header | Frame]:
        yield from messages
        raise KvferryError("too late to matter")

    with source(HASHES, fail_late) as pull:
        assert pull() == (8, None)


def test_a_source_that_never_sends_a_header_delivers_nothing(source: Source) -> None:
    def no_header(messages: Iterator[Header | Frame]) -> Iterator[Header | Frame]:
        return (message for message in messages if isinstance(message, Frame))

    with source(HASHES, no_header) as pull:
        assert pull() == (0, "TransferError")
        assert_prefix_in_place(pull, 0)


@pytest.mark.parametrize(("theirs", "ours"), [("BLSNH", "LBHNS"), ("LBSHN", "LSBNH")])
def test_a_peer_with_another_memory_order_sends_whole_blocks(
    monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str
) -> None:
    monkeypatch.setattr(layout_pull, "plan_reshard", None)  # no plan is made
    peer, worker = (
        WorkerService(incarnation=Incarnation(1), memory=new_memory(order))
        for order in (theirs, ours)
    )
    run = BlockRun(group_id=FIRST_GROUP, hashes=HASHES, block_ids=DESTINATIONS)
    for block_id, block_hash in enumerate(HASHES, start=1):
        scatter(peer.memory.groups[0], [Place(BlockId(block_id), 0, 2)], block_content(block_hash))
        peer.written(FIRST_GROUP, [(block_hash, BlockId(block_id))])
    try:
        outcome = pull_blocks(worker, peer.serve(), [run], layout=peer.memory.layout)
    finally:
        peer.stop()
        worker.stop()
    assert (outcome.num_blocks_of_run, outcome.error) == ((len(HASHES),), None)
    for source, block_id in enumerate(DESTINATIONS, start=1):
        for sent, arrived in zip(peer.memory.layers, worker.memory.layers, strict=True):
            assert torch.equal(sent[:, source], arrived[:, block_id])
