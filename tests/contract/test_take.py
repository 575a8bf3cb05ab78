"""A store fetches blocks by itself, from the ranks of an engine of any layout."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from tests.arenas import arenas_work
from tests.contract.exchange import SHAPE
from tests.contract.taking_store import STAGE, STORE, TakingStore, taking_store
from tests.tampering import Messages, corrupted

from kvferry.proto.errors import (
    BadInputError,
    BusyError,
    ConfigError,
    DeadlineError,
    IdentityMismatchError,
    KvferryError,
    MismatchError,
    StaleError,
    TransferError,
    UnavailableError,
)
from kvferry.proto.ids import FIRST_GROUP, BlockHash, GroupId, Incarnation
from kvferry.proto.layout import Layout, grid, vllm
from kvferry.proto.v1 import transfer_pb2, transfer_pb2_grpc
from kvferry.worker import chunks
from kvferry.worker.frames import Frame
from kvferry.worker.paths import ALL_PATHS, Path
from kvferry.worker.service import WorkerService
from kvferry.worker.take_wire import make_take_ask, take_ask_to_proto
from kvferry.worker.transfer_server import TransferServer

CUT = grid(block_tokens=16, tp=2, stage_layers=STAGE)
LAYOUTS = {
    "one rank": STORE,
    "another memory order": replace(STORE, memory="LBHNS"),
    "tp 2": CUT,
    "tp 4": vllm(block_tokens=16, tp=4, stage_layers=STAGE),
    "tp 8, heads twice": vllm(block_tokens=16, tp=8, stage_layers=STAGE),
    "tp 2, dcp 2": vllm(block_tokens=8, tp=2, dcp=2, stage_layers=STAGE),
    "tp 4, dcp 2, interleaved": vllm(block_tokens=8, tp=4, dcp=2, interleave=4, stage_layers=STAGE),
    "pcp 2, dcp 2": vllm(block_tokens=4, tp=2, pcp=2, dcp=2, profile="0.17", stage_layers=STAGE),
    "tp 2, pp 2": vllm(block_tokens=16, tp=2, pp=2, stage_layers=(1, 3)),
}


@pytest.mark.parametrize("first_block", [0, 3])
@pytest.mark.parametrize("source", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_blocks_of_any_layout_are_whole_and_findable_at_the_store(
    source: Layout, first_block: int
) -> None:
    with taking_store(source, first_block=first_block) as store:
        assert store.take() == 5
        store.assert_holds([1, 2, 3, 4, 5])
        assert store.worker.stats().num_blocks_pulled == 5


@pytest.mark.parametrize("path", ALL_PATHS)
def test_the_bytes_come_by_whichever_path_there_is(path: Path) -> None:
    if path == "shm" and not arenas_work():
        pytest.skip("this system has no sealed memory without names")
    with taking_store(CUT, paths=[path]) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvferry.worker.bulk_server.MIN_BULK_BYTES", 1)
        assert store.take() == 5
        store.assert_holds([1, 2, 3, 4, 5])
        assert store.worker.stats().transfers["pulled", path].num_started == 2


def test_what_is_here_already_is_not_fetched_again() -> None:
    with taking_store(CUT, first_block=2) as store:
        assert store.take(1, 3) == 2
        once = store.worker.stats().of("pulled").num_bytes
        assert store.take() == 5
        # The first block went into the third of the store, the last two into the next.
        store.assert_holds([3, 1, 2, 4, 5])
        assert store.worker.stats().of("pulled").num_bytes == 5 * once // 2
        num_fetches = store.worker.stats().of("pulled").num_started
        assert store.take() == 5
        assert store.worker.stats().of("pulled").num_started == num_fetches


def test_a_hash_that_is_asked_for_twice_is_taken_once() -> None:
    with taking_store(STORE) as store:
        store.chain = (store.chain[0], store.chain[0])
        assert store.take() == 2
        store.chain = store.exchange.chain
        store.assert_holds([1])


@pytest.mark.parametrize("source", [STORE, CUT], ids=["one rank", "tp 2"])
def test_what_the_source_does_not_hold_is_no_error_but_a_shorter_prefix(source: Layout) -> None:
    with taking_store(source) as store, pytest.MonkeyPatch.context() as patch:
        # A chunk of a rank's two heads is a block then.
        patch.setattr(chunks, "CHUNK_PAGE_BYTES", 16 * 2 * 2 * 8)
        store.exchange.lose(store.exchange.source.num_ranks - 1, 2)
        assert store.take() == 2
        store.assert_holds([1, 2], only=False)
        assert store.worker.stats().of("taken").failures == {}
        # Nor is nothing at all.
        assert store.take(2) == 0
        store.assert_holds([1, 2], only=False)


def test_a_block_that_leaves_its_place_while_it_is_read_ends_the_prefix() -> None:
    def lose(_: WorkerService, messages: Messages) -> Messages:
        yield next(messages)
        store.exchange.lose(0, 3)
        yield from messages

    with taking_store(STORE) as store:
        store.exchange.senders[0].tamper = lose
        assert store.take() == 3
        store.assert_holds([1, 2, 3])


def test_what_came_whole_before_a_corrupt_frame_is_kept() -> None:
    def corrupt(_: WorkerService, messages: Messages) -> Messages:
        for number, message in enumerate(messages):
            yield corrupted(message) if isinstance(message, Frame) and number else message

    with taking_store(STORE) as store:
        assert store.take(0, 2) == 2
        store.exchange.senders[0].tamper = corrupt
        with pytest.raises(TransferError, match="the source of a take: "):
            store.take()
        store.assert_holds([1, 2], only=False)
        assert store.worker.stats().of("taken").failures == {"TransferError": 1}
        assert store.worker.stats().num_checksum_failures == 1


def refused(store: TakingStore, kind: type[KvferryError], match: str, **changes: object) -> None:
    """The store refuses to take from its source, changed like this, and takes nothing."""
    source = replace(store.source, **changes)  # type: ignore[arg-type]
    with pytest.raises(kind, match=match):
        store.take(source=source)
    store.assert_holds([])
    assert store.worker.stats().of("taken").failures == {kind.__name__: 1}


def test_a_source_in_another_life_is_not_taken_from() -> None:
    with taking_store(CUT) as store:
        refused(store, StaleError, "in another life", incarnation=Incarnation(2))


def test_a_source_that_is_gone_is_told() -> None:
    with taking_store(CUT) as store:
        store.exchange.senders[1].stop()
        with pytest.raises(UnavailableError, match=store.exchange.addresses[1]):
            store.take()
        store.assert_holds([], only=False)


def test_ranks_in_another_order_are_not_taken_from() -> None:
    with taking_store(CUT) as store:
        swapped = tuple(reversed(store.exchange.addresses))
        refused(store, MismatchError, "another rank", rank_addresses=swapped)


def test_a_source_must_tell_all_its_ranks() -> None:
    with taking_store(CUT) as store:
        addresses = tuple(store.exchange.addresses[:1])
        refused(store, BadInputError, "address of each of its ranks", rank_addresses=addresses)


def test_blocks_of_another_size_are_refused() -> None:
    with taking_store(CUT) as store:
        larger = replace(CUT, block_tokens=32)
        refused(store, MismatchError, "virtual_block_tokens=32", layout=larger)


def test_a_layout_that_cannot_hold_the_model_is_refused() -> None:
    with taking_store(CUT) as store:
        three = replace(CUT, tp=3)
        addresses = (*store.exchange.addresses, "127.0.0.1:1")
        refused(store, ConfigError, "head shards", layout=three, rank_addresses=addresses)


def test_a_caller_of_another_identity_is_refused_and_the_difference_is_named() -> None:
    with taking_store(STORE) as store:
        other = replace(store.identity, weight_version="2")
        with pytest.raises(IdentityMismatchError, match="weight_version"):
            store.take(identity=other)
        store.assert_holds([])


def test_a_source_of_another_identity_is_refused_and_the_difference_is_named() -> None:
    with taking_store(STORE, theirs=replace(SHAPE, head_size=4)) as store:
        refused(store, IdentityMismatchError, "head_size")


def test_a_group_that_there_is_not_is_refused() -> None:
    with taking_store(STORE) as store, pytest.raises(BadInputError, match="group"):
        store.take(group_id=1)


def test_a_worker_that_is_no_store_takes_nothing() -> None:
    with taking_store(STORE) as store:
        store.address = store.exchange.addresses[0]
        with pytest.raises(MismatchError, match="takes no stores"):
            store.take()


def test_without_room_nothing_is_fetched() -> None:
    with taking_store(STORE) as store:
        assert store.worker.reserver is not None
        others = [BlockHash(bytes([number]) * 32) for number in range(4)]
        reserved = store.worker.reserver.reserve(FIRST_GROUP, others)
        with pytest.raises(BusyError, match="no room"):
            store.take()
        store.worker.reserver.end(reserved.reservation_id, 0)
        store.assert_holds([])
        assert store.worker.stats().of("pulled").num_started == 0
        assert store.take() == 5


def test_a_take_needs_a_deadline() -> None:
    with taking_store(STORE) as store, grpc.insecure_channel(store.address) as channel:
        with pytest.raises(grpc.RpcError) as error:
            transfer_pb2_grpc.TransferStub(channel).Take(request_of(store))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class Silence:
    """Lets the last rank of a source send its header, and then nothing until `over`."""

    def __init__(self, store: TakingStore) -> None:
        self.begun, self.over = threading.Event(), threading.Event()
        store.exchange.senders[-1].tamper = self._send

    def _send(self, _: WorkerService, messages: Messages) -> Messages:
        yield next(messages)
        self.begun.set()
        self.over.wait(20.0)
        yield from messages


def test_beyond_the_places_for_transfers_a_take_is_refused_at_once() -> None:
    with taking_store(STORE) as store, ThreadPoolExecutor(1) as thread:
        server = TransferServer(store.worker, bind="127.0.0.1", insecure=False, max_transfers=1)
        store.address = server.address
        silence = Silence(store)
        first = thread.submit(store.take)
        assert silence.begun.wait(10.0)
        with pytest.raises(BusyError, match="no more transfers at once"):
            store.take()
        silence.over.set()
        assert first.result(10.0) == 5
        assert store.take() == 5
        server.stop()


@pytest.mark.parametrize("source", [STORE, CUT], ids=["one rank", "tp 2"])
def test_a_take_from_a_silent_source_ends_at_its_deadline_and_gives_its_blocks_back(
    source: Layout,
) -> None:
    with taking_store(source) as store:
        silence = Silence(store)
        with pytest.raises(DeadlineError):
            store.take(timeout_s=0.5)
        assert store.has_ended.wait(10.0)
        store.assert_holds([], only=False)
        silence.over.set()
        store.exchange.senders[-1].tamper = None
        assert store.take() == 5
        # What holds nothing is given out again first, and the last of it before the others.
        store.assert_holds([5, 4, 3, 2, 1])


def test_a_take_whose_caller_leaves_ends_and_gives_its_blocks_back() -> None:
    with taking_store(CUT) as store, grpc.insecure_channel(store.address) as channel:
        silence = Silence(store)
        call = transfer_pb2_grpc.TransferStub(channel).Take.future(request_of(store), timeout=60.0)
        assert silence.begun.wait(10.0)
        assert store.status().held.reserved_blocks == 5
        call.cancel()
        assert store.has_ended.wait(10.0)
        silence.over.set()
        store.assert_holds([], only=False)


def test_what_is_taken_while_the_identity_is_reset_is_not_kept() -> None:
    with taking_store(STORE) as store, ThreadPoolExecutor(1) as thread:
        silence = Silence(store)
        taking = thread.submit(store.take)
        assert silence.begun.wait(10.0)
        store.reset()
        silence.over.set()
        with pytest.raises(StaleError, match="was reset"):
            taking.result(10.0)
        assert (store.num_findable(store.chain), store.status().num_cached_blocks) == (0, 0)
        store.assert_nothing_is_kept()
        assert store.take() == 5
        store.assert_holds([5, 4, 3, 2, 1])


def request_of(store: TakingStore) -> transfer_pb2.TakeRequest:
    """What the client sends for all blocks."""
    return take_ask_to_proto(
        make_take_ask(
            store.identity,
            store.chain,
            group_id=GroupId(FIRST_GROUP),
            first_block=0,
            source=store.source,
        )
    )
