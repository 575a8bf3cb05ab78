"""Drains in the words of tests: how they begin, and carrying out what peers are to move."""

from typing import Any

from tests.unit.coordinator.fleet import BLOCK_TOKENS, Fleet

from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Tick
from kvferry.proto.step_messages import Move, MoveEnd

BLOCK_BYTES = Fleet().identity.block_bytes(BLOCK_TOKENS)


def drain(fleet: Fleet, name: str, deadline_s: float = 60.0, **more: Any) -> Drained:
    command = Drain(instance_id=InstanceId(name), deadline_s=deadline_s, **more)
    return fleet.ask(command, Drained)


def tick(fleet: Fleet, seconds: float = 0.5) -> None:
    fleet.now += seconds
    fleet.send(Tick())


def moves_of(fleet: Fleet, name: str) -> tuple[Move, ...]:
    return fleet.step(name).moves


def end(fleet: Fleet, name: str, move: Move, num_written: int | None = None) -> tuple[Move, ...]:
    """Report a move that brought everything, or so much; return what is to be moved next."""
    count = len(move.hashes) if num_written is None else num_written
    ended = MoveEnd(reservation_id=move.reservation_id, num_written=count)
    return fleet.step(name, moves_ended=(ended,)).moves


def move_all(fleet: Fleet, name: str) -> list[Move]:
    """Carry out everything an instance is told to move."""
    done: list[Move] = []
    moves = list(moves_of(fleet, name))
    while moves:
        done.append(moves.pop(0))
        moves += end(fleet, name, done[-1])
    return done


def state_of(fleet: Fleet, name: str) -> str:
    return next(i.state for i in fleet.describe().instances if i.info.instance_id == name)


def fleet_of(*names: str, num_blocks: int = 20, **settings: Any) -> Fleet:
    fleet = Fleet(**settings)
    for name in names:
        fleet.register(name, num_blocks)
    return fleet
