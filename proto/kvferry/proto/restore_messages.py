"""What a member that comes back tells the coordinator of what it holds: frozen values.

After a restart the coordinator knows nothing of its members. One that comes back registers as
`returning`, tells its blocks in any number of `RestoreBlocks`, and then its running requests in
one `RestoreRequests` or more; with the last of these it is a member like any other.

Each of these names its `registration`, the call_id of the `RegisterInstance` that it belongs to.
One that comes late, when the member has registered once more, changes nothing.
"""

from dataclasses import dataclass

from kvferry.proto.ids import (
    BlockHash,
    BlockId,
    Epoch,
    GroupId,
    Incarnation,
    InstanceId,
    RequestId,
)
from kvferry.proto.step_messages import RequestContent

MAX_RESTORED_BLOCKS = 65_536
"""Most blocks of one `RestoreBlocks`: it has some 2 MiB then, and keeps nobody waiting for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreBlocks:
    """These blocks of a group are completely written on every rank and hold these hashes' content.

    `block_ids[i]` holds `hashes[i]`; at most `MAX_RESTORED_BLOCKS`, each told once. Those told
    first are evicted first. `num_resets`: how many resets a store knows of (`Registered`).
    """

    call_id: str
    epoch: Epoch
    instance_id: InstanceId
    incarnation: Incarnation
    registration: str
    group_id: GroupId
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId, ...]
    num_resets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRequest:
    """A running request: slots of tokens `[0, num_computed_tokens)` are written on every rank.

    `hashes` are those of all full hash blocks of its `num_tokens` tokens. `block_ids` are its whole
    tables, one per group. What no later token of a group attends to does not count, whatever the
    table names there. `content` as in `AdmitAsk`.
    """

    request_id: RequestId
    num_tokens: int
    num_computed_tokens: int
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[tuple[BlockId, ...], ...]
    content: RequestContent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequests:
    """These requests run at the instance, and their blocks are theirs.

    With `is_last` the instance has told everything. A member without requests says so with none.
    """

    call_id: str
    epoch: Epoch
    instance_id: InstanceId
    incarnation: Incarnation
    registration: str
    requests: tuple[RestoredRequest, ...] = ()
    is_last: bool = True
