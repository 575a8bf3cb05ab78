"""A router opens a handoff from a prefill instance to a decode instance, and closes it."""

from kvferry.coordinator.draining import require_not_draining
from kvferry.coordinator.handoff import Handoff, HandoffEvent
from kvferry.coordinator.leases import require_ttl
from kvferry.coordinator.state import ServiceState
from kvferry.proto.errors import UnavailableError
from kvferry.proto.identity import require_equal_identities
from kvferry.proto.messages import CloseHandoff, Done, OpenHandoff


def open_handoff(state: ServiceState, command: OpenHandoff, now: float) -> Done:
    """Open a handoff at `now`, in seconds; one that is open for the request ends.

    Raises:
        BadInputError: `ttl_s` is not a positive number of seconds.
        NotFoundError: no such instance.
        IdentityMismatchError: the two do not serve the same model.
        BusyError: one of them is being drained.
        UnavailableError: the prefill instance is a suspect.

    """
    require_ttl("ttl_s", command.ttl_s)
    prefill = state.instance(command.prefill_instance)
    decode = state.instance(command.decode_instance)
    require_equal_identities(
        prefill.info.identity, decode.info.identity, who=decode.info.instance_id
    )
    require_not_draining(prefill)
    require_not_draining(decode)
    if prefill.is_suspect:
        raise UnavailableError("not heard for a while", given=command.prefill_instance)
    open_one = state.handoffs.get(command.request_id)
    if open_one is not None:
        # The router has sent the request elsewhere: nobody waits for the old one any more.
        state.move_handoff(open_one, HandoffEvent.FAILED)
        state.note("handoff_replaced", f"handoff of request {command.request_id}")
    state.handoffs[command.request_id] = Handoff(
        request_id=command.request_id,
        prefill_instance=command.prefill_instance,
        decode_instance=command.decode_instance,
        deadline_s=now + min(command.ttl_s, state.leases.cap_s),
    )
    return Done(changed=True)


def close_handoff(state: ServiceState, command: CloseHandoff) -> Done:
    """End a handoff, if it is open."""
    open_one = state.handoffs.get(command.request_id)
    if open_one is None:
        return Done(changed=False)
    state.move_handoff(open_one, HandoffEvent.FINISHED)
    return Done(changed=True)
