import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import BusyError, InvariantError
from kvferry.proto.ids import BlockId, GroupedHash
from kvferry.worker.residency import Residency

A, B = GroupedHash(b"a" * 20), GroupedHash(b"b" * 20)


def held(*pairs: tuple[GroupedHash, int]) -> Residency:
    residency = Residency(100)
    residency.mark_written((key, BlockId(block_id)) for key, block_id in pairs)
    return residency


def found_block(residency: Residency, key: GroupedHash) -> int | None:
    resident = residency.find(key)
    return None if resident is None else resident.block_id


def test_a_written_block_is_found_until_it_is_reused() -> None:
    residency = held((A, 3))
    resident = residency.find(A)
    assert resident is not None
    assert resident.block_id == 3
    assert residency.still_holds(resident)
    residency.mark_reused([BlockId(3)])
    assert residency.find(A) is None
    assert not residency.still_holds(resident)


def test_a_block_rewritten_with_the_same_hash_is_another_generation() -> None:
    residency = held((A, 3))
    before = residency.find(A)
    residency.mark_reused([BlockId(3)])
    residency.mark_written([(A, BlockId(3))])
    after = residency.find(A)
    assert before is not None
    assert after is not None
    assert not residency.still_holds(before)
    assert residency.still_holds(after)


def test_repeating_a_pair_keeps_readers_under_way_valid() -> None:
    residency = held((A, 3))
    resident = residency.find(A)
    residency.mark_written([(A, BlockId(3))])
    assert resident is not None
    assert residency.still_holds(resident)


def test_several_blocks_may_hold_one_hash_and_each_stands_in_for_the_other() -> None:
    residency = held((A, 3), (A, 5), (B, 4))
    assert found_block(residency, A) == 3
    assert residency.num_blocks() == 3
    residency.mark_reused([BlockId(3)])
    assert found_block(residency, A) == 5


def test_a_block_written_while_it_holds_another_hash_is_a_broken_invariant() -> None:
    residency = held((A, 3))
    with pytest.raises(InvariantError, match=f"block 3, {B.hex()}; allowed: {A.hex()}"):
        residency.mark_written([(B, BlockId(3))])


def test_the_null_block_never_holds_anything() -> None:
    with pytest.raises(InvariantError, match="block 0"):
        held((A, 0))


def test_reusing_a_block_that_holds_nothing_is_fine() -> None:
    residency = held((A, 3))
    residency.mark_reused([BlockId(9), BlockId(9)])
    assert found_block(residency, A) == 3


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.sampled_from([A, B])), max_size=40))
def test_residency_agrees_with_a_plain_map(steps: list[tuple[bool, int, GroupedHash]]) -> None:
    residency, model = Residency(100), dict[int, GroupedHash]()
    for write, block_id, key in steps:
        residency.mark_reused([BlockId(block_id)])
        model.pop(block_id, None)
        if write:
            residency.mark_written([(key, BlockId(block_id))])
            model[block_id] = key
        for wanted in (A, B):
            block = found_block(residency, wanted)
            assert (block is None) == (wanted not in model.values())
            assert block is None or model[block] == wanted
        assert residency.num_blocks() == len(model)


def test_a_block_has_no_second_writer_before_the_first_one_is_closed() -> None:
    residency = Residency(100)
    residency.mark_written([(A, BlockId(3))])
    with residency.writing([BlockId(1), BlockId(2)]):
        with (
            pytest.raises(BusyError, match="not closed; given: \\[2\\]"),
            residency.writing([BlockId(2), BlockId(3)]),
        ):
            pass
        assert residency.key_of(BlockId(3)) == A
    with residency.writing([BlockId(2), BlockId(3)]):
        assert residency.key_of(BlockId(3)) is None


def test_a_reader_never_validates_a_copy_taken_across_a_rewrite() -> None:
    residency, content = Residency(100), {1: b""}
    stop = threading.Event()

    def rewrite() -> None:
        key = A
        while not stop.is_set():
            residency.mark_reused([BlockId(1)])
            content[1] = b"torn"
            key = B if key == A else A
            content[1] = key
            residency.mark_written([(key, BlockId(1))])

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        num_validated = 0
        for _ in range(200_000):
            resident = residency.find(A)
            if resident is not None:
                copy = content[1]
                if residency.still_holds(resident):
                    assert copy == A
                    num_validated += 1
            if num_validated >= 200:
                break
        assert num_validated > 0
    finally:
        stop.set()
        writer.join()
