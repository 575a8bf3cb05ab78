"""What one engine step says to the coordinator, and what it is told to run: frozen values.

The other commands and replies are in `messages`.
"""

from dataclasses import dataclass

from kvferry.proto.extra_keys import NO_KEYS, RequestKeys
from kvferry.proto.ids import (
    BlockHash,
    BlockId,
    Epoch,
    GroupId,
    Incarnation,
    InstanceId,
    LeaseId,
    RequestId,
)
from kvferry.proto.layout import Layout

MAX_MOVES = 2
"""Of an instance at once: one is on its way while the next one is being asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContent:
    """What a request's hashes were made of, for KV events: its tokens so far and its keys.

    `lora_id` is the engine's own number of the adapter.
    """

    tokens: tuple[int, ...]
    keys: RequestKeys = NO_KEYS
    lora_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What was written for one request since the last report.

    Slots of tokens `[0, num_computed_tokens)` are written on every rank. `new_hashes` are the
    hashes of the full hash blocks that exist since the last report (not necessarily written),
    `new_tokens` the tokens that exist since then; only of a request that was asked in with content.
    """

    request_id: RequestId
    num_tokens: int
    num_computed_tokens: int
    new_hashes: tuple[BlockHash, ...] = ()
    new_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """Why a load brought less than was asked for.

    `error_type`: class name of the error (`kvferry.proto.errors`), or "Cancelled". `block` is the
    one that the error is about: the request's block of that number, in the taker's blocks, of
    group `group_id`. What else did not come are the blocks after `LoadResult.num_computed_tokens`.
    """

    error_type: str
    message: str
    group_id: GroupId
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """A load has ended and its writer is closed, whatever the outcome.

    `num_computed_tokens`: tokens in place counted from the prompt's start (local hit + whole
    verified blocks that arrived in order). `failure` is None when everything asked for arrived.

    With one group of full attention a part of what was asked for is of use. With other groups a
    part is not: report the hit's tokens then.

    After a failure the reply names the request in `loads` again if another holder is to bring the
    rest. Otherwise a part is computed upon; a request that has no use for it gives its blocks back,
    is named in `preempted`, and is better asked for with `allow_remote=False` the next time.
    """

    request_id: RequestId
    num_computed_tokens: int
    failure: LoadFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnd:
    """A move has ended and its writer is closed, whatever the outcome.

    The blocks of its first `num_written` hashes are completely here, on every rank.
    """

    reservation_id: LeaseId
    num_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A request has ended here; its blocks go back (cached ones stay findable).

    With `handoff`, the blocks of its computed full blocks are leased for the decode side first.
    """

    request_id: RequestId
    handoff: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAsk:
    """A running request wants its slots extended so that `target_tokens` can be computed."""

    request_id: RequestId
    target_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitAsk:
    """A waiting request wants in.

    `hashes` covers all full hash blocks of its `num_tokens` known tokens (prompt and, after a
    preemption or a move, generated ones). Tokens `[0, target_tokens)` are to be computed here.
    `resumed` marks a request that was admitted here before and lost its blocks: its tokens are
    counted apart (`InstanceStats.preempted`). `ahead_tokens`: so many of the tokens that it finds
    here were loaded ahead for it. `content` holds all `num_tokens` tokens, and is only sent where
    `Registered.wants_content` says so.
    """

    request_id: RequestId
    num_tokens: int
    target_tokens: int
    hashes: tuple[BlockHash, ...]
    resumed: bool = False
    allow_remote: bool = True
    ahead_tokens: int = 0
    content: RequestContent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One engine step, whatever the number of requests in it.

    The coordinator applies, in order: `load_results`, `moves_ended`, `progress`, `releases`, then
    lets failed loads go on at other holders, then grants slots to `running` (first to last; when
    blocks run out, loads in flight are cancelled first, then the *last* running request is
    preempted; one that loads again is passed over), then admits `waiting` from the front until one
    does not fit. The engine expresses its policy (first come first served, priority) by the order
    alone.

    `follows`: requests that a prefill instance computes meanwhile, each said once, as they would
    ask for admission. After all others they get loads that are `ahead`, in this step and later
    ones, until they are released or named in `prefill_over`.

    `token_budget`: tokens that may be computed in this step, over all requests. `ahead_tokens`:
    slots that a request would like beyond its target, so that the tokens it generates next need no
    call; granted while blocks are plenty.
    """

    call_id: str
    epoch: Epoch
    instance_id: InstanceId
    incarnation: Incarnation
    load_results: tuple[LoadResult, ...] = ()
    moves_ended: tuple[MoveEnd, ...] = ()
    progress: tuple[Progress, ...] = ()
    releases: tuple[Release, ...] = ()
    running: tuple[RunningAsk, ...] = ()
    waiting: tuple[AdmitAsk, ...] = ()
    follows: tuple[AdmitAsk, ...] = ()
    token_budget: int
    ahead_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A request may compute its tokens `[num_computed_tokens, granted_tokens)`: it has the slots.

    Beyond the tokens that exist now, these are slots granted ahead: as tokens are generated they
    may be computed without asking. `new_block_ids` are appended to the block table of each group.
    On admission they are the whole tables, of which the first `num_hit_blocks` positions of every
    group hold cached content and must not be overwritten. A position that no later token of its
    group attends to holds the null block.
    """

    request_id: RequestId
    num_computed_tokens: int
    granted_tokens: int
    new_block_ids: tuple[tuple[BlockId, ...], ...]
    num_hit_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where blocks can be fetched: an instance in one life.

    `rank_addresses`: `host:port` of the transfer server of each rank of `layout`, rank 0 first.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    layout: Layout
    rank_addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What lies after block `num_hit_blocks` of a request is to come from a peer.

    The request is admitted by this, or was before: then an earlier load of it has ended, and its
    first `num_hit_blocks` blocks are in place.

    `block_ids` are the request's tables up to the end of this load, one per group and equally long;
    where a group's table holds the null block, it needs nothing. The destination blocks are
    reserved and not findable. The request joins the running ones once its `LoadResult` has been
    reported.

    These are the taker's blocks; the source's may cover other numbers of hashes. Its blocks that
    hold any of the positions needed are leased for `ttl_s` more seconds. With one group of full
    attention the last of them may end after the prefix, under a later hash of the request.

    With `ahead` the request follows a prefill and is not admitted: once its `LoadResult` has been
    reported, what arrived can be found here, and the request has no blocks and goes on following.
    """

    request_id: RequestId
    block_ids: tuple[tuple[BlockId, ...], ...]
    num_hit_blocks: int
    source: Source
    lease_id: LeaseId
    ttl_s: float
    ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An instance is to pull blocks of a group from a peer, for no request of its own.

    `hashes` are those of whole blocks, which cover as many tokens at both sides; they need not be a
    chain. `block_ids` are reserved for them here until the reservation ends, and what they held is
    forgotten. The source's are leased for `ttl_s` more seconds. What the taker wrote under less
    than `num_resets` resets of its identity is to be forgotten.

    Its end is told in `Step.moves_ended`, by a store with `EndReservation`.
    """

    reservation_id: LeaseId
    group_id: GroupId
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId, ...]
    source: Source
    lease_id: LeaseId
    ttl_s: float
    num_resets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReply:
    """What to run in this step.

    `preempted`: these gave all blocks back and go to the head of the waiting queue.
    `cancel_loads`: stop these loads, wait until their writer is closed, report a `LoadResult`, and
    treat the request as preempted then (it appears in a later reply's `preempted`). One of them may
    be among this reply's `loads`. One whose load is `ahead` goes on following instead.
    `prefill_over`: these follow no prefill any more, however it ended: ask for their admission.
    `moves`: pull these, too, whatever is running.
    """

    scheduled: tuple[Scheduled, ...] = ()
    loads: tuple[Load, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    cancel_loads: tuple[RequestId, ...] = ()
    prefill_over: tuple[RequestId, ...] = ()
    moves: tuple[Move, ...] = ()
