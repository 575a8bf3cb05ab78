"""A lease held through the control front: blocks that stay in place while it lives."""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from kvferry.cluster.control_client import ControlClient
from kvferry.proto.errors import DeadlineError, NotFoundError, UnavailableError
from kvferry.proto.ids import BlockHash, InstanceId, LeaseId
from kvferry.proto.messages import AcquireLease, Done, Leased, ReleaseLease, RenewLease

# A lease that could not be given back ends by itself; nobody should wait long for saying so.
RELEASE_TIMEOUT_S = 1.0


def acquire_lease(
    control: ControlClient,
    identity_digest: bytes,
    hashes: Sequence[BlockHash],
    *,
    block_tokens: int,
    ttl_s: float,
    timeout_s: float,
    instance_id: InstanceId | None = None,
) -> "Lease":
    """Keep the longest prefix of `hashes` at one instance (None: whoever has the longest).

    Raises:
        BadInputError: `ttl_s` is not a positive number.
        NotFoundError: no such instance.
        UnavailableError, DeadlineError: the coordinator does not answer.
    """
    command = AcquireLease(
        call_id=new_call_id(),
        identity_digest=identity_digest,
        hashes=tuple(hashes),
        ttl_s=ttl_s,
        instance_id=instance_id,
    )
    return Lease(control, control.ask(command, Leased, timeout_s), block_tokens)


class Lease:
    """A prefix kept in place at one instance; made by `ModelCache.lease`.

    `num_blocks` are hash blocks. `num_tokens` 0 (and `source` None) when nobody holds a prefix.
    """

    def __init__(self, control: ControlClient, leased: Leased, block_tokens: int) -> None:
        self._control = control
        self._lease_id = leased.lease_id
        self.num_blocks = leased.num_hashes
        self.num_tokens = leased.num_hashes * block_tokens
        self.source = leased.source

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Leaving must not hide the body's own error, and the lease ends by itself anyway.
        with suppress(UnavailableError, DeadlineError):
            self.release()

    @property
    def lease_id(self) -> LeaseId | None:
        """The service's name for it, None when nothing is kept (any more)."""
        return self._lease_id

    def renew(self, ttl_s: float) -> float:
        """Keep it for `ttl_s` seconds from now; return the seconds granted (the service has a cap).

        Raises:
            NotFoundError: it has expired, was released, or keeps nothing.
            BadInputError: `ttl_s` is not a positive number.
            UnavailableError, DeadlineError: the service does not answer.
        """
        if self._lease_id is None:
            raise NotFoundError("this lease keeps nothing", allowed="a lease of at least one block")
        command = RenewLease(call_id=new_call_id(), lease_id=self._lease_id, ttl_s=ttl_s)
        return self._control.ask(command, Leased).ttl_s

    def release(self) -> bool:
        """Give it back; return False when it had ended already.

        Raises:
            UnavailableError, DeadlineError: the service does not answer.
        """
        if self._lease_id is None:
            return False
        command = ReleaseLease(call_id=new_call_id(), lease_id=self._lease_id)
        was_live = self._control.ask(command, Done, RELEASE_TIMEOUT_S).changed
        self._lease_id = None
        return was_live

    def has_lasted(self) -> bool:
        """Give it back; tell whether the service says that it kept its blocks until now.

        After a reset it has not, and what was fetched under it may be old.
        """
        with suppress(UnavailableError, DeadlineError):
            return self.release()
        return False


def new_call_id() -> str:
    """Return an id that no call has had."""
    return uuid.uuid4().hex
