"""Damaged messages over real connections: gRPC calls, bulk sockets, and a server that lies."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random

import grpc
import psutil
import pytest
from tests.fuzz.mutating import altered, damaged, disordered
from tests.fuzz.server_targets import HASHES, NUM_BLOCKS, SIZES, fetch_asks, store_messages
from tests.integration.transfer_peer import FirstBlocks, PeerService, fill, new_worker
from tests.integration.transferring import here, pull

from kvferry.proto.errors import InvariantError
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker import bulk_server
from kvferry.worker.bulk_wire import TICKET_BYTES
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.transfer_client import FETCH_METHOD, STORE_METHOD
from kvferry.worker.transfer_wire import fetch_ask_to_proto

# Their threads are made when needed, up to the size of the pool, and stay.
POOLS = ("kvferry-transfer", "kvferry-bulk_", "ThreadPool")


def call_at_random(channel: grpc.Channel, worker: PeerService, seed: str) -> None:
    """Fetch or store with damaged messages; what refuses them is no bug of the worker."""
    random = Random(seed)
    if random.random() < 0.5:
        ask = altered(random, fetch_ask_to_proto(random.choice(fetch_asks(worker))))
        method, messages = FETCH_METHOD, [ask if random.random() < 0.3 else damaged(random, ask)]
    else:
        method, messages = STORE_METHOD, disordered(random, store_messages(worker))
        messages = [damaged(random, one) if random.random() < 0.2 else one for one in messages]
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
    try:
        running = call(iter(messages), timeout=20.0)
        for reply in running:
            if (
                method == FETCH_METHOD
                and transfer_pb2.FetchReply.FromString(reply).header.bulk.ticket
            ):
                running.cancel()
    except grpc.RpcError as failed:
        error = error_of_call(failed, "here")
        assert not isinstance(error, InvariantError), f"{seed!r}: {error}"


def knock_at_random(port: int, seed: str) -> None:
    """Show no ticket at the bulk port, or what is none, and leave."""
    random = Random(seed)
    with socket.create_connection(("127.0.0.1", port)) as connection, suppress(OSError):
        connection.sendall(random.randbytes(random.choice((0, 1, TICKET_BYTES, 1000))))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def run_all(num_calls: int, num_knocks: int) -> None:
    worker = new_worker(1, **SIZES, paths=("bulk",))
    worker.reserver = FirstBlocks()
    address = worker.serve()
    server = worker._server
    assert server is not None
    assert server._bulk is not None
    bulk_port = server._bulk.port
    this = psutil.Process()

    def held() -> tuple[int, int, int]:
        waiting = 0 if server._bulk is None else len(server._bulk._waiting)
        names = [thread.name for thread in threading.enumerate()]
        return this.num_fds(), sum(not name.startswith(POOLS) for name in names), waiting

    try:
        with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(8) as threads:
            for number in range(-300, num_calls):
                if number == 0:
                    list(threads.map(lambda n: knock_at_random(bulk_port, f"w {n}"), range(64)))
                    before = held()
                call_at_random(channel, worker, f"call {number}")
            list(threads.map(lambda n: knock_at_random(bulk_port, f"knock {n}"), range(num_knocks)))
            end_s = time.monotonic() + 10.0
            while held() != before:
                assert time.monotonic() < end_s, (held(), before)
                time.sleep(0.02)
        worker.reused(range(1, NUM_BLOCKS + 1))  # type: ignore[arg-type]
        fill(worker)
        with here(**SIZES, paths=("bulk",)) as taker:
            assert pull(taker, address).num_blocks_of_run == (len(HASHES),)
    finally:
        worker.stop()


@pytest.fixture(autouse=True)
def _bulk_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)


def test_damaged_calls_and_knocks_over_real_connections_leave_nothing_behind() -> None:
    run_all(300, 200)


@pytest.mark.long
def test_thousands_of_damaged_calls_and_knocks_leave_nothing_behind() -> None:
    run_all(5_000, 2_000)
