"""Moves of a store: each is begun once, however often it is said, and none after the stop."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.proto.errors import UnavailableError
from kvferry.proto.ids import (
    BlockHash,
    BlockId,
    Epoch,
    GroupId,
    Incarnation,
    InstanceId,
    LeaseId,
)
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Command, Reply
from kvferry.proto.step_messages import Move, Source
from kvferry.worker.coordinator_reserver import CoordinatorReserver
from kvferry.worker.store_moves import StoreMoves


class Reserver:
    """Counts the moves that were begun."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.refuses = False

    def adopt(self) -> None:
        if self.refuses:
            raise UnavailableError("s is coming back to its coordinator")
        self.num_begun += 1


@pytest.fixture
def reserver() -> Reserver:
    return Reserver()


@pytest.fixture
def moves(reserver: Reserver) -> Iterator[StoreMoves]:
    no_worker: Any = None  # every pull fails at once
    adopting: Any = reserver
    moves = StoreMoves(no_worker, adopting, lambda: None)
    yield moves
    moves.stop()


def move(name: str) -> Move:
    return Move(
        reservation_id=LeaseId(name),
        group_id=GroupId(0),
        hashes=(BlockHash(b"h"),),
        block_ids=(BlockId(1),),
        source=Source(
            instance_id=InstanceId("a"),
            incarnation=Incarnation(1),
            rank_addresses=("127.0.0.1:1",),
            layout=Layout(block_tokens=4),
        ),
        lease_id=LeaseId(f"lease of {name}"),
        ttl_s=30.0,
    )


def test_a_move_that_is_said_again_is_begun_once(moves: StoreMoves, reserver: Reserver) -> None:
    moves.begin([move("m1")])
    moves.begin([move("m1"), move("m2")])
    moves.begin([move("m1"), move("m2")])
    assert reserver.num_begun == 2


def test_what_is_not_said_any_more_is_forgotten(moves: StoreMoves, reserver: Reserver) -> None:
    moves.begin([move("m1")])
    moves.begin([])
    moves.begin([move("m1")])
    assert reserver.num_begun == 2


def test_what_could_not_be_begun_is_begun_when_it_is_said_again(
    moves: StoreMoves, reserver: Reserver
) -> None:
    reserver.refuses = True
    with pytest.raises(UnavailableError, match="coming back"):
        moves.begin([move("m1")])
    reserver.refuses = False
    moves.begin([move("m1")])
    assert reserver.num_begun == 1


def test_nothing_is_begun_after_the_stop(moves: StoreMoves, reserver: Reserver) -> None:
    moves.stop()
    moves.begin([move("m1")])
    assert reserver.num_begun == 0


def test_a_move_that_is_ordered_after_the_stop_keeps_nobody_waiting() -> None:
    def call(command: Command) -> Reply:
        raise AssertionError("nothing is to be told")

    reserver = CoordinatorReserver(
        call, instance_id=InstanceId("s"), incarnation=Incarnation(1), epoch=Epoch(1)
    )
    no_worker: Any = None
    moves = StoreMoves(no_worker, reserver, lambda: None)
    moves.stop()
    moves.begin([move("m1")])
    assert reserver.is_quiet()
