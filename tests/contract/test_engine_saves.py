"""The order of what a worker half reads, overwrites and reports, with its thread held at will."""

import threading
from collections.abc import Iterator

import pytest
from tests.contract.engine_ranks import (
    IDENTITY,
    NUM_BLOCKS,
    Service,
    StandIn,
    prompt,
    running_engine,
    running_service,
)

from kvferry.cluster.connectors import saver
from kvferry.cluster.connectors.orders import EngineBlocks, HeldPrefix, LoadOrder, SaveOrder
from kvferry.cluster.connectors.orders import StepOrders as Orders
from kvferry.cluster.connectors.rank_link import RankLink
from kvferry.proto.errors import UnavailableError
from kvferry.proto.ids import BlockHash
from kvferry.proto.layout import vllm
from kvferry.worker.transfer_client import TransferClient

NUM_TOKENS = 64
HASHES, DENSE = prompt(NUM_TOKENS)
OTHER_HASHES, OTHER_DENSE = prompt(NUM_TOKENS, seed=1)
TIMEOUT_S = 20.0


class Gate:
    """Holds whoever reads the engine's blocks until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        put = RankLink.put

        def held(
            link: RankLink, hashes: list[BlockHash], first_block: int, blocks: EngineBlocks
        ) -> None:
            self.entered.set()
            assert self.opened.wait(TIMEOUT_S)
            put(link, hashes, first_block, blocks)

        patch.setattr(RankLink, "put", held)


@pytest.fixture
def service() -> Iterator[Service]:
    with running_service() as service:
        yield service


@pytest.fixture
def engine(service: Service) -> Iterator[StandIn]:
    with running_engine(service, vllm(block_tokens=32), name="a") as engine:
        yield engine


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, engine: StandIn) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def save(engine: StandIn, name: str, hashes: tuple[BlockHash, ...], *ids: int) -> Orders:
    order = SaveOrder(
        request_id=name, first_block=0, hashes=hashes, blocks=EngineBlocks(first=0, ids=ids)
    )
    return Orders(
        saves=(order,),
        held=frozenset({name}),
        engine=engine.source,
        store_address=engine.store.store_address,
    )


def reported(engine: StandIn, num: int) -> set[str]:
    """Return the requests whose blocks are read, once there are so many."""
    half, found = engine.ranks[0].half, set[str]()
    for _ in range(int(TIMEOUT_S / 0.02)):
        found |= half.finished(Orders(is_idle=True))[0]
        if len(found) == num:
            return found
    raise AssertionError(found)


def test_a_block_that_is_handed_out_anew_before_it_was_read_is_not_saved(
    service: Service, engine: StandIn, gate: Gate
) -> None:
    half = engine.ranks[0].half
    engine.fill(DENSE, EngineBlocks(first=0, ids=(3, 4)))
    engine.fill(OTHER_DENSE, EngineBlocks(first=0, ids=(5, 6)))
    half.end(save(engine, "a", HASHES, 3, 4))
    assert gate.entered.wait(TIMEOUT_S)
    half.end(save(engine, "b", OTHER_HASHES, 5, 6))
    # The first is being read, the second is not: it is let go at once.
    half.begin(Orders(overwritten=frozenset({6})))
    engine.fill(DENSE, EngineBlocks(first=0, ids=(5, 6)))
    gate.opened.set()
    assert reported(engine, 2) == {"a", "b"}
    service.wait_stored(HASHES)
    assert set(service.holders(OTHER_HASHES).values()) == {0}
    assert half.counts()["failed_save_blocks"] == 0


def test_a_step_waits_until_the_blocks_it_overwrites_are_read(
    service: Service, engine: StandIn, gate: Gate
) -> None:
    half = engine.ranks[0].half
    engine.fill(DENSE, EngineBlocks(first=0, ids=(3, 4)))
    half.end(save(engine, "a", HASHES, 3, 4))
    assert gate.entered.wait(TIMEOUT_S)
    begun = threading.Event()

    def step() -> None:
        half.begin(Orders(overwritten=frozenset({4})))
        begun.set()

    thread = threading.Thread(target=step)
    thread.start()
    half.begin(Orders(overwritten=frozenset(range(5, NUM_BLOCKS))))
    assert not begun.is_set()
    gate.opened.set()
    thread.join(TIMEOUT_S)
    assert begun.is_set()
    assert reported(engine, 1) == {"a"}


def test_the_engines_device_is_waited_for_before_blocks_are_read_and_before_they_are_filled(
    service: Service, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = engine.ranks[0].half
    is_done = threading.Event()
    monkeypatch.setattr(RankLink, "queued", lambda link: lambda: is_done.wait(TIMEOUT_S))
    half.end(save(engine, "a", HASHES, 3, 4))
    assert half.finished(Orders(is_idle=True)) == (set(), set())
    engine.fill(DENSE, EngineBlocks(first=0, ids=(3, 4)))
    is_done.set()
    service.wait_stored(HASHES)
    is_done.clear()
    load = LoadOrder(
        request_id="b",
        first_block=0,
        end_block=4,
        chain=HASHES,
        blocks=EngineBlocks(first=0, ids=(7, 8)),
        holders=(service.holder(HASHES),),
    )
    half.start_loads(Orders(loads=(load,)))
    assert half.finished(Orders(is_idle=True))[1] == set()
    engine.fill(OTHER_DENSE, EngineBlocks(first=0, ids=(7, 8)))
    is_done.set()
    found = [half.finished(Orders(is_idle=True))[1] for _ in range(100)]
    assert [one for one in found if one] == [{"b"}]
    assert half.failed_blocks() == set()
    assert engine.holds(DENSE, EngineBlocks(first=0, ids=(7, 8)), NUM_TOKENS)


def test_after_a_reset_nothing_that_waited_is_saved(
    service: Service, engine: StandIn, gate: Gate
) -> None:
    half = engine.ranks[0].half
    half.end(save(engine, "a", HASHES, 3, 4))
    assert gate.entered.wait(TIMEOUT_S)
    half.end(save(engine, "b", OTHER_HASHES, 5, 6))
    thread = threading.Thread(target=half.begin, args=[Orders(is_reset=True)])
    thread.start()
    gate.opened.set()
    thread.join(TIMEOUT_S)
    assert reported(engine, 2) == {"a", "b"}
    assert set(service.holders(HASHES).values()) == {0}
    assert set(service.holders(OTHER_HASHES).values()) == {0}


def test_what_a_store_took_between_a_reset_and_the_step_that_tells_of_it_is_forgotten(
    service: Service, engine: StandIn
) -> None:
    half = engine.ranks[0].half
    engine.store.reset(IDENTITY)
    half.end(save(engine, "a", HASHES, 3, 4))
    service.wait_stored(HASHES)
    half.begin(Orders(is_reset=True))
    half.end(save(engine, "b", OTHER_HASHES, 5, 6))
    service.wait_stored(OTHER_HASHES)
    assert set(service.holders(HASHES).values()) == {0}


def test_without_a_store_nothing_is_saved_and_the_blocks_are_given_back(engine: StandIn) -> None:
    half = engine.ranks[0].half
    half.end(Orders(held=frozenset({"a"}), engine=engine.source))
    assert reported(engine, 1) == {"a"}


def test_saves_wait_behind_a_store_that_hangs_for_a_while_only_and_so_does_the_engines_end(
    engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = engine.ranks[0].half
    entered, opened, is_over = threading.Event(), threading.Event(), threading.Event()

    def take(*_: object, **__: object) -> int:
        entered.set()
        opened.wait(TIMEOUT_S)
        is_over.set()
        raise UnavailableError("the store hangs")

    monkeypatch.setattr(TransferClient, "take", take)
    monkeypatch.setattr(saver, "PATIENCE_S", 0.1)
    half.end(save(engine, "a", HASHES, 3, 4))
    assert entered.wait(TIMEOUT_S)
    half.end(save(engine, "b", OTHER_HASHES, 5, 6))
    assert reported(engine, 2) == {"a", "b"}
    half.stop()
    assert not is_over.is_set()
    opened.set()


def test_a_store_that_is_gone_costs_the_save_and_nothing_else(
    service: Service, engine: StandIn
) -> None:
    half = engine.ranks[0].half
    service.node.stop()
    half.end(save(engine, "a", HASHES, 3, 4))
    assert reported(engine, 1) == {"a"}
    engine.close()
    assert half.counts()["saved_blocks"] == 0
    assert half.counts()["failed_save_blocks"] == 4


def test_what_has_waited_too_long_is_not_saved_and_its_blocks_are_given_back(
    service: Service, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = engine.ranks[0].half
    monkeypatch.setattr(saver, "SAVE_FOR_S", -1.0)
    half.end(save(engine, "a", HASHES, 3, 4))
    assert reported(engine, 1) == {"a"}
    engine.close()
    assert half.counts()["failed_save_blocks"] == 4
    assert set(service.holders(HASHES).values()) == {0}


def test_a_cancelled_load_is_reported_once_and_its_blocks_as_failed(
    service: Service, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = engine.ranks[0].half
    engine.fill(DENSE, EngineBlocks(first=0, ids=(3, 4)))
    half.end(save(engine, "a", HASHES, 3, 4))
    service.wait_stored(HASHES)
    entered, opened = threading.Event(), threading.Event()
    pull = RankLink.pull

    def held(*args: object, **settings: object) -> object:
        entered.set()
        assert opened.wait(TIMEOUT_S)
        return pull(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(RankLink, "pull", held)
    holder: HeldPrefix = service.holder(HASHES)
    load = LoadOrder(
        request_id="b",
        first_block=0,
        end_block=4,
        chain=HASHES,
        blocks=EngineBlocks(first=0, ids=(7, 8)),
        holders=(holder,),
    )
    half.start_loads(Orders(loads=(load,)))
    assert entered.wait(TIMEOUT_S)
    half.start_loads(Orders(cancelled=frozenset({"b", "unknown"})))
    opened.set()
    found = [half.finished(Orders(is_idle=True))[1] for _ in range(100)]
    assert [one for one in found if one] == [{"b"}]
    assert half.failed_blocks() == {7, 8}
    assert half.failed_blocks() == set()
