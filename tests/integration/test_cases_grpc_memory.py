"""B53: memory of both ends while much more than a message is moved, either way or to a slow reader.

Both ends are processes of their own; the bound is stated here and does not depend on the size.
"""

import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from tests.builders import make_identity
from tests.integration.bulk_peer import MIB, NUM_LAYERS, TIMEOUT_S, BulkPeer
from tests.integration.transfer_peer import content_of, hash_of

from kvferry.proto.grpc_options import CHANNEL_OPTIONS
from kvferry.proto.v1 import transfer_pb2_grpc
from kvferry.worker.transfer_wire import fetch_ask_to_proto, make_fetch_ask

BOUND_BYTES = 64 * MIB
"""Parts of 1 MiB on their way, what the connection holds, and what first calls need once: more
threads, each with an arena of its own, where the machine is busy."""

IDENTITY = make_identity(num_layers=NUM_LAYERS, head_size=16384)


@pytest.fixture(scope="module")
def sender() -> Iterator[BulkPeer]:
    with BulkPeer(96, full=True) as peer:
        yield peer


@pytest.fixture(scope="module")
def taker(sender: BulkPeer) -> Iterator[BulkPeer]:
    """Starts while the sender does."""
    with BulkPeer(96, full=False) as peer:
        yield peer


def require_moved_within_the_bound(sender: BulkPeer, taker: BulkPeer, num_mib: int) -> None:
    for asked, command in ((taker, f"pull {sender.address}"), (sender, f"store {taker.address}")):
        assert asked.ask(command) == str(num_mib)
        assert max(sender.grown_bytes(), taker.grown_bytes()) < BOUND_BYTES
        assert taker.ask("check") == "True"
        taker.ask("wipe")


def require_sent_within_the_bound(
    sender: BulkPeer, num_mib: int, pace: Callable[[int], None]
) -> None:
    """Read all blocks, at a pace given by what to do after so many parts."""
    request = fetch_ask_to_proto(make_fetch_ask(IDENTITY, [hash_of(i) for i in range(num_mib)]))
    sent_before = int(sender.ask("sent"))
    with grpc.insecure_channel(sender.address, options=CHANNEL_OPTIONS) as channel:
        replies = transfer_pb2_grpc.TransferStub(channel).Fetch(request, timeout=TIMEOUT_S)
        assert next(replies).header.num_found == num_mib
        for number in range(num_mib):
            assert next(replies).frame.payload == content_of(number, MIB)
            pace(1 + number)
            num_ahead = int(sender.ask("sent")) - sent_before - (1 + number) * MIB
            assert num_ahead < BOUND_BYTES
        assert list(replies) == []
    assert sender.grown_bytes() < BOUND_BYTES


def test_b53_both_ends_stay_within_the_bound_whatever_is_fetched_or_pushed(
    sender: BulkPeer, taker: BulkPeer
) -> None:
    require_moved_within_the_bound(sender, taker, 96)


def test_b53_a_reader_that_is_slow_holds_up_the_sender_and_fills_nobodys_memory(
    sender: BulkPeer,
) -> None:
    def wait_until_the_sender_is_held_up(num_read: int) -> None:
        """For the first 20 parts: by then it has sent all that the connection takes unread."""
        sent = ""
        while num_read <= 20 and sent != (sent := sender.ask("sent")):
            time.sleep(0.02)

    require_sent_within_the_bound(sender, 96, wait_until_the_sender_is_held_up)


@pytest.mark.long
def test_b53_a_gibibyte_moves_both_ways_within_the_bound_and_to_a_slow_reader() -> None:
    with BulkPeer(1024, full=True) as sender:
        with BulkPeer(1024, full=False) as taker:
            require_moved_within_the_bound(sender, taker, 1024)
        require_sent_within_the_bound(sender, 1024, lambda _: time.sleep(0.1))
