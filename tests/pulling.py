"""Pulling whole blocks from a peer of one's own layout, as tests of transfers do."""

import threading
from collections.abc import Sequence

from kvferry.proto.ids import Incarnation, InstanceId, LeaseId
from kvferry.proto.layout import Layout
from kvferry.proto.step_messages import Source
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.pull import BlockRun, PullOutcome
from kvferry.worker.service import WorkerService


def pull_blocks(
    worker: WorkerService,
    address: str,
    runs: Sequence[BlockRun],
    *,
    incarnation: int = 1,
    lease_id: str = "lease-1",
    timeout_s: float = 20.0,
    cancel: threading.Event | None = None,
    layout: Layout | None = None,
) -> PullOutcome:
    """Let a worker of one rank pull the runs from the one at `address`, of its own layout or one
    that has the same blocks."""
    return worker.pull(
        source=Source(
            instance_id=InstanceId("peer"),
            incarnation=Incarnation(incarnation),
            layout=layout or worker.memory.layout,
            rank_addresses=(address,),
        ),
        lease_id=LeaseId(lease_id),
        loads=[
            GroupLoad(
                group_id=run.group_id,
                first_block=0,
                block_ids=run.block_ids,
                hashes=run.hashes,
                first_source_block=0,
                source_hashes=run.hashes,
            )
            for run in runs
        ],
        timeout_s=timeout_s,
        cancel=cancel or threading.Event(),
    )
