"""Loads of whole blocks straight out of a store's memory into an engine's, past the staging."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.arenas import needs_arenas
from tests.contract.engine_ranks import (
    ORDERS,
    Service,
    StandIn,
    prompt,
    running_engine,
    running_service,
)

from kvferry.cluster.connectors.orders import EngineBlocks
from kvferry.cluster.connectors.paged_tensors import PagedTensors
from kvferry.cluster.connectors.rank_link import RankLink
from kvferry.proto.ids import BlockId
from kvferry.proto.layout import vllm
from kvferry.worker.frames import Header
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.service import WorkerService
from kvferry.worker.shared_blocks import SharedBlocks

pytestmark = needs_arenas

NUM_TOKENS = 192
HASHES, DENSE = prompt(NUM_TOKENS)


@pytest.fixture
def service() -> Iterator[Service]:
    with running_service() as service:
        yield service


def store_of(service: Service) -> WorkerService:
    (store,) = service.node._stores.values()
    assert store.worker._service is not None
    return store.worker._service


def fill_store(service: Service, engine: StandIn) -> None:
    """Store the prompt, and load it once, which maps the store's memory."""
    blocks = engine.blocks(NUM_TOKENS)
    engine.fill(DENSE, blocks)
    engine.save(HASHES, blocks)
    service.wait_stored(HASHES)
    assert load(service, engine, blocks) == set()


def load(
    service: Service, engine: StandIn, blocks: EngineBlocks, *, first_block: int = 0
) -> set[int]:
    holder = service.holder(HASHES)
    return engine.load(HASHES, NUM_TOKENS, blocks, holder, first_block=first_block)


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first blocks of the pulls into staging."""
    first_blocks = []
    pull = RankLink.pull

    def counted(link: RankLink, chain: Any, first_block: int, *rest: Any, **terms: Any) -> Any:
        first_blocks.append(first_block)
        return pull(link, chain, first_block, *rest, **terms)

    monkeypatch.setattr(RankLink, "pull", counted)
    return first_blocks


@pytest.mark.parametrize("order", ORDERS)
def test_once_the_store_is_mapped_nothing_goes_through_the_staging_memory(
    service: Service, pulled: list[int], order: str
) -> None:
    with running_engine(service, vllm(block_tokens=32), name="a", order=order) as engine:
        fill_store(service, engine)
        assert pulled == [0]
        others = engine.blocks(NUM_TOKENS, first_id=12)
        assert load(service, engine, others) == set()
        assert pulled == [0]
        assert engine.holds(DENSE, others, NUM_TOKENS)


@pytest.mark.parametrize("block_tokens", [16, 64])
def test_blocks_of_an_engine_may_be_larger_than_those_of_the_store(
    service: Service, pulled: list[int], block_tokens: int
) -> None:
    # It is copied in pieces of one block of the engine.
    with running_engine(
        service, vllm(block_tokens=block_tokens), name="a", staging_bytes=1
    ) as engine:
        fill_store(service, engine)
        pulled.clear()
        blocks = engine.blocks(NUM_TOKENS)
        for tensor in engine.ranks[0].tensors:
            tensor.zero_()
        assert load(service, engine, blocks) == set()
        assert pulled == []
        assert engine.holds(DENSE, blocks, NUM_TOKENS)


def test_a_load_may_begin_behind_blocks_that_the_engine_has(
    service: Service, pulled: list[int]
) -> None:
    with running_engine(service, vllm(block_tokens=32), name="a") as engine:
        fill_store(service, engine)
        blocks = engine.blocks(NUM_TOKENS)
        for tensor in engine.ranks[0].tensors:
            tensor[list(blocks.ids[2:])] = 0.0
        rest = EngineBlocks(first=2, ids=blocks.ids[2:])
        assert load(service, engine, rest, first_block=4) == set()
        assert pulled == [0]
        assert engine.holds(DENSE, blocks, NUM_TOKENS)


def test_an_engine_of_another_layout_pulls_its_part_as_ever(
    service: Service, pulled: list[int]
) -> None:
    with (
        running_engine(service, vllm(block_tokens=32), name="a") as a,
        running_engine(service, vllm(block_tokens=32, tp=2), name="b") as b,
    ):
        fill_store(service, a)
        for first_id in (3, 12):
            pulled.clear()
            blocks = b.blocks(NUM_TOKENS, first_id=first_id)
            assert load(service, b, blocks) == set()
            assert pulled == [0, 0]
            assert b.holds(DENSE, blocks, NUM_TOKENS)


def test_blocks_that_the_store_hands_out_anew_during_the_copy_are_reported(
    service: Service, pulled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_held = SharedBlocks.num_held

    def overtaken(shared: SharedBlocks) -> int:
        store_of(service).reused([BlockId(shared.block_ids[7])])
        return num_held(shared)

    with running_engine(service, vllm(block_tokens=32), name="a") as engine:
        fill_store(service, engine)
        pulled.clear()
        others = engine.blocks(NUM_TOKENS, first_id=12)
        monkeypatch.setattr(SharedBlocks, "num_held", overtaken)
        # Hash block 7 is the second half of the engine's fourth block.
        assert load(service, engine, others) == set(others.ids[3:])
        assert pulled == [6]
        assert engine.holds(DENSE, others, 3 * 32)


def test_a_load_that_is_cancelled_during_the_copy_ends_without_another_write(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_writes = PagedTensors.write, 0

    with running_engine(service, vllm(block_tokens=32), name="a", staging_bytes=1) as engine:
        fill_store(service, engine)

        def cancelled(*arguments: Any) -> None:
            nonlocal num_writes
            num_writes += 1
            engine.ranks[0].half._loader.cancel(frozenset({"r"}))
            write(*arguments)

        monkeypatch.setattr(PagedTensors, "write", cancelled)
        others = engine.blocks(NUM_TOKENS, first_id=12)
        assert load(service, engine, others) == set(others.ids)
        assert num_writes == 1


def test_the_engines_own_work_on_the_blocks_is_waited_for_before_the_first_write_and_no_earlier(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    pull, write = RankLink.pull, PagedTensors.write

    def noted_pull(*arguments: Any, **terms: Any) -> Any:
        events.append("pull")
        return pull(*arguments, **terms)

    def noted_write(*arguments: Any) -> None:
        events.append("write")
        write(*arguments)

    monkeypatch.setattr(RankLink, "pull", noted_pull)
    monkeypatch.setattr(PagedTensors, "write", noted_write)
    with running_engine(service, vllm(block_tokens=32), name="a") as engine:
        blocks = engine.blocks(NUM_TOKENS)
        engine.save(HASHES, blocks)
        service.wait_stored(HASHES)
        monkeypatch.setattr(PagedTensors, "queued", lambda _: lambda: events.append("unused"))
        for _ in range(2):
            assert load(service, engine, blocks) == set()
    assert events == ["pull", "unused", "write", "unused", "write"]


def test_a_store_that_is_silent_is_waited_for_once(
    service: Service, pulled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def frozen(_: object) -> Iterator[Header | OutgoingFrame]:
        goes_on.wait(20.0)
        return iter(())

    with running_engine(service, vllm(block_tokens=32), name="a") as engine:
        fill_store(service, engine)
        pulled.clear()
        blocks = engine.blocks(NUM_TOKENS)
        monkeypatch.setattr(engine.ranks[0].half.link._service._fetcher, "_stall_s", 0.1)
        monkeypatch.setattr(store_of(service), "open_fetch", frozen)
        assert load(service, engine, blocks) == set(blocks.ids)
        assert pulled == []
        goes_on.set()
