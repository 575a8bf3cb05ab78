"""What must hold of every command that a coordinator executes, beside what it checks of itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Command, Heard, Leased, Located, MemberCommand, Reply
from kvferry.proto.step_messages import StepReply


@contextmanager
def nothing_changes_by_others(
    service: CoordinatorService, command: Command, pass_time: Callable[[], object]
) -> Iterator[None]:
    """Refuse what a command changes that a present member did not send.

    Whoever was replaced or forgotten, or knows another life of the coordinator, may wake up at any
    time and go on as if nothing had been.

    Args:
        service: which executes it.
        command: of anybody.
        pass_time: ends what is past its deadline now, so that it is no change.

    Raises:
        InvariantError: naming the sender.
    """
    if not isinstance(command, get_args(MemberCommand)) or _is_present(service, command):
        yield
        return
    pass_time()
    before = _state_of(service)
    yield
    if _state_of(service) != before:
        raise InvariantError(
            "a command of who is no member changed something",
            given=f"{type(command).__name__} of {command.instance_id}:{command.incarnation}",
        )


def check_no_suspects(service: CoordinatorService, reply: Reply) -> None:
    """Nobody is sent to a suspect.

    Raises:
        InvariantError: naming the suspects.
    """
    suspects = {name for name, one in service.state.instances.items() if one.is_suspect}
    named = set(_named_in(reply)) & suspects
    if named:
        raise InvariantError(f"a {type(reply).__name__} names suspects", given=sorted(named))


def _is_present(service: CoordinatorService, command: MemberCommand) -> bool:
    member = service.state.instances.get(command.instance_id)
    return (
        member is not None
        and command.epoch == service.epoch
        and command.incarnation == member.info.incarnation
    )


def _state_of(service: CoordinatorService) -> object:
    """Return who the members are, and everything that requests and blocks are to them."""
    state = service.state
    members = [
        (
            name,
            one.info.incarnation,
            one.returning_as,
            sorted(one.requests),
            sorted(one.reservations),
            list(one.manager.pool.free_order()),
            list(one.manager.pool.index_items()),
        )
        for name, one in state.instances.items()
    ]
    return members, [lease.lease_id for lease in state.leases.live()], sorted(state.handoffs)


def _named_in(reply: Reply) -> Iterator[InstanceId]:
    match reply:
        case Located():
            yield from (holder.source.instance_id for holder in reply.holders)
        case Leased() if reply.source is not None:
            yield reply.source.instance_id
        case StepReply():
            yield from (load.source.instance_id for load in reply.loads)
            yield from (move.source.instance_id for move in reply.moves)
        case Heard():
            yield from (move.source.instance_id for move in reply.moves)
