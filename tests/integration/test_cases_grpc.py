"""Known failures of gRPC services, each as a test; the number names the case.

Memory while much is moved is in `test_cases_grpc_memory.py`, and real blocks around gRPC's default
limit are in `test_transfer.py`.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, cast

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.integration.transfer_peer import FirstBlocks, content_of, fill, hash_of, new_worker
from tests.pulling import pull_blocks

from kvferry.cluster.control_client import ControlClient
from kvferry.coordinator import control_server
from kvferry.coordinator.control_server import ControlServer
from kvferry.proto.errors import BadInputError, BusyError, ConfigError
from kvferry.proto.grpc_options import CHANNEL_OPTIONS, SERVER_OPTIONS
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import FIRST_GROUP, BlockId, Epoch, Incarnation
from kvferry.proto.messages import Command, Describe, Description, Locate, Located, Reply
from kvferry.proto.v1 import transfer_pb2 as pb
from kvferry.proto.v1 import transfer_pb2_grpc
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.frames import MAX_PAGE_BYTES, Header, Place
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.pull import BlockRun
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_server import SERVICE_NAME, TransferServer
from kvferry.worker.transfer_wire import FetchAsk, fetch_ask_to_proto, make_fetch_ask

MIB = 1 << 20


DESCRIPTION = Description(
    epoch=Epoch(1),
    scheme=make_scheme(hash_block_tokens=16),
    instances=(),
    num_leases=7,
    num_handoffs=0,
)


def is_serving(channel: grpc.Channel, service: str) -> bool:
    """Ask the health service, and give it a second."""
    # The stubs on PyPI do not know the health stub's methods.
    stub: Any = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


# -- B53: messages around the limits ---------------------------------------------------------------


@pytest.fixture(scope="module")
def echo() -> Iterator[Callable[[bytes], bytes]]:
    """A call over our settings of servers and channels whose answer is what was sent."""
    handler: grpc.RpcMethodHandler[bytes, bytes]
    handler = grpc.unary_unary_rpc_method_handler(lambda message, _: message)
    server = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/Echo")
        yield lambda message: call(message, timeout=20.0)
    server.stop(None).wait(5.0)


@pytest.mark.parametrize("num_bytes", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, MAX_PAGE_BYTES + MIB])
def test_b53_a_message_around_and_beyond_grpcs_own_limit_passes_both_ways(
    echo: Callable[[bytes], bytes], num_bytes: int
) -> None:
    content = np.random.default_rng(0).bytes(num_bytes)
    assert echo(content) == content


@contextmanager
def serving(worker: WorkerService, **limits: Any) -> Iterator[tuple[str, grpc.Channel]]:
    """A worker behind a front of its own: where it serves, and a channel to it."""
    server = TransferServer(worker, bind="127.0.0.1", insecure=False, **limits)
    try:
        with grpc.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
            yield server.address, channel
    finally:
        server.stop()
        worker.stop()


def new_plain_worker(num_blocks: int) -> WorkerService:
    """A worker that has all its blocks of 1 MiB, in four pages each."""
    memory = new_worker(1, num_blocks=num_blocks, num_layers=4, head_size=16384).memory
    worker = WorkerService(incarnation=Incarnation(1), memory=memory)
    fill(worker)
    return worker


def fetch(worker: WorkerService, channel: grpc.Channel, max_frame_bytes: int = 0) -> Any:
    """Begin to fetch all blocks."""
    hashes = [hash_of(index) for index in range(worker.memory.num_blocks - 1)]
    ask = make_fetch_ask(worker.identity, hashes, max_frame_bytes=max_frame_bytes)
    stub = transfer_pb2_grpc.TransferStub(channel)
    return stub.Fetch(fetch_ask_to_proto(ask), timeout=60.0)


@pytest.mark.parametrize(("max_frame_bytes", "largest"), [(0, 2 * MIB), (MIB // 4, MIB // 4)])
def test_b53_no_part_is_larger_than_was_asked_for(max_frame_bytes: int, largest: int) -> None:
    worker = new_plain_worker(num_blocks=4)
    with serving(worker) as (_, channel):
        header, *frames = fetch(worker, channel, max_frame_bytes)
        assert header.header.num_found == 3
        assert max(len(reply.frame.payload) for reply in frames) == largest
        found = b"".join(reply.frame.payload for reply in frames)
        assert found == b"".join(content_of(index, MIB) for index in range(3))


def test_b53_a_part_too_large_for_a_message_is_refused_by_the_sender_and_by_the_receiver() -> None:
    worker = new_plain_worker(num_blocks=2)
    worker.reserver = FirstBlocks()
    with serving(worker) as (_, channel):
        with pytest.raises(grpc.RpcError) as refused:
            list(fetch(worker, channel, MAX_PAGE_BYTES + 1))
        error = error_of_call(refused.value, "here")
        assert type(error) is BadInputError
        assert (error.given, error.allowed) == (MAX_PAGE_BYTES + 1, f"1 to {MAX_PAGE_BYTES} bytes")

        geometry = pb.Geometry(num_layers=1, page_bytes=MAX_PAGE_BYTES + 1, block_tokens=2)
        request = pb.StoreRequest(header=pb.StoreHeader(hash_bytes=32, geometry=geometry))
        with pytest.raises(grpc.RpcError) as refused:
            transfer_pb2_grpc.TransferStub(channel).Store(iter([request]), timeout=10.0)
        error = error_of_call(refused.value, "here")
        assert type(error) is ConfigError
        assert error.given == {"page_bytes": MAX_PAGE_BYTES + 1}


# -- B54: forks, few threads, long streams, a coordinator that hangs -------------------------------


FORKED = """
import os, sys, time
from kvferry.cluster.control_client import ControlClient
from kvferry.proto.messages import Describe
client = ControlClient(sys.argv[1], timeout_s=10.0)
assert client.call(Describe()).num_leases == 7
started = time.monotonic()
if os.fork() == 0:
    try:
        client.call(Describe())
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)
os.wait()
assert time.monotonic() - started < 5.0
assert client.call(Describe()).num_leases == 7
"""


def test_b54a_a_forked_child_that_calls_over_its_parents_channel_is_told_so_at_once() -> None:
    """kvferry forks nowhere; the parent goes on."""
    server = ControlServer(lambda _: DESCRIPTION, bind="127.0.0.1", port=0, insecure=False)
    told = subprocess.run(
        [sys.executable, "-c", FORKED, server.address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=30.0,
        check=True,
    ).stdout
    assert told.startswith("BadInputError: a connection does not survive a fork; connect in")
    server.stop()


class Meeting:
    """Whoever arrives waits until so many have."""

    def __init__(self, num_expected: int) -> None:
        self._missing = threading.Semaphore(num_expected - 1)
        self._complete = threading.Event()

    def arrive(self) -> None:
        if not self._missing.acquire(blocking=False):
            self._complete.set()
        assert self._complete.wait(20.0)


class Node(WorkerService):
    """Blocks 1 to 4 hold four hashes of its own, 5 to 8 are for those of the other one."""

    def __init__(self, number: int, meeting: Meeting) -> None:
        memory = new_worker(1, num_blocks=9, num_layers=2, head_size=64).memory
        super().__init__(incarnation=Incarnation(1), memory=memory)
        self.number = number
        self._meeting = meeting
        (self._group,) = memory.groups
        for block in range(1, 5):
            content = content_of(self.hash_index(block), self._group.geometry.block_bytes)
            scatter(self._group, [Place(BlockId(block), 0, 2)], content)
            self.written(FIRST_GROUP, [(hash_of(self.hash_index(block)), BlockId(block))])

    def hash_index(self, block: int) -> int:
        return 10 * self.number + block

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | OutgoingFrame]:
        self._meeting.arrive()
        return super().open_fetch(ask)

    def take(self, other: "Node", address: str, block: int) -> None:
        """Pull one block of the other, however often there is no place at first."""
        run = BlockRun(
            group_id=FIRST_GROUP,
            hashes=[hash_of(other.hash_index(block))],
            block_ids=[BlockId(4 + block)],
        )
        end = time.monotonic() + 10.0
        outcome = pull_blocks(self, address, [run], timeout_s=10.0)
        while outcome.error_type == BusyError.__name__ and time.monotonic() < end:
            outcome = pull_blocks(self, address, [run], timeout_s=10.0)
        assert outcome.error is None
        block_bytes = self._group.geometry.block_bytes
        found = gather(self._group, [Place(BlockId(4 + block), 0, 2)])
        assert found == content_of(other.hash_index(block), block_bytes)


def test_b54b_two_workers_with_two_places_each_serve_four_fetches_of_one_another() -> None:
    """No fetch waits for another one: a worker answers with what it has, and calls nobody."""
    all_places_taken = Meeting(4)
    nodes = [Node(number, all_places_taken) for number in (1, 2)]
    with (
        serving(nodes[0], max_transfers=2) as (first, _),
        serving(nodes[1], max_transfers=2) as (second, _),
        ThreadPoolExecutor(8) as threads,
    ):
        pulls = []
        for block in range(1, 5):
            pulls.append(threads.submit(nodes[0].take, nodes[1], second, block))
            pulls.append(threads.submit(nodes[1].take, nodes[0], first, block))
        for pull in pulls:
            pull.result(timeout=20.0)


def test_b54c_ten_long_streams_on_four_places_leave_a_second_for_the_health_check() -> None:
    worker = new_plain_worker(num_blocks=17)
    with serving(worker, max_transfers=4) as (_, channel):
        streams = [fetch(worker, channel) for _ in range(10)]
        assert is_serving(channel, SERVICE_NAME)
        codes = []
        for stream in streams:
            try:
                next(stream)
            except grpc.RpcError as refused:
                codes.append(cast("grpc.Call", refused).code())
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 6
        # Four are open now, and hold more than a connection does while nobody reads.
        assert is_serving(channel, SERVICE_NAME)
        stub = transfer_pb2_grpc.TransferStub(channel)
        assert stub.Describe(pb.DescribeRequest(), timeout=1.0).num_resident_blocks == 16
        for stream in streams:
            stream.cancel()


def test_b54d_a_call_that_hangs_in_the_coordinator_holds_up_neither_others_nor_health() -> None:
    over, hangs = threading.Event(), threading.Event()

    def call(command: Command) -> Reply:
        if isinstance(command, Describe):
            return DESCRIPTION
        hangs.set()
        over.wait(20.0)
        return Located(epoch=Epoch(1), holders=())

    server = ControlServer(call, bind="127.0.0.1", port=0, insecure=False)
    with (
        closing(ControlClient(server.address, timeout_s=30.0)) as client,
        grpc.insecure_channel(server.address) as channel,
        ThreadPoolExecutor(1) as threads,
    ):
        hanging = threads.submit(client.call, Locate(identity_digest=bytes(32), hashes=()))
        assert hangs.wait(10.0)
        assert is_serving(channel, control_server.SERVICE_NAME)
        assert client.call(Describe(), timeout_s=1.0) == DESCRIPTION
        assert not hanging.done()
        over.set()
        assert hanging.result(10.0) == Located(epoch=Epoch(1), holders=())
    server.stop()
