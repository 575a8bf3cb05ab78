"""What must hold after every command; each check names both sides when it does not."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvferry.coordinator.handoff import HandoffState
from kvferry.coordinator.instances import Instance
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import NULL_BLOCK, BlockHash, BlockId, GroupedHash
from kvferry.proto.shared_chain import block_keys

if TYPE_CHECKING:
    from kvferry.coordinator.service import CoordinatorService
    from kvferry.coordinator.state import ServiceState

_Entries = dict[GroupedHash, tuple[BlockId, ...]]
"""What a pool's index has: each key with its blocks."""


def check(service: CoordinatorService) -> None:
    """Check every pool, the location index, the leases and the handoffs.

    Raises:
        InvariantError: naming what was found and what had to be.

    """
    state = service.state
    _require_equal("members of the location index", state.index.members(), set(state.instances))
    for instance in state.instances.values():
        entries = dict(instance.manager.pool.index_items())
        _check_counts(instance)
        _check_index(instance, entries)
        _check_location(state, instance, entries)
        _check_owners(state, instance)
        _check_written(instance)
        _check_flights(instance)
        _check_accounts(instance)
    _check_promises(state)
    _check_silence(state)


def _require_equal(what: str, found: object, must_be: object) -> None:
    if found != must_be:
        raise InvariantError(what, given=str(found), allowed=str(must_be))


def _check_counts(instance: Instance) -> None:
    pool, name = instance.manager.pool, instance.info.instance_id
    order = list(pool.free_order())
    _require_equal(f"{name}: length of the free queue", len(order), pool.num_free_blocks)
    _require_equal(f"{name}: distinct free blocks", len(set(order)), len(order))
    unreferenced = {
        BlockId(block) for block in range(1, pool.num_blocks) if pool.ref_count(BlockId(block)) == 0
    }
    _require_equal(f"{name}: free blocks and blocks without reference", set(order), unreferenced)
    _require_equal(f"{name}: references to the null block", pool.ref_count(NULL_BLOCK), 0)
    referenced = pool.num_blocks - 1 - len(unreferenced)
    _require_equal(
        f"{name}: free + referenced + null", len(order) + referenced + 1, pool.num_blocks
    )
    _require_equal(f"{name}: usage within 0..1", 0.0 <= pool.usage <= 1.0, True)
    _require_equal(f"{name}: blocks freed twice", pool.num_refused_frees, 0)


def _check_index(instance: Instance, entries: _Entries) -> None:
    pool, name = instance.manager.pool, instance.info.instance_id
    indexed = {block: key for key, blocks in entries.items() for block in blocks}
    carried = {
        BlockId(block): key
        for block in range(pool.num_blocks)
        if (key := pool.key_of(BlockId(block))) is not None
    }
    _require_equal(f"{name}: indexed blocks and blocks with a hash", indexed, carried)
    num_entries = sum(map(len, entries.values()))
    _require_equal(f"{name}: number of cached blocks", pool.num_cached_blocks, num_entries)


def _check_location(state: ServiceState, instance: Instance, entries: _Entries) -> None:
    name = instance.info.instance_id
    held = {key: len(blocks) for key, blocks in entries.items()}
    _require_equal(f"{name}: location index and pool", state.index.copies_of(name), held)


def _check_owners(state: ServiceState, instance: Instance) -> None:
    """Every reference has an owner, and blocks to be written have one owner at most."""
    pool, name = instance.manager.pool, instance.info.instance_id
    owners: Counter[BlockId] = Counter()
    unwritten: set[BlockId] = set()
    for group in instance.manager.groups:
        for request_id, table in group.tables():
            _require_equal(
                f"{name}: table of request {request_id}", request_id in instance.requests, True
            )
            owners.update(block for block in table if block != NULL_BLOCK)
            num_written = instance.requests[request_id].num_computed_tokens // group.block_tokens
            unwritten.update(block for block in table[num_written:] if block != NULL_BLOCK)
    for block in unwritten:
        if owners[block] > 1:
            raise InvariantError(f"{name}: unwritten block {block} is in {owners[block]} tables")
    for lease in state.leases.live():
        if lease.instance_id == name:
            owners.update(lease.block_ids)
    for reservation in instance.reservations.values():
        owners.update(reservation.kept)
        owners.update(block for block in reservation.block_ids if block is not None)
    references = Counter(
        {
            BlockId(block): count
            for block in range(1, pool.num_blocks)
            if (count := pool.ref_count(BlockId(block)))
        }
    )
    _require_equal(f"{name}: references and their owners", references, owners)


def _check_written(instance: Instance) -> None:
    pool, name = instance.manager.pool, instance.info.instance_id
    for request_id, request in instance.requests.items():
        num_written = request.num_computed_tokens // instance.block_tokens
        tables = instance.tables(request_id)
        for block in (block for table in tables for block in table[num_written:]):
            if pool.key_of(block) is not None:
                raise InvariantError(
                    f"{name}: block {block} of request {request_id} is findable and not written",
                    given=pool.key_of(block),
                    allowed=f"{num_written} written blocks",
                )
    for reservation in instance.reservations.values():
        for reserved in reservation.block_ids:
            if reserved is not None and pool.key_of(reserved) is not None:
                raise InvariantError(f"{name}: reserved block {reserved} is findable")
    loading = set(instance.loads)
    _require_equal(f"{name}: loads of unknown requests", loading - set(instance.requests), set())


def _check_flights(instance: Instance) -> None:
    """No block is fetched twice at once, where a part of another load is of use."""
    if not instance.takes_partial_loads:
        return
    flights: Counter[BlockHash] = Counter()
    for request_id, load in instance.loads.items():
        covered, hash_tokens = instance.hashes_per_block, instance.hash_block_tokens
        start, end = load.hit_tokens // hash_tokens, load.asked_tokens // hash_tokens
        flights.update(block_keys(instance.requests[request_id].hashes[start:end], covered))
    for block_hash, count in flights.items():
        _require_equal(
            f"{instance.info.instance_id}: loads that bring block {block_hash.hex()}", count, 1
        )


def _check_accounts(instance: Instance) -> None:
    stats, name = instance.stats(), instance.info.instance_id
    pending = stats.first.pending + stats.preempted.pending
    _require_equal(
        f"{name}: requested tokens that have not come", pending, instance.accounts.num_pending()
    )
    for counts in (stats.first, stats.preempted):
        _require_equal(f"{name}: hit rate within 0..1", 0.0 <= counts.hit_rate <= 1.0, True)


def _check_promises(state: ServiceState) -> None:
    for lease in state.leases.live():
        instance = state.instances.get(lease.instance_id)
        if instance is None:
            raise InvariantError(f"{lease.lease_id} is on a gone instance", given=lease.instance_id)
        for block in lease.block_ids:
            if instance.manager.pool.ref_count(block) < 1:
                raise InvariantError(f"{lease.lease_id} is on a free block", given=block)
    for request_id, handoff in state.handoffs.items():
        _require_equal(f"handoff of {request_id} is live", handoff.is_live, True)
        _require_equal(
            f"handoff of {request_id}: has had a lease",
            handoff.lease_id is not None,
            handoff.state is not HandoffState.OPEN,
        )
        for side in (handoff.prefill_instance, handoff.decode_instance):
            _require_equal(
                f"handoff of {request_id}: {side} is live", side in state.instances, True
            )


def _check_silence(state: ServiceState) -> None:
    """Members are heard in time, and suspects are those who are late."""
    silence = state.silence
    for instance_id, instance in state.instances.items():
        silent_s = silence.of(instance)
        _require_equal(
            f"{instance_id}: silent for 0 s and less than {silence.dead_after_s:g} s",
            0.0 <= silent_s < silence.dead_after_s,
            True,
        )
        _require_equal(
            f"{instance_id}: a suspect after {silent_s:g} s",
            instance.is_suspect,
            silent_s >= silence.suspect_after_s,
        )
