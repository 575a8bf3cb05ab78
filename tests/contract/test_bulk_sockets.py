"""Bulk sockets that lead elsewhere, are held by others, or fail for a while: the pull goes on."""

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from tests.integration import transferring
from tests.integration.transfer_peer import PeerService, hash_of
from tests.integration.transferring import assert_exactly_in_place, pull
from tests.pulling import pull_blocks

from kvferry.proto.ids import FIRST_GROUP, BlockId
from kvferry.worker import bulk_connection, bulk_server, transfer_client
from kvferry.worker.bulk_listener import BulkListener
from kvferry.worker.bulk_wire import receive_frames
from kvferry.worker.pull import BlockRun


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PeerService, PeerService, str]]:
    """A source, one that pulls from it by bulk sockets, and the source's address."""
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    with transferring.pair(["bulk"]) as both:
        yield both


def paths_of(worker: PeerService) -> dict[str, int]:
    """How many whole pulls went by each path."""
    transfers = worker.stats().transfers
    return {
        path: counts.num_started - sum(counts.failures.values())
        for (direction, path), counts in transfers.items()
        if direction == "pulled" and counts.num_started
    }


def listener_of(source: PeerService) -> BulkListener:
    assert source._server is not None
    assert source._server._bulk is not None
    return source._server._bulk


@contextmanager
def elsewhere(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """A port at which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as open_ones:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = open_ones.enter_context(listener.accept()[0])
                    answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def echo(connection: socket.socket) -> None:
    connection.sendall(connection.recv(16))


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: connection.close(),
        lambda _: None,
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        echo,
    ],
    ids=["closes", "is silent", "says something else", "repeats the ticket"],
)
def test_a_port_that_leads_elsewhere_is_told_and_grpc_carries_all(
    pair: tuple[PeerService, PeerService, str],
    answer: Callable[[socket.socket], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, taker, address = pair
    monkeypatch.setattr(bulk_connection, "CONNECT_TIMEOUT_S", 0.5)
    with elsewhere(answer) as port:
        monkeypatch.setattr(listener_of(source), "port", port)
        with caplog.at_level(logging.WARNING, "kvferry.worker.unusable_paths"):
            assert pull(taker, address).num_blocks_of_run == (8,)
    assert_exactly_in_place(taker, 8)
    assert paths_of(taker) == {"bulk": 0, "grpc": 1}
    (line,) = [one.getMessage() for one in caplog.records if "unusable" in one.name]
    assert f"{address} cannot be reached by bulk for 60 s: port {port}" in line


def test_a_port_that_says_nothing_does_not_outlast_the_deadline(
    pair: tuple[PeerService, PeerService, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, taker, address = pair
    with elsewhere(lambda _: None) as port:
        monkeypatch.setattr(listener_of(source), "port", port)
        started = time.monotonic()
        assert pull(taker, address, timeout_s=0.5).error_type == "DeadlineError"
        assert time.monotonic() - started < 1.5


def test_a_listener_that_could_not_accept_goes_on(
    pair: tuple[PeerService, PeerService, str], caplog: pytest.LogCaptureFixture
) -> None:
    source, taker, address = pair
    accepting = listener_of(source)._accepting
    real = accepting._listener

    class OutOfDescriptors:
        def accept(self) -> Any:
            accepting._listener = real
            raise OSError(errno.EMFILE, "Too many open files")

    accepting._listener = OutOfDescriptors()  # type: ignore[assignment]
    # The thread still waits in the real one's accept: this wakes it.
    with socket.create_connection(("127.0.0.1", listener_of(source).port)):
        pass
    assert pull(taker, address).num_blocks_of_run == (8,)
    assert pull(taker, address).num_blocks_of_run == (8,)
    assert paths_of(taker) == {"bulk": 2}
    assert "could not accept a connection" in caplog.text


def test_those_who_say_nothing_cost_a_pull_no_more_than_the_bulk_path(
    pair: tuple[PeerService, PeerService, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, taker, address = pair
    port = listener_of(source).port
    with ExitStack() as idle:
        for _ in range(64):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert pull(taker, address).num_blocks_of_run == (8,)
    assert_exactly_in_place(taker, 8)
    assert sum(paths_of(taker).values()) == 1


def test_a_stream_that_has_been_stopped_stops_what_is_opened_afterwards(
    pair: tuple[PeerService, PeerService, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, taker, address = pair
    cancel = threading.Event()
    frozen = threading.Event()

    def after_the_watch(*arguments: Any) -> None:
        # Cancelled just before the socket is told to the watch; then nothing ever comes.
        frozen.set()
        receive_frames(*arguments)

    connect = bulk_connection._connect

    def slowly(*arguments: Any) -> socket.socket:
        cancel.set()
        time.sleep(0.2)
        return connect(*arguments)

    monkeypatch.setattr(bulk_connection, "_connect", slowly)
    monkeypatch.setattr(transfer_client, "receive_frames", after_the_watch)
    run = BlockRun(group_id=FIRST_GROUP, hashes=[hash_of(0)], block_ids=[BlockId(1)])
    started = time.monotonic()
    outcome = pull_blocks(taker, address, [run], cancel=cancel)
    assert outcome.error_type == "Cancelled"
    assert time.monotonic() - started < 5.0
    assert not frozen.is_set()
