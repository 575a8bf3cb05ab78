"""What engines of any layout save, engines of any other load; no vLLM, its tensors stood in for."""

from dataclasses import replace

import pytest
from tests.contract.engine_ranks import (
    ORDERS,
    prompt,
    running_engine,
    running_service,
)

from kvferry.cluster.connectors.orders import HeldPrefix
from kvferry.proto.ids import InstanceId
from kvferry.proto.layout import Layout, vllm

LAYOUTS = {
    "tp 1": vllm(block_tokens=32),
    "tp 1, blocks of 64": vllm(block_tokens=64),
    "tp 1, blocks of 16": vllm(block_tokens=16),
    "tp 2": vllm(block_tokens=32, tp=2),
    "tp 4": vllm(block_tokens=16, tp=4),
    "tp 2, dcp 2": vllm(block_tokens=16, tp=2, dcp=2),
    "tp 4, dcp 2, interleaved": vllm(block_tokens=32, tp=4, dcp=2, interleave=4),
    "pp 2": vllm(block_tokens=32, pp=2),
}
NUM_TOKENS = 192


@pytest.mark.parametrize("reader", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("writer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_one_engine_saves_another_loads(writer: Layout, reader: Layout) -> None:
    hashes, dense = prompt(NUM_TOKENS)
    with (
        running_service() as service,
        running_engine(service, writer, name="a") as a,
        running_engine(service, reader, name="b") as b,
    ):
        a.fill(dense, a.blocks(NUM_TOKENS))
        a.save(hashes, a.blocks(NUM_TOKENS))
        service.wait_stored(hashes)
        assert not b.holds(dense, b.blocks(NUM_TOKENS, first_id=7), NUM_TOKENS)
        failed = b.load(
            hashes, NUM_TOKENS, b.blocks(NUM_TOKENS, first_id=7), service.holder(hashes)
        )
        assert failed == set()
        assert b.holds(dense, b.blocks(NUM_TOKENS, first_id=7), NUM_TOKENS)


@pytest.mark.parametrize("order", ORDERS)
def test_tensors_may_lie_in_any_order_that_vllm_has(order: str) -> None:
    hashes, dense = prompt(NUM_TOKENS)
    layout = vllm(block_tokens=32, tp=2)
    with (
        running_service() as service,
        running_engine(service, layout, name="a", order=order) as a,
    ):
        blocks, others = a.blocks(NUM_TOKENS), a.blocks(NUM_TOKENS, first_id=12)
        a.fill(dense, blocks)
        a.save(hashes, blocks)
        service.wait_stored(hashes)
        assert a.load(hashes, NUM_TOKENS, others, service.holder(hashes)) == set()
        assert a.holds(dense, others, NUM_TOKENS)


@pytest.mark.parametrize("name", ["tp 1", "tp 2", "tp 4, dcp 2, interleaved"])
def test_more_than_fits_into_the_staging_memory_goes_through_it_piece_by_piece(name: str) -> None:
    layout = LAYOUTS[name]
    hashes, dense = prompt(NUM_TOKENS)
    with (
        running_service() as service,
        running_engine(service, layout, name="a", staging_bytes=1) as a,
    ):
        assert a.ranks[0].half.link.num_slots == layout.virtual_block_tokens // 16
        blocks, others = a.blocks(NUM_TOKENS), a.blocks(NUM_TOKENS, first_id=12)
        a.fill(dense, blocks)
        a.save(hashes[:5], blocks)
        a.save(hashes[5:], blocks, first_block=5)
        service.wait_stored(hashes)
        assert a.load(hashes, NUM_TOKENS, others, service.holder(hashes)) == set()
        assert a.holds(dense, others, NUM_TOKENS)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_prefix_is_loaded_as_far_as_it_is_held_and_the_other_blocks_are_reported(tp: int) -> None:
    hashes, dense = prompt(NUM_TOKENS)
    with (
        running_service() as service,
        running_engine(service, vllm(block_tokens=32, tp=tp), name="a") as a,
    ):
        blocks, others = a.blocks(NUM_TOKENS), a.blocks(NUM_TOKENS, first_id=12)
        a.fill(dense, blocks)
        a.save(hashes[:7], blocks)
        service.wait_stored(hashes[:7])
        failed = a.load(hashes, NUM_TOKENS, others, service.holder(hashes))
        # Seven hash blocks are three and a half blocks of 32 tokens.
        assert failed == set(others.ids[3:])
        assert a.holds(dense, others, 3 * 32)


def test_what_a_holder_no_longer_has_is_reported_and_the_next_holder_is_asked() -> None:
    hashes, dense = prompt(NUM_TOKENS)
    with (
        running_service() as service,
        running_engine(service, vllm(block_tokens=32), name="a") as a,
    ):
        blocks, others = a.blocks(NUM_TOKENS), a.blocks(NUM_TOKENS, first_id=12)
        a.fill(dense, blocks)
        a.save(hashes[:6], blocks)
        service.wait_stored(hashes[:6])
        good = service.holder(hashes)
        boastful = HeldPrefix(source=good.source, num_blocks=12)
        elsewhere = replace(good.source, instance_id=InstanceId("gone"))
        gone = HeldPrefix(source=elsewhere, num_blocks=12)
        assert a.load(hashes, NUM_TOKENS, others, gone) == set(others.ids)
        assert a.load(hashes, NUM_TOKENS, others, gone, boastful) == set(others.ids[3:])
        assert a.holds(dense, others, 3 * 32)
