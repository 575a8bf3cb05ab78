"""Order, gaps and restarts in one publisher's events, without sockets; B49 among them."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster import kv_events_sequence
from kvferry.cluster.kv_events_held import HeldBlocks, HeldKey
from kvferry.cluster.kv_events_sequence import (
    EventSequence,
    Lost,
    Received,
    Restarted,
    Update,
)
from kvferry.proto.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
)
from kvferry.proto.kv_events_codec import decode_batch, encode_batch


def stored(*hashes: int, parent: int | None = None, group: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tuple(range(len(hashes))),
        block_size=1,
        group_idx=group,
    )


def removed(*hashes: int, group: int | None = None) -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, group_idx=group)


def payload(*events: KvEvent, ts: float = 0.0) -> bytes:
    return encode_batch(KvEventBatch(ts=ts, events=events), "map")


# Batch n stores hash n behind hash n - 1.
CHAIN = [payload(stored(n, parent=n - 1 if n else None), ts=float(n)) for n in range(400)]


def received(*numbers: int) -> list[Update]:
    return [Received(number, decode_batch(CHAIN[number])) for number in numbers]


def live(sequence: EventSequence, *numbers: int) -> list[Update]:
    return [update for number in numbers for update in sequence.live(number, CHAIN[number])]


def replayed(sequence: EventSequence, *numbers: int) -> list[Update]:
    return [update for number in numbers for update in sequence.replayed(number, CHAIN[number])]


def held(updates: Sequence[Update]) -> HeldBlocks:
    blocks = HeldBlocks()
    for update in updates:
        blocks.apply(update)
    return blocks


def test_batches_in_order_are_passed_on_at_once() -> None:
    sequence = EventSequence()
    assert live(sequence, 0, 1, 2) == received(0, 1, 2)
    assert (sequence.next_seq, sequence.has_gap, sequence.replay_from) == (3, False, 2)


def test_b49_a_consumer_that_restarts_empty_recovers_what_came_before_it() -> None:
    live(EventSequence(), 0, 1)
    sequence = EventSequence()
    updates = live(sequence, 2)
    assert updates == []
    assert (sequence.has_gap, sequence.replay_from) == (True, 0)
    updates += replayed(sequence, 0, 1, 2) + live(sequence, 3)
    assert updates == received(0, 1, 2, 3)
    assert held(updates).hashes() == {0, 1, 2, 3}


@pytest.mark.parametrize("order", [(0, 3, 2), (0, 2, 3), (3, 0, 2), (2, 3, 0)])
def test_b49_a_lost_batch_and_others_out_of_order_give_the_same_result(
    order: tuple[int, ...],
) -> None:
    sequence = EventSequence()
    updates = live(sequence, *order)
    assert sequence.has_gap
    updates += replayed(sequence, *range(sequence.replay_from, 4))
    assert updates == received(0, 1, 2, 3)
    assert not sequence.has_gap


def test_b49_without_a_replay_the_gap_is_told_and_later_blocks_are_kept() -> None:
    sequence = EventSequence()
    updates = live(sequence, 0, 2, 3) + sequence.give_up_gap()
    assert updates == [*received(0), Lost(1, 2), *received(2, 3)]
    blocks = held(updates)
    assert (blocks.hashes(), blocks.complete) == ({0, 2, 3}, False)


def test_a_snapshot_makes_the_view_complete_again() -> None:
    sequence = EventSequence()
    updates = live(sequence, 0, 2) + sequence.give_up_gap()
    updates += sequence.live(3, payload(AllBlocksCleared(), stored(0, 1, 2, 3)))
    blocks = held(updates)
    assert (blocks.hashes(), blocks.complete) == ({0, 1, 2, 3}, True)


def test_messages_that_a_replay_has_brought_already_are_passed_over() -> None:
    sequence = EventSequence()
    live(sequence, 0, 2)
    assert replayed(sequence, 0, 1, 2, 3, 4) == received(1, 2, 3, 4)
    assert live(sequence, 3, 4, 5) == received(5)


def test_repeated_and_belated_messages_are_no_restart() -> None:
    sequence = EventSequence()
    updates = live(sequence, 0, 1, 1, 0, 4, 4) + sequence.give_up_gap()
    assert updates == [*received(0, 1), Lost(2, 4), *received(4)]
    assert live(sequence, 3, 2) == []
    assert live(sequence, 5) == received(5)


def test_what_a_replay_leaves_out_is_lost() -> None:
    sequence = EventSequence()
    updates = live(sequence, 0, 9) + replayed(sequence, 4, 5, 7, 8, 9)
    assert updates == [*received(0), Lost(1, 4), *received(4, 5), Lost(6, 7), *received(7, 8, 9)]


def test_a_live_batch_fills_what_a_replay_leaves_out() -> None:
    sequence = EventSequence()
    assert live(sequence, 0, 2) + replayed(sequence, 0, 3) == [
        *received(0),
        Lost(1, 2),
        *received(2, 3),
    ]


def test_a_publisher_that_counts_from_zero_again_is_restarted() -> None:
    sequence = EventSequence()
    live(sequence, 0, 1, 2)
    again = payload(stored(77), ts=9.0)
    assert sequence.live(0, again) == [Restarted(), Received(0, decode_batch(again))]
    assert sequence.next_seq == 1


def test_a_restart_whose_first_batches_were_missed_leaves_a_gap_from_zero() -> None:
    sequence = EventSequence()
    live(sequence, 0, 1, 2)
    again = payload(stored(77), ts=9.0)
    assert sequence.live(1, again) == [Restarted()]
    assert (sequence.next_seq, sequence.has_gap, sequence.replay_from) == (0, True, 0)


def test_a_number_from_before_all_that_is_remembered_is_a_restart() -> None:
    sequence = EventSequence()
    live(sequence, *range(300))
    again = payload(stored(77), ts=9.0)
    assert sequence.live(10, again) == [Restarted()]


def test_a_replay_that_repeats_the_last_batch_differently_tells_of_a_restart() -> None:
    sequence = EventSequence()
    live(sequence, 0, 1, 2, 5)
    assert sequence.replayed(2, payload(stored(77), ts=9.0)) == [Restarted()]
    assert (sequence.next_seq, sequence.has_gap) == (0, False)


def test_an_empty_replay_tells_of_a_restart_once_something_was_received() -> None:
    sequence = EventSequence()
    assert sequence.replay_was_empty() == []
    live(sequence, 0)
    assert sequence.replay_was_empty() == [Restarted()]
    assert sequence.replay_was_empty() == []


def test_a_batch_that_cannot_be_read_is_lost_alone() -> None:
    sequence = EventSequence()
    updates = sequence.live(0, b"\xc1") + live(sequence, 1)
    assert updates == [Lost(0, 1), *received(1)]


def test_a_gap_is_given_up_when_too_many_batches_wait_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events_sequence, "MAX_EARLY_BATCHES", 3)
    sequence = EventSequence()
    assert live(sequence, 0, 2, 3, 4) == received(0)
    assert live(sequence, 5) == [Lost(1, 2), *received(2, 3, 4, 5)]


def test_a_hash_is_held_until_its_last_copy_is_removed() -> None:
    blocks = HeldBlocks()

    def follow(*events: KvEvent) -> None:
        blocks.apply(Received(0, KvEventBatch(ts=0, events=events)))

    follow(stored(1, 2), stored(1), stored(1, group=1))
    follow(removed(1), removed(2))
    assert HeldKey(1, None, "GPU") in blocks
    assert HeldKey(2, None, "GPU") not in blocks
    follow(removed(1), removed(1), removed(9))
    assert HeldKey(1, None, "GPU") not in blocks
    assert HeldKey(1, 1, "GPU") in blocks
    assert (len(blocks), blocks.hashes()) == (1, {1})
    follow(stored(9), AllBlocksCleared(), stored(3))
    assert blocks.hashes() == {3}


def test_a_restart_forgets_the_earlier_life() -> None:
    blocks = held([*received(0), Lost(1, 2), Restarted()])
    assert (len(blocks), blocks.complete) == (0, True)


@given(
    kinds=st.lists(st.sampled_from("srx"), min_size=1, max_size=30),
    seed=st.integers(0, 2**32),
    loss=st.floats(0, 1),
)
def test_any_loss_and_any_order_end_as_if_nothing_had_happened(
    kinds: list[str], seed: int, loss: float
) -> None:
    chance = random.Random(seed)
    events: dict[str, KvEvent] = {"s": stored(1, 2), "r": removed(1), "x": AllBlocksCleared()}
    sent = [payload(events[kind], ts=float(number)) for number, kind in enumerate(kinds)]
    numbers = [number for number in range(len(sent)) if chance.random() >= loss]
    chance.shuffle(numbers)
    sequence = EventSequence()
    updates: list[Update] = []
    for number in numbers:
        updates += sequence.live(number, sent[number])
    for number in range(sequence.replay_from, len(sent)):
        updates += sequence.replayed(number, sent[number])
    assert updates == [Received(n, decode_batch(each)) for n, each in enumerate(sent)]
