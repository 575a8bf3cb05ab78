"""Known failures of instances with several ranks, each as a test; the number names the case."""

from typing import Any

import numpy as np
import pytest
from tests.builders import make_identity
from tests.unit.coordinator.fleet import (
    BLOCK_TOKENS,
    Fleet,
    admit,
    load_blocks,
    loaded,
    new_blocks,
    release,
)

from kvferry.proto.ids import BlockId, InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.slot_mapping import NOT_HERE, local_lengths, slots

# One letter is a hash of 4 tokens, and 33 tokens are 8 of them and one token.
R0 = "abcdefgh"


def ranks(layout: Layout) -> dict[str, Any]:
    """A layout and who its ranks are."""
    numbers = range(1, layout.num_ranks + 1)
    return {
        "layout": layout,
        "rank_addresses": tuple(f"127.0.0.1:{number}" for number in numbers),
        "rank_pids": tuple(numbers),
    }


DCP_4 = Layout(block_tokens=BLOCK_TOKENS, dcp=4)
DCP_2 = Layout(block_tokens=BLOCK_TOKENS, dcp=2)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.register("four", num_blocks=20, **ranks(DCP_4))
    return fleet


@pytest.mark.parametrize(
    ("text", "hit"),
    [("aBCDEFGH", 0), ("abcdeFGH", 16), ("abcdefgh", 32)],
    ids=["r1: 4 equal", "r2: 20 equal", "r3: all 33 equal"],
)
def test_b27_an_instance_of_four_ranks_hits_multiples_of_what_they_hold_together(
    fleet: Fleet, text: str, hit: int
) -> None:
    assert len(new_blocks(fleet.admit("four", admit("r0", R0)))) == 3
    fleet.step("four", releases=(release("r0"),))
    fleet.cache("four", R0)
    assert fleet.admit("four", admit("r", text)).num_computed_tokens == hit
    assert fleet.locate(text)["four"] * BLOCK_TOKENS == hit


@pytest.mark.parametrize("dcp", [4, 2])
def test_b27_each_rank_keeps_four_of_each_virtual_block_and_has_as_many_slots(dcp: int) -> None:
    table = [5, 2, 7, 3, 9]
    of_rank = [
        slots(table, 0, 32, BLOCK_TOKENS, rank=rank, num_shards=dcp).tolist() for rank in range(dcp)
    ]
    assert {len(one) for one in of_rank} == {32}
    covered = dcp * BLOCK_TOKENS
    for rank, found in enumerate(of_rank):
        for block in range(32 // covered):
            first = table[block] * BLOCK_TOKENS
            kept = [at for at in found[block * covered :][:covered] if at != NOT_HERE]
            assert kept == [first, first + 1, first + 2, first + 3], f"rank {rank}"
    # Whoever holds a token is one rank, and the next token's is the next one.
    owners = [[at != NOT_HERE for at in row].index(True) for row in np.array(of_rank).T]
    assert owners == [position % dcp for position in range(32)]
    assert local_lengths([33], num_shards=dcp).tolist() == [[9, 8, 8, 8] if dcp == 4 else [17, 16]]


def test_b27_another_number_of_ranks_has_the_blocks_by_a_load_only_and_whole(fleet: Fleet) -> None:
    """The case says that a service with DCP 2 never hits entries of DCP 4.

    What it protects from are wrong bytes: a block of DCP 2 found in place of one of DCP 4. Here
    both may have one hash chain, because nothing is shared but by a plan (`kvferry.proto.reshard`):
    the DCP 2 instance has no local hit, and a load of whole blocks of its own that leases whole
    blocks of the other. `test_b27_...` in tests/contract holds the bytes.
    """
    fleet.register("two", num_blocks=20, **ranks(DCP_2))
    fleet.cache("four", R0)
    load = fleet.admit_load("two", admit("r", "abcdefgX"))
    # Seven hashes are equal, 28 tokens: one block of 16 at the source, so two of 8 here.
    assert (load.num_hit_blocks, len(load_blocks(load))) == (0, 2)
    assert load.source.layout == DCP_4
    assert load.lease_id is not None
    assert [key[-1:] for _, key in fleet.leased_keys(load.lease_id)] == [b"d"]
    assert fleet.locate(R0) == {"four": 8, "two": 0}
    fleet.step("two", load_results=(loaded("r", 16),))
    assert fleet.locate(R0) == {"four": 8, "two": 4}


def test_b27_what_fewer_ranks_hold_counts_as_far_as_whole_blocks_of_more_go(fleet: Fleet) -> None:
    fleet.register("two", num_blocks=20, **ranks(DCP_2))
    fleet.cache("two", "abcdef")  # 24 tokens: three blocks of 8, of which 16 tokens are one of 16
    load = fleet.admit_load("four", admit("r", R0))
    assert len(load_blocks(load)) == 1
    assert load.lease_id is not None
    assert [key[-1:] for _, key in fleet.leased_keys(load.lease_id)] == [b"b", b"d"]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_b30_the_producer_keeps_its_blocks_until_every_rank_has_confirmed(tp: int) -> None:
    """An instance tells one result, after the last of its ranks; the lease ends with that."""
    fleet = Fleet(identity=make_identity(num_kv_heads=4))
    fleet.register("p", num_blocks=4)
    fleet.register("d", **ranks(Layout(block_tokens=BLOCK_TOKENS, tp=tp)))
    fleet.cache("p", "xy")
    fleet.admit_load("d", admit("r", "xy"))
    pool = fleet.service.state.instance(InstanceId("p")).manager.pool
    held = [block for block in map(BlockId, range(1, 4)) if pool.key_of(block) is not None]
    for _ in range(3):
        fleet.now += 15.0
        # Two blocks are wanted here and one is free: nobody gets those that are being read.
        assert fleet.step("p", waiting=(admit("other", "uv", 0),)).scheduled == ()
        fleet.step("d")
        assert [pool.ref_count(block) for block in held] == [1, 1]
        assert fleet.describe().num_leases == 1
    fleet.step("d", load_results=(loaded("r", 2 * BLOCK_TOKENS),))
    assert [pool.ref_count(block) for block in held] == [0, 0]
    assert fleet.describe().num_leases == 0
    assert len(new_blocks(fleet.admit("p", admit("other", "uv", 0)))) == 2
