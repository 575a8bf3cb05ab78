"""How long it takes to tell a restarted coordinator what an engine holds: all but the network."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kvferry.cluster.bench.rows import Row, elapsed_ns, measure_alone
from kvferry.cluster.bench.step_cycle import SCHEME, registration
from kvferry.cluster.serving.membership import Membership, Stage
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, Epoch, pack_group
from kvferry.proto.messages import Command, Reply
from kvferry.proto.packed_messages import pack_command, pack_reply, unpack_command, unpack_reply
from kvferry.worker.inventory import inventory_parts
from kvferry.worker.residency import Residency

NUM_BLOCKS = 1_000_000
MIN_ROUNDS = 3
"""Each takes seconds."""


class _Coordinator:
    """`CoordinatorPort` to a service that knows of nobody; each message is packed and unpacked."""

    def __init__(self) -> None:
        self.service = CoordinatorService(scheme=SCHEME, epoch=Epoch(1))

    def call(self, command: Command, *, timeout_s: float) -> Reply:
        del timeout_s
        reply, _ = self.service.handle(unpack_command(pack_command(command)), 0.0)
        return unpack_reply(pack_reply(reply))


def restore_rows(seconds: float, num_blocks: int = NUM_BLOCKS) -> Iterator[Row]:
    """Yield `restore_1000000`: ms to tell so many blocks, in the disorder of a pool in use.

    Raises:
        InvariantError: not all of them can be found afterwards.
    """
    residency = _resident(num_blocks)
    info = replace(registration().info, num_blocks=num_blocks + 1)

    def restore_ms() -> float:
        coordinator = _Coordinator()
        membership = Membership(info, Epoch(1), coordinator)

        def tell() -> None:
            membership.tell_blocks(partial(inventory_parts, residency))
            membership.tell_requests(())

        took_ms = elapsed_ns(tell) / 1e6
        (instance,) = coordinator.service.state.instances.values()
        found = instance.manager.pool.num_cached_blocks
        if membership.stage is not Stage.MEMBER or found != num_blocks:
            raise InvariantError("not all blocks are back", given=found, allowed=num_blocks)
        return took_ms

    name = f"restore_{num_blocks}"
    yield measure_alone(
        name, restore_ms, unit="ms", better="lower", seconds=seconds, min_rounds=MIN_ROUNDS
    )


def _resident(num_blocks: int) -> Residency:
    order = random.Random(num_blocks)
    residency = Residency(num_blocks + 1)
    block_ids = list(range(1, num_blocks + 1))
    order.shuffle(block_ids)
    residency.mark_written(
        (pack_group(BlockHash(order.randbytes(32)), FIRST_GROUP), BlockId(block))
        for block in block_ids
    )
    return residency
