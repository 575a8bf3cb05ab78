"""A coordinator with its fronts, in one life after another: it is found where it was."""

import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from socket import create_server

import pytest
from tests.builders import make_info

from kvferry.cluster import coordinator_process
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.coordinator_process import CoordinatorProcess, FrontAddresses, FrontSettings
from kvferry.cluster.kv_events_publisher import PublisherSettings
from kvferry.cluster.record import FRONTS, ProcessRecord, Record
from kvferry.proto.errors import PortTakenError, UnavailableError
from kvferry.proto.hashing import make_scheme
from kvferry.proto.messages import (
    Describe,
    Description,
    KvEventsPlace,
    Registered,
    RegisterInstance,
    expect,
)

SCHEME = make_scheme(hash_block_tokens=4)
ALL_FRONTS = FrontSettings(metrics_port=0, kv_events=PublisherSettings())
Live = Callable[..., CoordinatorProcess]


@pytest.fixture
def live() -> Iterator[Live]:
    """Make a life of a coordinator; all end with the test."""
    lives: list[CoordinatorProcess] = []

    def live(record: Record, fronts: FrontSettings = ALL_FRONTS) -> CoordinatorProcess:
        one = CoordinatorProcess(
            record=record, fronts=fronts, reach_host=lambda: "10.0.0.9", scheme=SCHEME
        )
        lives.append(one)
        return one

    yield live
    for one in lives:
        one.stop()


def port(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


def three_free_ports() -> int:
    """The first of three in a row, below those that the system chooses."""
    for base in range(20_000, 30_000, 3):
        with suppress(OSError), ExitStack() as held:
            for number in (base, base + 1, base + 2):
                held.enter_context(create_server(("127.0.0.1", number)))
            return base
    raise AssertionError("no three free ports")


def register(life: CoordinatorProcess, name: str) -> Registered:
    info = make_info(name, scheme=SCHEME, block_tokens=4)
    return expect(life.call(RegisterInstance(call_id=name, info=info)), Registered)


def places(life: CoordinatorProcess) -> dict[str, KvEventsPlace | None]:
    described = expect(life.call(Describe()), Description)
    return {one.info.instance_id: one.kv_events for one in described.instances}


def test_the_next_life_listens_at_the_same_ports_and_tells_events_at_the_same_endpoints(
    live: Live,
) -> None:
    record = ProcessRecord()
    first = live(record)
    before = first.start()
    assert first.start() is before
    for name in ("a", "b"):
        register(first, name)
    told = places(first)
    first.stop()

    second = live(record)
    assert second.start() == before
    with urllib.request.urlopen(f"http://{before.metrics}/metrics", timeout=10) as page:
        assert b"kvferry_coordinator_epoch" in page.read()
    for name in ("b", "a"):
        register(second, name)
    assert places(second) == told


def test_endpoints_of_a_fixed_port_stay_with_their_instances(live: Live) -> None:
    base = three_free_ports()
    events = PublisherSettings(endpoint=f"tcp://127.0.0.1:{base}", bind=True, replay_endpoint=None)
    record = ProcessRecord()
    for names in (("a", "b"), ("c", "b")):
        life = live(record, FrontSettings(kv_events=events))
        life.start()
        for name in names:
            register(life, name)
        told = {name: port(one.endpoint) - base for name, one in places(life).items() if one}
        life.stop()
    assert told == {"c": 2, "b": 1}


def test_a_port_that_was_taken_meanwhile_is_left_to_its_new_owner(live: Live) -> None:
    record = ProcessRecord()
    first = live(record)
    before = first.start()
    first.stop()
    with create_server(("127.0.0.1", port(before.control))):
        after = live(record).start()
    assert after.control != before.control
    assert record.read(FRONTS)["control"] == after.control
    assert after.metrics == before.metrics


def test_a_port_of_the_settings_is_waited_for(live: Live) -> None:
    with create_server(("127.0.0.1", 0)) as taken:
        settings = FrontSettings(port=taken.getsockname()[1])
        life = live(ProcessRecord(), settings)
        with pytest.raises(PortTakenError):
            life.start()
        with pytest.raises(UnavailableError, match="not running"):
            life.call(Describe())
    assert life.start() == FrontAddresses(control=f"127.0.0.1:{settings.port}", metrics=None)


def test_a_front_on_every_interface_is_reached_at_the_machines_own_address(live: Live) -> None:
    life = live(ProcessRecord(), FrontSettings(bind="0.0.0.0", insecure=True, metrics_port=0))
    addresses = life.start()
    assert addresses.control.startswith("10.0.0.9:")
    assert str(addresses.metrics).startswith("10.0.0.9:")


def test_a_stopped_one_does_not_start(live: Live) -> None:
    life = live(ProcessRecord())
    life.stop()
    with pytest.raises(UnavailableError, match="was stopped"):
        life.start()


def test_a_life_stops_when_a_later_one_has_begun_elsewhere(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_process, "CHECK_LIFE_S", 0.01)
    record = ProcessRecord()
    paused, later = live(record), live(record)
    before, after = paused.start(), later.start()
    assert before.control != after.control
    client = CoordinatorClient(before.control, None, lambda: record.read(FRONTS)["control"])
    end_s = time.monotonic() + 10.0
    while is_running(paused):
        assert time.monotonic() < end_s
        time.sleep(0.005)
    assert is_running(later)
    info = make_info("a", scheme=SCHEME, block_tokens=4)
    with pytest.raises(UnavailableError):
        client.call(RegisterInstance(call_id="r", info=info), timeout_s=5)
    client.call(RegisterInstance(call_id="r", info=info), timeout_s=5)
    assert list(places(later)) == ["a"]
    client.close()


def is_running(life: CoordinatorProcess) -> bool:
    try:
        life.call(Describe())
    except UnavailableError:
        return False
    return True


def test_a_client_follows_the_front_to_another_address(live: Live) -> None:
    record = ProcessRecord()
    first = live(record)
    client = CoordinatorClient(first.start().control, None, lambda: record.read(FRONTS)["control"])
    info = make_info("a", scheme=SCHEME, block_tokens=4)
    command = RegisterInstance(call_id="r", info=info)
    epoch = expect(client.call(command, timeout_s=5), Registered).epoch
    old_port = port(first.start().control)
    first.stop()
    with create_server(("127.0.0.1", old_port)) as taken:
        live(record).start()
        taken.close()
        with pytest.raises(UnavailableError):
            client.call(command, timeout_s=5)
        again = expect(client.call(command, timeout_s=5), Registered)
    assert again.epoch == epoch + 1
    client.close()
