"""B45: much asked and written at once, of one coordinator, holds up nobody's small question.

Who asks much is a process of its own, and so is the coordinator. That a new member gets a bounded
share of the writes is a case of the simulator.
"""

import statistics
import time
from contextlib import closing
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import pytest
from tests.builders import make_identity, make_info

from kvferry.cluster.bench.peer_process import answer_of, running_process
from kvferry.cluster.control_client import ControlClient
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import BlockHash, Epoch, Incarnation, InstanceId
from kvferry.proto.messages import (
    Describe,
    Description,
    EndReservation,
    Heard,
    Heartbeat,
    Locate,
    Located,
    RegisterInstance,
    Reserve,
    Reserved,
    expect,
)

IDENTITY = make_identity()
NUM_ENTRIES, NUM_MANY, NUM_FEW = 100_000, 20_000, 10
NUM_BLOCKS = {InstanceId("asked"): NUM_ENTRIES, InstanceId("written"): NUM_MANY}
"""One store keeps what is looked up, every write to the other evicts all that it holds."""

NUM_ASKED = 1_000
BOUND_S = 0.050
TIMEOUT_S = 20.0


def serve(to_test: Connection) -> None:
    """Be the coordinator of both stores until the other end of the pipe says a word."""
    scheme = make_scheme(hash_block_tokens=4)
    coordinator = CoordinatorActor(scheme=scheme, registry=ProcessRegistry())
    coordinator.start()
    for name, num_blocks in NUM_BLOCKS.items():
        info = make_info(
            name, role="store", identity=IDENTITY, num_blocks=num_blocks + 1, max_model_len=0
        )
        coordinator.call(RegisterInstance(call_id=f"register {name}", info=info))
    front = ControlServer(coordinator.call, bind="127.0.0.1", port=0, insecure=False)
    to_test.send(front.address)
    to_test.recv()
    front.stop()
    coordinator.stop()


def ask_and_write_much(to_test: Connection, address: str) -> None:
    """Look up many and evict many, each again and again, until a word comes; then say how often."""
    with (
        closing(ControlClient(address, TIMEOUT_S)) as asking,
        closing(CoordinatorClient(address)) as writing,
    ):
        done = False
        counts = {"asked": 0, "written": 0}

        def ask() -> None:
            while not done:
                asking.ask(locate(NUM_MANY), Located)
                counts["asked"] += 1

        def write() -> None:
            while not done:
                counts["written"] += 1
                store(writing, "written", first=counts["written"] * NUM_ENTRIES)

        threads = [Thread(target=ask), Thread(target=write)]
        for thread in threads:
            thread.start()
        to_test.send("begun")
        to_test.recv()
        done = True
        for thread in threads:
            thread.join()
        to_test.send(counts)


def hashes(first: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(32, "big")) for number in range(first, first + count))


def locate(count: int) -> Locate:
    return Locate(identity_digest=IDENTITY.digest(), hashes=hashes(0, count))


def life_of(name: str) -> dict[str, Any]:
    return {
        "epoch": Epoch(1),
        "instance_id": InstanceId(name),
        "incarnation": Incarnation(1),
    }


def store(writing: CoordinatorClient, name: str, *, first: int) -> None:
    call_id = f"store {first}"
    reserve = Reserve(call_id=call_id, hashes=hashes(first, NUM_MANY), **life_of(name))
    reserved = expect(writing.call(reserve, timeout_s=TIMEOUT_S), Reserved)
    end = EndReservation(
        call_id=f"end {call_id}",
        reservation_id=reserved.reservation_id,
        num_written=NUM_MANY,
        **life_of(name),
    )
    writing.call(end, timeout_s=TIMEOUT_S)


def ninety_ninth_s(asking: ControlClient, beating: CoordinatorClient) -> float:
    """How long all but one of a hundred small lookups take at most, with heartbeats between."""
    took_s = []
    for number in range(NUM_ASKED):
        if number % 100 == 0:
            for name in NUM_BLOCKS:
                expect(beating.call(Heartbeat(**life_of(name)), timeout_s=TIMEOUT_S), Heard)
        began_s = time.perf_counter()
        asking.ask(locate(NUM_FEW), Located)
        took_s.append(time.perf_counter() - began_s)
    return statistics.quantiles(took_s, n=100)[98]


@pytest.mark.timeout(120)
def test_b45_lookups_and_evictions_of_20000_hold_up_no_small_lookup_and_no_heartbeat() -> None:
    with (
        running_process(serve) as coordinator,
        closing(ControlClient(address := answer_of(coordinator), TIMEOUT_S)) as asking,
        closing(CoordinatorClient(address)) as stores,
    ):
        for first in range(0, NUM_ENTRIES, NUM_MANY):
            store(stores, "asked", first=first)
        idle_s = ninety_ninth_s(asking, stores)
        with running_process(ask_and_write_much, address) as much:
            assert answer_of(much) == "begun"
            loaded_s = ninety_ninth_s(asking, stores)
            much.send("end")
            counts = answer_of(much)
        print(f"p99 {idle_s * 1e3:.2f} ms idle, {loaded_s * 1e3:.2f} ms beside {counts}")
        assert counts["asked"] > 5
        assert counts["written"] > 5
        assert loaded_s < BOUND_S
        described = asking.ask(Describe(), Description).instances
        assert {one.info.instance_id: one.state for one in described} == dict.fromkeys(
            NUM_BLOCKS, "live"
        )
        assert {one.info.instance_id: one.num_cached_blocks for one in described} == NUM_BLOCKS
        coordinator.send("end")
