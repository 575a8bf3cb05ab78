"""Transfers between real processes over gRPC: right bytes, or a prefix and a reason, in time."""

import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from tests.integration.transfer_host import Host, new_host
from tests.integration.transfer_peer import hash_of
from tests.integration.transferring import assert_exactly_in_place, destination, here, pull, run_of

from kvferry.proto.errors import UnavailableError
from kvferry.proto.ids import FIRST_GROUP, Incarnation, LeaseId, pack_group
from kvferry.worker import part_pull
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.paths import Path
from kvferry.worker.pull import PullOutcome
from kvferry.worker.transfer_client import TransferClient

Paths = Sequence[Path]

by_every_path = pytest.mark.parametrize("paths", [(), ("bulk",)], ids=["grpc", "bulk"])


@pytest.fixture(scope="module")
def plain(host: Host) -> str:
    """Address of a worker that behaves and keeps its eight blocks."""
    return host.open()


@by_every_path
def test_all_blocks_arrive_with_equal_bytes_and_are_served_on(plain: str, paths: Paths) -> None:
    with here(paths=paths) as worker, here(paths=paths) as third:
        outcome = pull(worker, plain)
        assert outcome == PullOutcome(num_blocks_of_run=(8,), num_bytes=8 * 2 * 1024)
        assert_exactly_in_place(worker, 8)
        assert pull(third, worker.serve(), incarnation=50).num_blocks_of_run == (8,)
        assert_exactly_in_place(third, 8)
        assert worker.stats().of("pulled").num_bytes == 16384
        assert worker.stats().of("served").num_bytes == 16384


def test_what_a_destination_held_is_forgotten_even_when_nothing_arrives(plain: str) -> None:
    with here() as worker:
        old = hash_of(100)
        worker.written(FIRST_GROUP, [(old, destination(worker, 0))])
        assert pull(worker, plain, incarnation=7).num_blocks_of_run == (0,)
        assert worker.residency.find(pack_group(old, FIRST_GROUP)) is None


def test_a_worker_describes_itself(host: Host, plain: str) -> None:
    client = TransferClient()
    try:
        description = client.describe(plain, timeout_s=10.0)
    finally:
        client.close()
    assert (description.incarnation, description.pid) == (1, host.process.pid)
    assert description.num_resident_blocks == 8
    assert {
        group: geometry.block_bytes for group, geometry in description.geometry_of_group.items()
    } == {FIRST_GROUP: 2048}
    with here() as worker:
        assert description.identity == worker.identity


@by_every_path
def test_a_corrupt_frame_leaves_only_the_verified_prefix(host: Host, paths: Paths) -> None:
    source = host.open(behaviour="corrupt")
    with here(paths=paths) as worker:
        outcome = pull(worker, source)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((2,), "TransferError")
        assert outcome.error == "a frame's checksum is wrong"
        assert_exactly_in_place(worker, 2)
        assert worker.stats().num_checksum_failures == 1
        assert worker.stats().of("pulled").failures == {"TransferError": 1}


def test_a_source_killed_midway_leaves_the_verified_prefix_long_before_the_deadline() -> None:
    with (
        new_host() as doomed,
        here() as by_grpc,
        here(paths=("bulk",)) as by_bulk,
        ThreadPoolExecutor(2) as threads,
    ):
        source = doomed.open(behaviour="stall")
        killer = threading.Timer(1.0, doomed.process.send_signal, [signal.SIGKILL])
        killer.start()
        started = time.monotonic()
        outcomes = threads.map(lambda one: pull(one, source, timeout_s=30.0), (by_grpc, by_bulk))
        for worker, outcome in zip((by_grpc, by_bulk), outcomes, strict=True):
            assert (outcome.num_blocks_of_run, outcome.error_type) == ((2,), "UnavailableError")
            assert_exactly_in_place(worker, 2)
        assert time.monotonic() - started < 15.0
        killer.join()


@by_every_path
def test_a_source_that_stalls_is_left_at_the_deadline(host: Host, paths: Paths) -> None:
    source = host.open(behaviour="stall")
    with here(paths=paths) as worker:
        started = time.monotonic()
        outcome = pull(worker, source, timeout_s=1.5)
        assert 1.0 < time.monotonic() - started < 8.0
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((2,), "DeadlineError")
        assert_exactly_in_place(worker, 2)


@pytest.mark.parametrize("behaviour", ["plain", "stall"])
@by_every_path
def test_a_frozen_source_is_left_long_before_the_deadline(
    host: Host, behaviour: str, paths: Paths
) -> None:
    with ExitStack() as thaw, here(paths=paths) as worker:
        source = host.open(behaviour=behaviour)
        client = TransferClient(stall_s=1.0, paths=paths)
        thaw.callback(host.process.send_signal, signal.SIGCONT)
        freezer = threading.Timer(0.7, host.process.send_signal, [signal.SIGSTOP])
        thaw.callback(freezer.cancel)
        if behaviour == "plain":
            client.describe(source, timeout_s=10.0)
            host.process.send_signal(signal.SIGSTOP)
        else:
            freezer.start()
        started = time.monotonic()
        outcome = part_pull.pull_blocks(
            client,
            Peer(
                address=source,
                identity=worker.identity,
                layout=worker.memory.layout,
                rank=0,
                incarnation=Incarnation(1),
            ),
            run_of(worker, range(8)),
            memory=worker.memory,
            terms=FetchTerms(
                lease_id=LeaseId(""), end_s=time.monotonic() + 60.0, cancel=threading.Event()
            ),
        )
        assert 0.9 < time.monotonic() - started < 8.0
        assert outcome.num_in_place == (0 if behaviour == "plain" else 2)
        assert outcome.error_type == "DeadlineError"
        assert outcome.error == f"{source} sent nothing for too long; allowed: 1.0 s"
        client.close()


@by_every_path
def test_a_cancel_ends_a_pull_that_waits_and_closes_its_writer(host: Host, paths: Paths) -> None:
    source = host.open(behaviour="stall")
    with here(paths=paths) as worker:
        cancel = threading.Event()
        canceller = threading.Timer(0.5, cancel.set)
        canceller.start()
        started = time.monotonic()
        outcome = pull(worker, source, timeout_s=30.0, cancel=cancel)
        canceller.join()
        assert time.monotonic() - started < 8.0
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((2,), "Cancelled")
        assert_exactly_in_place(worker, 2)


def test_a_pull_cancelled_before_it_starts_calls_nobody() -> None:
    cancel = threading.Event()
    cancel.set()
    with here() as worker:
        outcome = pull(worker, "127.0.0.1:9", cancel=cancel)
        assert outcome == PullOutcome(
            num_blocks_of_run=(0,),
            num_bytes=0,
            error="the pull was cancelled",
            error_type="Cancelled",
        )


def test_a_deadline_that_has_passed_is_an_outcome() -> None:
    with here() as worker:
        assert pull(worker, "127.0.0.1:9", timeout_s=0.0).error_type == "DeadlineError"


@by_every_path
def test_a_bug_in_the_source_ends_the_pull_at_once_with_its_name(host: Host, paths: Paths) -> None:
    source = host.open(behaviour="broken")
    with here(paths=paths) as worker:
        outcome = pull(worker, source, timeout_s=20.0)
        assert outcome.num_blocks_of_run == (2,)
        assert outcome.error is not None
        assert "ZeroDivisionError: a bug in a handler" in outcome.error
        assert_exactly_in_place(worker, 2)


@by_every_path
def test_a_fetch_meant_for_an_earlier_life_is_refused_with_both(plain: str, paths: Paths) -> None:
    with here(paths=paths) as worker:
        outcome = pull(worker, plain, incarnation=7)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "StaleError")
        assert outcome.error is not None
        assert "given: 7; allowed: 1" in outcome.error


def test_another_identity_is_refused_naming_the_field(plain: str) -> None:
    with here(model="other") as worker:
        outcome = pull(worker, plain)
        assert outcome.error_type == "IdentityMismatchError"
        assert outcome.error is not None
        assert "given: model=other; allowed: model=tiny" in outcome.error


@by_every_path
def test_a_block_evicted_between_lookup_and_fetch_shortens_the_answer(
    host: Host, paths: Paths
) -> None:
    source = host.open()
    with here(paths=paths) as worker, here(paths=paths) as second:
        host.reuse(source, 3)
        outcome = pull(worker, source, indexes=range(3))
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((2,), "NotFoundError")
        assert_exactly_in_place(worker, 2)
        host.reuse(source, 1)
        assert pull(second, source, indexes=range(3)).num_blocks_of_run == (0,)
        assert_exactly_in_place(second, 0)


@by_every_path
def test_a_block_reused_during_the_fetch_ends_it_before_that_block(
    host: Host, paths: Paths
) -> None:
    source = host.open(behaviour="reuse")
    with here(paths=paths) as worker:
        outcome = pull(worker, source)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((3,), "NotFoundError")
        assert outcome.error is not None
        assert "hash_index=3" in outcome.error
        assert_exactly_in_place(worker, 3)


@by_every_path
def test_64_mib_arrive_in_one_pull(host: Host, paths: Paths) -> None:
    sizes = {"num_blocks": 65, "num_layers": 4, "head_size": 16384}
    source = host.open(**sizes)
    with here(paths=paths, **sizes) as worker:
        assert pull(worker, source) == PullOutcome(num_blocks_of_run=(64,), num_bytes=64 << 20)
        assert_exactly_in_place(worker, 64)


@by_every_path
def test_two_pulls_at_once_do_not_disturb_each_other(host: Host, paths: Paths) -> None:
    source = host.open(behaviour="slow")
    with here(paths=paths) as first, here(paths=paths) as second:
        outcomes: dict[str, PullOutcome] = {}
        other = threading.Thread(target=lambda: outcomes.update(second=pull(second, source)))
        other.start()
        outcomes["first"] = pull(first, source)
        other.join()
        for worker, name in ((first, "first"), (second, "second")):
            assert outcomes[name] == PullOutcome(num_blocks_of_run=(8,), num_bytes=16384)
            assert_exactly_in_place(worker, 8)


def test_a_peer_restarted_on_its_port_costs_one_refused_attempt(host: Host) -> None:
    with here() as by_grpc, here(paths=("bulk",)) as by_bulk:
        workers = (by_grpc, by_bulk)
        with new_host() as doomed:
            address = doomed.open()
            for worker in workers:
                assert pull(worker, address).num_blocks_of_run == (8,)
        for worker in workers:
            assert pull(worker, address, timeout_s=5.0).error_type == "UnavailableError"
        port = int(address.rsplit(":", 1)[1])
        assert host.open(incarnation=2, port=port, empty=True) == address
        for worker in workers:
            assert pull(worker, address).error_type == "StaleError"
            outcome = pull(worker, address, incarnation=2)
            assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "NotFoundError")


def test_nobody_at_the_address_is_an_outcome_for_pull_and_an_error_for_describe() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    client = TransferClient()
    with here() as worker:
        assert pull(worker, address, timeout_s=5.0).error_type == "UnavailableError"
    with pytest.raises(UnavailableError, match=address):
        client.describe(address, timeout_s=5.0)
    client.close()
