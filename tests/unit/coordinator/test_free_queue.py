"""The free queue against a plain list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.coordinator.free_queue import FreeQueue, Run
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import BlockId


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


class Queue(FreeQueue):
    """Keeps the states of its ids as a pool does."""

    def __init__(self, first: int, end: int) -> None:
        self.states: list[int | Run] = [0] * end
        super().__init__(first, end, self.states)

    def put_back(self, blocks: list[BlockId]) -> None:
        run = Run()
        for block in blocks:
            self.states[block] = run
        self.append(run, list(blocks))

    def take_out(self, block: BlockId) -> None:
        run, self.states[block] = self.states[block], 1
        assert isinstance(run, Run)
        self.remove(run)


def test_a_new_queue_is_in_ascending_order() -> None:
    assert list(Queue(1, 5)) == [1, 2, 3, 4]
    assert len(Queue(1, 5)) == 4


def test_blocks_leave_at_the_front_and_return_at_either_end() -> None:
    queue = Queue(0, 5)
    assert queue.take(3) == [0, 1, 2]
    queue.put_back(ids(1, 0))
    queue.prepend(ids(2))
    assert list(queue) == [2, 3, 4, 1, 0]
    assert queue.take(4) == [2, 3, 4, 1]


def test_prepended_blocks_keep_their_order() -> None:
    queue = Queue(0, 4)
    queue.take(3)
    queue.prepend(ids(2, 0, 1))
    assert list(queue) == [2, 0, 1, 3]
    assert queue.take(2) == [2, 0]
    assert list(queue) == [1, 3]


def test_a_returned_block_can_be_removed_and_returned_again() -> None:
    queue = Queue(0, 3)
    queue.put_back(queue.take(3))
    queue.take_out(BlockId(1))
    assert (list(queue), len(queue)) == ([0, 2], 2)
    queue.put_back(ids(1))
    queue.take_out(BlockId(1))
    queue.put_back(ids(1))
    assert list(queue) == [0, 2, 1]
    assert queue.take(3) == [0, 2, 1]


def test_blocks_can_be_picked_out_of_those_that_were_not_put_to_the_back() -> None:
    queue = Queue(1, 7)
    queue.take(2)
    queue.prepend(ids(2, 1))
    queue.pick(ids(4, 1, 6))
    assert (list(queue), len(queue)) == ([2, 3, 5], 3)
    queue.put_back(ids(4))
    queue.prepend(ids(6))
    assert queue.take(3) == [6, 2, 3]
    assert queue.take(2) == [5, 4]


def test_a_removed_block_that_returns_to_the_front_leaves_nothing_at_the_back() -> None:
    queue = Queue(0, 3)
    queue.put_back(queue.take(3))
    queue.take_out(BlockId(1))
    queue.prepend(ids(1))
    assert queue.take(2) == [1, 0]
    queue.put_back(ids(1))
    assert queue.take(2) == [2, 1]


def test_an_emptied_queue_takes_blocks_again() -> None:
    queue = Queue(0, 2)
    assert queue.take(2) == [0, 1]
    assert list(queue) == []
    queue.put_back(ids(1))
    assert list(queue) == [1]


def test_taking_more_than_there_are_is_refused_and_takes_nothing() -> None:
    queue = Queue(0, 2)
    with pytest.raises(InvariantError, match="given: 3; allowed: 2"):
        queue.take(3)
    assert list(queue) == [0, 1]


@pytest.mark.parametrize("length", [1, 5, 40])
def test_entries_that_removed_blocks_leave_behind_do_not_pile_up(length: int) -> None:
    queue = Queue(0, 100)
    queue.put_back(queue.take(100))
    for number in range(2000):
        run = [BlockId((number * 7 + i) % 100) for i in range(length)]
        for block in run:
            queue.take_out(block)
        queue.put_back(run)
    assert len(queue) == len(set(queue)) == 100
    assert list(queue)[-length:] == run
    assert sum(len(entries.ids) for entries in queue._runs) <= 200


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "append", "prepend", "remove", "pick"]), st.integers(0, 39)
        ),
        max_size=120,
    )
)
def test_the_queue_does_what_a_list_does(operations: list[tuple[str, int]]) -> None:
    queue, model = Queue(0, 40), ids(*range(40))
    returned: set[BlockId] = set()  # of the queued ones, those that were put to the back
    for operation, number in operations:
        absent = [block for block in ids(*range(40)) if block not in model]
        if operation == "take":
            count = min(number, len(model))
            assert queue.take(count) == model[:count]
            returned -= set(model[:count])
            del model[:count]
        elif operation == "append":
            queue.put_back(absent[:number])
            model.extend(absent[:number])
            returned |= set(absent[:number])
        elif operation == "prepend":
            queue.prepend(absent[:number])
            model[:0] = absent[:number]
        elif operation == "pick":
            picked = [block for block in model if block not in returned][:: number // 8 + 1]
            queue.pick(picked)
            model = [block for block in model if block not in picked]
        elif BlockId(number) in returned:
            queue.take_out(BlockId(number))
            model.remove(BlockId(number))
            returned.remove(BlockId(number))
        assert list(queue) == model
        assert len(queue) == len(model)
