"""The HTTP server of metrics: where it may listen, what it answers, what it leaves."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPResponse

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from tests.builders import make_info

from kvferry.cluster.metrics import metrics_server
from kvferry.cluster.metrics.coordinator_front import coordinator_front
from kvferry.cluster.metrics.metrics_server import MetricsServer, metrics_page
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.errors import (
    ConfigError,
    InsecureBindError,
    PortTakenError,
    UnavailableError,
)
from kvferry.proto.hashing import make_scheme
from kvferry.proto.messages import RegisterInstance

Serve = Callable[..., MetricsServer]


def answer() -> Iterator[Metric]:
    yield GaugeMetricFamily("kvferry_answer", "Of everything", value=42)


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[MetricsServer] = []

    def start(read: Callable[[], Iterator[Metric]] = answer, **changes: object) -> MetricsServer:
        settings = {"bind": "127.0.0.1", "insecure": False} | changes
        started.append(MetricsServer({"/metrics": metrics_page(read)}, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for server in started:
        server.stop()


def get(address: str, path: str = "/metrics") -> HTTPResponse:
    response: HTTPResponse = urllib.request.urlopen(f"http://{address}{path}", timeout=5.0)
    return response


def test_it_serves_what_is_read_at_each_scrape_beside_the_process_itself(serve: Serve) -> None:
    numbers = iter(range(10))

    def count() -> Iterator[Metric]:
        yield GaugeMetricFamily("kvferry_count", "Of scrapes", value=next(numbers))

    address = serve(count).address
    for number in (1, 2):  # it was read once for the names
        with get(address) as response:
            lines = response.read().decode().splitlines()
        assert f"kvferry_count {number}.0" in lines
        assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert response.headers["Content-Type"].startswith("text/plain; version=")


def test_another_path_is_not_found_and_the_right_one_is_named(serve: Serve) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused, get(serve().address, "/other"):
        pass
    with refused.value as response:
        assert (response.code, response.read()) == (404, b"there is /metrics\n")


def test_what_cannot_be_read_now_is_unavailable(serve: Serve) -> None:
    running = [True]

    def read() -> Iterator[Metric]:
        if not running[0]:
            raise UnavailableError("the coordinator is not running")
        return answer()

    address = serve(read).address
    running[0] = False
    with pytest.raises(urllib.error.HTTPError) as refused, get(address):
        pass
    with refused.value as response:
        assert (response.code, response.read()) == (503, b"the coordinator is not running\n")


def test_a_stopped_server_leaves_neither_thread_nor_port(serve: Serve) -> None:
    before = threading.active_count()
    server = serve()
    get(server.address).close()
    server.stop()
    server.stop()
    assert threading.active_count() == before
    port = int(server.address.rpartition(":")[2])
    assert serve(port=port).address == server.address


def test_a_client_that_stalls_is_hung_up_on_and_the_next_one_served(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.2)
    server = serve()
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as stalled:
        stalled.sendall(b"GET /metrics HT")
        assert get(server.address).status == 200
        assert stalled.recv(1) == b""


def test_a_taken_port_is_refused_by_number(serve: Serve) -> None:
    port = int(serve().address.rpartition(":")[2])
    with pytest.raises(PortTakenError, match=f"given: 127.0.0.1:{port};"):
        serve(port=port)


def test_a_bind_beyond_loopback_is_refused_without_insecure(serve: Serve) -> None:
    with pytest.raises(InsecureBindError, match=r"given: 0\.0\.0\.0"):
        serve(bind="0.0.0.0")
    assert serve(bind="0.0.0.0", insecure=True).address.startswith("0.0.0.0:")


def test_an_address_of_another_machine_is_refused(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"given: 192\.0\.2\.1"):
        serve(bind="192.0.2.1", insecure=True)


def test_the_coordinator_tells_of_itself_and_where_all_others_are() -> None:
    actor = CoordinatorActor(scheme=make_scheme(hash_block_tokens=4), registry=ProcessRegistry())
    actor.start()
    front = coordinator_front(actor.call, bind="127.0.0.1", port=0, insecure=False)
    try:
        info = make_info(rank_metrics=("127.0.0.1:9001",))
        actor.call(RegisterInstance(call_id="register", info=info))
        with get(front.address) as response:
            lines = response.read().decode().splitlines()
        assert 'kvferry_free_blocks{instance_id="decode-0",role="decode"} 9.0' in lines
        with get(front.address, "/targets") as response:
            found = json.load(response)
        assert response.headers["Content-Type"] == "application/json"
        assert [one["targets"] for one in found] == [[front.address], ["127.0.0.1:9001"]]
    finally:
        actor.stop()
        front.stop()
