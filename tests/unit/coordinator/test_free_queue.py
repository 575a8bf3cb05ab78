"""The free queue against a plain list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.coordinator.free_queue import FreeQueue
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockId


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_a_new_queue_is_in_ascending_order() -> None:
    assert list(FreeQueue(4)) == [0, 1, 2, 3]
    assert len(FreeQueue(4)) == 4


def test_blocks_leave_at_the_front_and_return_at_either_end() -> None:
    queue = FreeQueue(5)
    assert queue.popleft_n(3) == [0, 1, 2]
    queue.append_n(ids(1, 0))
    queue.prepend_n(ids(2))
    assert list(queue) == [2, 3, 4, 1, 0]


def test_prepended_blocks_keep_their_order() -> None:
    queue = FreeQueue(4)
    queue.popleft_n(3)
    queue.prepend_n(ids(2, 0, 1))
    assert list(queue) == [2, 0, 1, 3]


def test_any_block_can_be_removed_and_is_gone_then() -> None:
    queue = FreeQueue(4)
    for block in ids(0, 2, 3):
        queue.remove(block)
    assert list(queue) == [1]
    assert BlockId(2) not in queue
    assert BlockId(1) in queue


def test_an_emptied_queue_takes_blocks_again() -> None:
    queue = FreeQueue(2)
    assert queue.popleft_n(2) == [0, 1]
    assert list(queue) == []
    queue.append_n(ids(1))
    assert list(queue) == [1]


def test_taking_more_than_there_are_is_refused_and_takes_nothing() -> None:
    queue = FreeQueue(2)
    with pytest.raises(InvariantError, match="given: 3; allowed: 2"):
        queue.popleft_n(3)
    assert list(queue) == [0, 1]


def test_a_block_is_neither_queued_nor_removed_twice() -> None:
    queue = FreeQueue(2)
    with pytest.raises(InvariantError, match="already"):
        queue.append_n(ids(1))
    queue.remove(BlockId(1))
    with pytest.raises(InvariantError, match="not in the free queue"):
        queue.remove(BlockId(1))
    assert list(queue) == [0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["pop", "append", "prepend", "remove"]), st.integers(0, 9)))
)
def test_the_queue_does_what_a_list_does(operations: list[tuple[str, int]]) -> None:
    queue, model = FreeQueue(10), ids(*range(10))
    for operation, number in operations:
        absent = [block for block in ids(*range(10)) if block not in model]
        if operation == "pop":
            count = min(number, len(model))
            assert queue.popleft_n(count) == model[:count]
            del model[:count]
        elif operation == "append":
            queue.append_n(absent[:number])
            model.extend(absent[:number])
        elif operation == "prepend":
            queue.prepend_n(absent[:number])
            model[:0] = absent[:number]
        elif BlockId(number) in model:
            queue.remove(BlockId(number))
            model.remove(BlockId(number))
        assert list(queue) == model
        assert len(queue) == len(model)
