"""Deadlines and the cap of leases."""

import math

import pytest

from kvferry.coordinator.leases import LeaseTable
from kvferry.proto.errors import BadInputError, NotFoundError
from kvferry.proto.ids import BlockId, Epoch, InstanceId, LeaseId

A = InstanceId("a")
BLOCKS = (BlockId(1), BlockId(2))


def test_a_lease_ends_at_its_deadline_once() -> None:
    table = LeaseTable(Epoch(7), cap_s=100.0)
    short = table.add(A, BLOCKS, num_prefix_hashes=len(BLOCKS), now=0.0, ttl_s=5.0)
    long = table.add(A, BLOCKS, num_prefix_hashes=len(BLOCKS), now=0.0, ttl_s=50.0)
    assert (short.lease_id, long.lease_id) == ("lease-7-1", "lease-7-2")
    assert table.expire(4.9) == []
    assert table.expire(5.0) == [short]
    assert table.expire(5.0) == []
    assert table.expire(50.0) == [long]
    assert len(table) == 0


def test_renewing_moves_the_deadline_but_never_past_the_cap() -> None:
    table = LeaseTable(Epoch(1), cap_s=20.0)
    lease = table.add(A, BLOCKS, num_prefix_hashes=len(BLOCKS), now=10.0, ttl_s=100.0)
    assert lease.deadline_s == 30.0
    assert table.renew(lease.lease_id, now=12.0, ttl_s=3.0).deadline_s == 15.0
    assert table.renew(lease.lease_id, now=14.0, ttl_s=100.0).deadline_s == 30.0
    assert table.expire(29.0) == []
    assert table.expire(30.0) == [lease]


def test_a_shortened_lease_ends_early() -> None:
    table = LeaseTable(Epoch(1), cap_s=20.0)
    lease = table.add(A, BLOCKS, num_prefix_hashes=len(BLOCKS), now=0.0, ttl_s=20.0)
    table.renew(lease.lease_id, now=0.0, ttl_s=1.0)
    assert table.expire(1.0) == [lease]


def test_a_removed_lease_is_returned_once_and_cannot_be_renewed() -> None:
    table = LeaseTable(Epoch(1), cap_s=20.0)
    lease = table.add(A, BLOCKS, num_prefix_hashes=len(BLOCKS), now=0.0, ttl_s=1.0)
    assert table.remove(lease.lease_id) is lease
    assert table.remove(lease.lease_id) is None
    with pytest.raises(NotFoundError, match=lease.lease_id):
        table.renew(LeaseId(lease.lease_id), now=0.0, ttl_s=1.0)


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, True, "5"])
def test_a_duration_that_is_not_positive_and_finite_is_refused(bad: float) -> None:
    table = LeaseTable(Epoch(1), cap_s=20.0)
    with pytest.raises(BadInputError, match="ttl_s must be a positive number"):
        table.add(A, BLOCKS, num_prefix_hashes=len(BLOCKS), now=0.0, ttl_s=bad)
    assert len(table) == 0
