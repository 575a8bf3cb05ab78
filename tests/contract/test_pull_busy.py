"""Pulls from a source that serves no more transfers at once, over gRPC."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from tests.contract.exchange import SHAPE, Exchange, exchanging

from kvferry.proto.ids import InstanceId, LeaseId
from kvferry.proto.layout import Layout, grid
from kvferry.proto.step_messages import Source
from kvferry.worker.busy_source import Pauses
from kvferry.worker.frames import Frame, Header
from kvferry.worker.layout_pull import pull_loads
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.pull import PullOutcome
from kvferry.worker.take_wire import TakeAsk
from kvferry.worker.transfer_client import TransferClient
from kvferry.worker.transfer_server import TransferServer
from kvferry.worker.transfer_wire import FetchAsk, StoreAsk, WorkerDescription

STAGE = (SHAPE.num_layers,)
LAYOUTS = [
    (grid(block_tokens=4, stage_layers=STAGE), grid(block_tokens=4, stage_layers=STAGE)),
    (grid(block_tokens=4, tp=2, stage_layers=STAGE), grid(block_tokens=6, stage_layers=STAGE)),
]
each_layout = pytest.mark.parametrize(("source", "destination"), LAYOUTS, ids=["same", "other"])


class Occupied:
    """The last rank of a source behind a server with one place, which a first fetch keeps."""

    def __init__(self, exchange: Exchange) -> None:
        self._service = exchange.senders[-1]
        self.counter = self._service.counter
        self._entered = threading.Event()
        self._free = threading.Event()
        self._server = TransferServer(self, bind="127.0.0.1", insecure=False, max_transfers=1)
        exchange.addresses[-1] = self._server.address
        self._first = threading.Thread(
            target=pull, args=(exchange, whole, threading.Event()), daemon=True
        )
        self._first.start()
        assert self._entered.wait(10.0)

    def describe(self) -> WorkerDescription:
        return self._service.describe()

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | OutgoingFrame]:
        self._entered.set()
        assert self._free.wait(10.0)
        yield from self._service.open_fetch(ask)

    def accept_store(self, parts: Iterator[StoreAsk | Frame]) -> int:
        return self._service.accept_store(parts)

    def accept_take(self, ask: TakeAsk, *, timeout_s: float, cancel: threading.Event) -> int:
        return self._service.accept_take(ask, timeout_s=timeout_s, cancel=cancel)

    def leave(self) -> None:
        """Let the first fetch end, and give its place back."""
        self._free.set()
        self._first.join(10.0)

    def stop(self) -> None:
        self.leave()
        self._server.stop()


def whole(pause_s: float) -> float:
    return pause_s


def pull(
    exchange: Exchange, jitter: Callable[[float], float], cancel: threading.Event
) -> PullOutcome:
    with closing(TransferClient(paths=())) as client:
        return pull_loads(
            client,
            exchange.takers[0].memory,
            Source(
                instance_id=InstanceId("source"),
                incarnation=exchange.senders[0].incarnation,
                layout=exchange.source,
                rank_addresses=tuple(exchange.addresses),
            ),
            [exchange.load(0, exchange.num_blocks)],
            lease_id=LeaseId("lease-1"),
            timeout_s=20.0,
            cancel=cancel,
            pauses=Pauses(count=100, jitter=jitter),
        )


@contextmanager
def occupied(source: Layout, destination: Layout) -> Iterator[tuple[Exchange, Occupied]]:
    with exchanging(source, destination, num_blocks=3) as exchange:
        first = Occupied(exchange)
        try:
            yield exchange, first
        finally:
            first.stop()


@each_layout
def test_a_pull_goes_on_when_a_place_is_free_again(source: Layout, destination: Layout) -> None:
    with occupied(source, destination) as (exchange, first):
        pauses: list[float] = []

        def free_before_the_third(pause_s: float) -> float:
            pauses.append(pause_s)
            if len(pauses) == 3:
                first.leave()
            # The place comes back a moment after the first fetch has ended.
            return 0.01

        outcome = pull(exchange, free_before_the_third, threading.Event())
        assert (outcome.error, outcome.num_blocks_of_run) == (None, (3,))
        assert outcome.num_bytes == exchange.plan.num_bytes
        assert pauses[:3] == [0.02, 0.04, 0.08]


@each_layout
def test_a_pull_from_a_source_that_stays_busy_says_so(source: Layout, destination: Layout) -> None:
    with occupied(source, destination) as (exchange, _):
        outcome = pull(exchange, lambda _: 0.0, threading.Event())
        assert (outcome.error_type, outcome.num_blocks_of_run) == ("BusyError", (0,))


@each_layout
def test_a_cancel_ends_the_pause(source: Layout, destination: Layout) -> None:
    with occupied(source, destination) as (exchange, _):
        cancel = threading.Event()

        def cancelled_meanwhile(_: float) -> float:
            cancel.set()
            return 15.0

        outcome = pull(exchange, cancelled_meanwhile, cancel)
        assert (outcome.error_type, outcome.num_blocks_of_run) == ("Cancelled", (0,))
