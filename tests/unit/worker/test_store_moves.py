"""A store's moves begin until it is stopped, and none afterwards."""

from typing import Any

from kvferry.proto.ids import (
    FIRST_GROUP,
    BlockHash,
    BlockId,
    Epoch,
    Incarnation,
    InstanceId,
    LeaseId,
)
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Command, Reply
from kvferry.proto.step_messages import Move, Source
from kvferry.worker.coordinator_reserver import CoordinatorReserver
from kvferry.worker.store_moves import StoreMoves

MOVE = Move(
    reservation_id=LeaseId("m"),
    group_id=FIRST_GROUP,
    hashes=(BlockHash(bytes(32)),),
    block_ids=(BlockId(1),),
    source=Source(
        instance_id=InstanceId("p"),
        incarnation=Incarnation(1),
        layout=Layout(block_tokens=4),
        rank_addresses=("127.0.0.1:1",),
    ),
    lease_id=LeaseId("l"),
    ttl_s=1.0,
)


def test_a_move_that_is_ordered_after_the_stop_is_not_begun_and_keeps_nobody_waiting() -> None:
    def call(command: Command) -> Reply:
        raise AssertionError("nothing is to be told")

    reserver = CoordinatorReserver(
        call, instance_id=InstanceId("s"), incarnation=Incarnation(1), epoch=Epoch(1)
    )
    no_worker: Any = None
    moves = StoreMoves(no_worker, reserver, lambda: None)
    moves.stop()
    moves.begin([MOVE])
    assert reserver.is_quiet()
