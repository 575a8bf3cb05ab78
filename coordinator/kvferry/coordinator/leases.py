"""Leases: blocks of one instance promised to stay until a deadline.

Keeps deadlines only. Whoever adds a lease has referenced its blocks, and whoever gets one back
from `remove` or `expire` frees them.
"""

import math
from dataclasses import dataclass

from kvferry.proto.errors import BadInputError, NotFoundError
from kvferry.proto.ids import BlockId, Epoch, InstanceId, LeaseId


@dataclass(slots=True, kw_only=True)
class Lease:
    """Blocks of `instance_id`, kept until `deadline_s` for `beneficiary` (None: a client).

    They serve a prefix of `num_prefix_hashes` hashes, in every group.
    """

    lease_id: LeaseId
    instance_id: InstanceId
    block_ids: tuple[BlockId, ...]
    num_prefix_hashes: int
    beneficiary: InstanceId | None
    started_s: float
    deadline_s: float


class LeaseTable:
    """Live leases. No lease outlives its start by more than `cap_s` seconds."""

    def __init__(self, epoch: Epoch, cap_s: float) -> None:
        """Make an empty table.

        Raises:
            BadInputError: `cap_s` is not a positive number.

        """
        require_ttl("lease_cap_s", cap_s)
        self.cap_s = cap_s
        self._epoch = epoch
        self._num_made = 0
        self._leases: dict[LeaseId, Lease] = {}
        # Nothing can have expired before this moment, so most sweeps look at nothing.
        self._earliest_s = math.inf

    def __len__(self) -> int:
        return len(self._leases)

    def live(self) -> tuple[Lease, ...]:
        """Return all leases, oldest first."""
        return tuple(self._leases.values())

    def new_id(self) -> LeaseId:
        """Return an id that this coordinator never gave before (reservations use it as well)."""
        self._num_made += 1
        return LeaseId(f"lease-{self._epoch}-{self._num_made}")

    def add(
        self,
        instance_id: InstanceId,
        block_ids: tuple[BlockId, ...],
        *,
        num_prefix_hashes: int,
        now: float,
        ttl_s: float,
        beneficiary: InstanceId | None = None,
    ) -> Lease:
        """Promise blocks for `ttl_s` seconds from now, at most the cap.

        Raises:
            BadInputError: `ttl_s` is not a positive number.

        """
        require_ttl("ttl_s", ttl_s)
        lease = Lease(
            lease_id=self.new_id(),
            instance_id=instance_id,
            block_ids=block_ids,
            num_prefix_hashes=num_prefix_hashes,
            beneficiary=beneficiary,
            started_s=now,
            deadline_s=now + min(ttl_s, self.cap_s),
        )
        self._leases[lease.lease_id] = lease
        self._earliest_s = min(self._earliest_s, lease.deadline_s)
        return lease

    def get(self, lease_id: LeaseId) -> Lease | None:
        """Return a live lease; None when it is unknown or has ended."""
        return self._leases.get(lease_id)

    def renew(self, lease_id: LeaseId, *, now: float, ttl_s: float) -> Lease:
        """Move a deadline to `ttl_s` seconds from now, at most the cap after the lease's start.

        Raises:
            BadInputError: `ttl_s` is not a positive number.
            NotFoundError: the lease is unknown or has ended.

        """
        require_ttl("ttl_s", ttl_s)
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NotFoundError("unknown or ended lease", given=lease_id)
        lease.deadline_s = min(now + ttl_s, lease.started_s + self.cap_s)
        self._earliest_s = min(self._earliest_s, lease.deadline_s)
        return lease

    def remove(self, lease_id: LeaseId) -> Lease | None:
        """End a lease and return it; None when it is unknown or has ended."""
        return self._leases.pop(lease_id, None)

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose deadline is reached at `now` (seconds), and return them."""
        if now < self._earliest_s:
            return []
        ended = [lease for lease in self._leases.values() if lease.deadline_s <= now]
        for lease in ended:
            del self._leases[lease.lease_id]
        self._earliest_s = min(
            (lease.deadline_s for lease in self._leases.values()), default=math.inf
        )
        return ended


def require_ttl(name: str, value: float) -> None:
    """Refuse a duration that is not a positive finite number of seconds.

    Raises:
        BadInputError: naming the argument and its value.

    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadInputError(
            f"{name} must be a positive number of seconds", given=repr(value), allowed="> 0"
        )
