"""Emptying an instance before it goes: what an operator says, and what is told of it."""

from dataclasses import dataclass

from kvferry.proto.ids import Incarnation, InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Let an instance do nothing new, move what only it holds to peers, and go.

    It goes when all that can move has moved, its requests have ended and nobody has a lease on it,
    or `deadline_s` seconds from now. With `incarnation` only that life of it is meant. It may be
    said again, to hear how far it is: of several deadlines the first to come counts.
    """

    instance_id: InstanceId
    incarnation: Incarnation | None = None
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """How much has come to one peer: whole blocks, and the bytes that these take on all ranks."""

    instance_id: InstanceId
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How far the drain of an instance is, after `seconds`; at its end when `is_over`.

    Counts in blocks: `num_cached_blocks` were held when it began. `num_elsewhere` of those looked
    at until now were held by a peer, too, so nobody moved them. `num_waiting` are planned or on
    their way. `num_dropped`, only at the end: held by nobody any more. `num_requests` still run.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    is_over: bool
    seconds: float
    num_cached_blocks: int
    moved: tuple[Moved, ...]
    num_elsewhere: int
    num_waiting: int
    num_dropped: int
    num_requests: int
