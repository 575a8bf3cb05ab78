"""A store is drained: the store of another node pulls what it held, and its node lets it go."""

import json
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from tests.builders import make_identity
from tests.waiting import wait_until

from kvferry.cluster import cli, store_watch
from kvferry.cluster.client import Ferry, connect
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.coordinator_process import CoordinatorProcess, FrontSettings
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_client import NodeClient
from kvferry.cluster.node_config import NodeConfig
from kvferry.cluster.record import ProcessRecord
from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import expect

BLOCK_TOKENS = 4
SCHEME = make_scheme(hash_block_tokens=BLOCK_TOKENS)
IDENTITY = make_identity(num_layers=2)
BLOCK_BYTES = IDENTITY.block_bytes(BLOCK_TOKENS)
PROMPTS = [[100 * number + i for i in range(3 * BLOCK_TOKENS)] for number in range(3)]


class Nodes:
    """A coordinator and two nodes, one after the other attached by an engine."""

    def __init__(self) -> None:
        self.coordinator = CoordinatorProcess(
            record=ProcessRecord(),
            fronts=FrontSettings(),
            reach_host=lambda: "127.0.0.1",
            scheme=SCHEME,
            check_invariants=True,
        )
        self.control = self.coordinator.start().control
        self.nodes: list[StoreNode] = []

    def add(self) -> InstanceId:
        """Start a node, and return the name of its store."""
        config = NodeConfig(
            host=f"127.0.0.{1 + len(self.nodes)}",
            coordinator=self.control,
            store_bytes=20 * BLOCK_BYTES,
            port=0,
        )
        node = StoreNode(config)
        self.nodes.append(node)
        with closing(NodeClient(node.start())) as engine:
            return engine.attach(IDENTITY, timeout_s=10.0).instance_id

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
        self.coordinator.stop()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(store_watch, "WATCH_S", 0.02)
    made = Nodes()
    yield made
    made.stop()


@pytest.fixture
def ferry(service: Nodes) -> Iterator[Ferry]:
    with connect(service.control, timeout_s=5.0) as connected:
        yield connected


def layers_of(value: float) -> list[torch.Tensor]:
    return [torch.full((2, 3 * BLOCK_TOKENS, 1, 8), value) for _ in range(2)]


def kvferry(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command; return its exit code and what it printed on stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_command_shows_progress_and_prints_what_moved_where(
    service: Nodes, ferry: Ferry, capsys: pytest.CaptureFixture[str]
) -> None:
    first = service.add()
    ferry.model(IDENTITY).store(PROMPTS[0], layers_of(1.0))
    second = service.add()
    code, out, err = kvferry(capsys, "drain", first, "--address", service.control, "--json")
    assert code == 0
    told = json.loads(out)
    assert told.pop("seconds") < 10.0
    assert told.pop("incarnation") > 0
    assert told == {
        "instance": first,
        "cached_blocks": 3,
        "moved_blocks": 3,
        "moved_bytes": 3 * BLOCK_BYTES,
        "moved": [{"instance": second, "blocks": 3, "bytes": 3 * BLOCK_BYTES}],
        "elsewhere_blocks": 0,
        "dropped_blocks": 0,
        "ended_requests": 0,
    }
    assert "blocks moved" in err
    code, out, _ = kvferry(capsys, "drain", second, "--address", service.control)
    assert (code, out.splitlines()[1:]) == (
        0,
        [
            "0 blocks (0 bytes) moved",
            "0 blocks were held by a peer, too",
            "3 blocks dropped, 0 requests cut off",
        ],
    )
    assert out.startswith(f"{second} is drained, in ")


@pytest.mark.parametrize(
    ("words", "kind"),
    [(("nobody",), "NotFoundError"), (("nobody", "--deadline", "0"), "BadInputError")],
)
def test_the_command_says_why_it_cannot(
    service: Nodes, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], kind: str
) -> None:
    code, out, _ = kvferry(capsys, "drain", *words, "--address", service.control, "--json")
    assert (code > 0, json.loads(out)["error"]["type"]) == (True, kind)


def test_what_a_drained_store_held_is_fetched_from_another_and_its_node_has_it_no_more(
    service: Nodes, ferry: Ferry
) -> None:
    first = service.add()
    for value, prompt in enumerate(PROMPTS):
        assert ferry.model(IDENTITY).store(prompt, layers_of(float(value))) == 12
    second = service.add()
    with closing(CoordinatorClient(service.control)) as operator:

        def drained() -> Drained:
            command = Drain(instance_id=first, deadline_s=60.0)
            return expect(operator.call(command, timeout_s=5.0), Drained)

        wait_until(lambda: drained().is_over, 10.0)
        over = drained()
    assert [(one.instance_id, one.num_blocks) for one in over.moved] == [(second, 9)]
    assert (over.num_dropped, over.moved[0].num_bytes) == (0, 9 * BLOCK_BYTES)
    for value, prompt in enumerate(PROMPTS):
        into = layers_of(9.0)
        assert ferry.model(IDENTITY).fetch(prompt, into) == 12
        assert all(bool((layer == value).all()) for layer in into)
    wait_until(lambda: service.nodes[0]._stores == {}, 10.0)
    # Who attaches again gets a new, empty one.
    with closing(NodeClient(service.nodes[0].front_address())) as engine:
        assert engine.attach(IDENTITY, timeout_s=10.0).instance_id == first
    assert {one.state for one in ferry.describe().instances} == {"live"}
