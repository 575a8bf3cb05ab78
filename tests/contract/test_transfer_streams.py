"""What peers that neither read, nor send, nor end can do to a worker's front: nothing for long."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.integration.transfer_peer import PeerService, fill, hash_of, new_worker
from tests.waiting import wait_until

from kvferry.proto.errors import BadInputError, BusyError, KvferryError
from kvferry.proto.grpc_status import MAX_CALL_S
from kvferry.proto.ids import BlockHash, BlockId, GroupId, LeaseId
from kvferry.proto.v1 import transfer_pb2, transfer_pb2_grpc
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.reservations import Reservation
from kvferry.worker.transfer_server import SERVICE_NAME, TransferServer
from kvferry.worker.transfer_wire import (
    encode_store_header,
    fetch_ask_to_proto,
    make_fetch_ask,
    make_store_ask,
)

NUM_BLOCKS = 17
MAX_TRANSFERS = 2


class CountingReserver:
    """Blocks 1, 2, 3 ..., and what became of each reservation."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.reserved = threading.Event()

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        self.reserved.set()
        block_ids = [BlockId(i) for i in range(1, len(hashes) + 1)]
        return Reservation(reservation_id=LeaseId("r1"), block_ids=block_ids)

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        self.ended.append(num_written)


class Front:
    """A worker of 16 blocks of 1 MiB, more than a connection holds unread, and a client of it."""

    def __init__(self, worker: PeerService, channel: grpc.Channel) -> None:
        self.worker = worker
        self.reserver = CountingReserver()
        worker.reserver = self.reserver
        self.channel = channel
        self.stub = transfer_pb2_grpc.TransferStub(channel)
        # The stubs on PyPI do not know the health stub's methods.
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    def fetch(self, num_hashes: int = NUM_BLOCKS - 1, timeout_s: float = 60.0) -> Any:
        hashes = [hash_of(index) for index in range(num_hashes)]
        request = fetch_ask_to_proto(make_fetch_ask(self.worker.identity, hashes))
        return self.stub.Fetch(request, timeout=timeout_s)

    def fetch_one_block(self) -> int:
        """Return the number of messages that came."""
        return sum(1 for _ in self.fetch(1))

    def begin_store(self, rest: Iterator[bytes]) -> Any:
        """Announce two blocks and send what `rest` yields."""
        hashes = [hash_of(100), hash_of(101)]
        ask = make_store_ask(self.worker.identity, hashes, self.worker.memory.groups[0].geometry)
        send: grpc.StreamUnaryMultiCallable[bytes, transfer_pb2.StoreReply]
        send = self.channel.stream_unary(
            f"/{SERVICE_NAME}/Store",
            response_deserializer=transfer_pb2.StoreReply.FromString,
        )
        return send.future(itertools.chain([encode_store_header(ask)], rest), timeout=60.0)


@contextmanager
def front(stall_s: float) -> Iterator[Front]:
    worker = new_worker(1, num_blocks=NUM_BLOCKS, num_layers=4, head_size=16384)
    fill(worker)
    server = TransferServer(
        worker, bind="127.0.0.1", insecure=False, max_transfers=MAX_TRANSFERS, stall_s=stall_s
    )
    try:
        with grpc.insecure_channel(server.address) as channel:
            yield Front(worker, channel)
    finally:
        server.stop()
        worker.stop()


def error_of(call: Callable[[], object]) -> KvferryError:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return error_of_call(refused.value, "here")


def idle(until: threading.Event) -> Iterator[bytes]:
    until.wait(60.0)
    yield from ()


def test_transfers_over_the_limit_are_refused_at_once_and_the_rest_goes_on() -> None:
    with front(stall_s=60.0) as here:
        unread = [here.fetch() for _ in range(MAX_TRANSFERS)]
        wait_until(lambda: here.worker.stats().of("served").num_started == MAX_TRANSFERS, 10.0)

        started = time.monotonic()
        for _ in range(10):
            error = error_of(here.fetch_one_block)
            assert type(error) is BusyError
            assert error.allowed == MAX_TRANSFERS
        assert type(error_of(here.begin_store(iter(())).result)) is BusyError
        assert here.stub.Describe(transfer_pb2.DescribeRequest(), timeout=10.0).incarnation == 1
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        assert here.health.Check(request, timeout=10.0).status == (
            health_pb2.HealthCheckResponse.SERVING
        )
        assert time.monotonic() - started < 5.0
        assert here.reserver.ended == []

        for call in unread:
            call.cancel()
        wait_until(lambda: error_free(here.fetch_one_block), 10.0)


def error_free(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def test_readers_that_do_not_read_give_their_places_back() -> None:
    with front(stall_s=0.5) as here:
        unread = [here.fetch() for _ in range(MAX_TRANSFERS)]
        wait_until(lambda: here.worker.stats().of("served").num_started == MAX_TRANSFERS, 10.0)
        wait_until(lambda: error_free(here.fetch_one_block), 10.0)
        # The first to be ended made room; the last follows soon.
        time.sleep(1.0)
        assert [error_free(partial(list, call)) for call in unread] == [False] * MAX_TRANSFERS
        assert here.fetch_one_block() == 2


def test_a_reader_that_is_slow_but_reads_gets_everything() -> None:
    with front(stall_s=2.0) as here:
        num_messages = 0
        for _ in here.fetch():
            num_messages += 1
            time.sleep(0.2)
        assert num_messages == NUM_BLOCKS


def test_stores_that_send_nothing_give_their_places_and_blocks_back() -> None:
    with front(stall_s=0.5) as here:
        leave = threading.Event()
        calls = [here.begin_store(idle(leave)) for _ in range(MAX_TRANSFERS)]
        wait_until(lambda: here.reserver.ended == [0] * MAX_TRANSFERS, 10.0)
        wait_until(lambda: error_free(here.fetch_one_block), 10.0)
        assert all(isinstance(call.exception(), grpc.RpcError) for call in calls)
        leave.set()


def test_a_client_that_cancels_a_store_is_no_failure_of_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with front(stall_s=60.0) as here:
        leave = threading.Event()
        call = here.begin_store(idle(leave))
        assert here.reserver.reserved.wait(10.0)
        time.sleep(0.2)
        call.cancel()
        wait_until(lambda: here.reserver.ended == [0], 10.0)
        leave.set()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_deadline_that_would_hold_a_place_for_weeks_is_refused_with_the_longest_one() -> None:
    with front(stall_s=60.0) as here:
        for call in (
            lambda: list(here.fetch(1, timeout_s=30 * 86_400.0)),
            lambda: here.stub.Describe(transfer_pb2.DescribeRequest(), timeout=MAX_CALL_S + 60.0),
        ):
            error = error_of(call)
            assert type(error) is BadInputError
            assert error.message == "a call with a deadline too far away"
            assert error.allowed == "up to 300.0 s"
        assert len(list(here.fetch(1, timeout_s=MAX_CALL_S))) == 2


@pytest.mark.parametrize("method", ["Describe", "Fetch", "Store"])
def test_bytes_that_are_no_message_are_the_callers_fault(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with front(stall_s=60.0) as here:
        call: grpc.StreamStreamMultiCallable[bytes, bytes]
        call = here.channel.stream_stream(f"/{SERVICE_NAME}/{method}")
        error = error_of(lambda: list(call(iter([b"\xff\xff"]), timeout=10.0)))
    assert type(error) is BadInputError
    assert error.message == f"not a {method}Request"
    assert caplog.records == []
