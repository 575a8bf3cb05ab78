"""The engine loop: one thread that runs the model and publishes tokens.

The coordinator is asked in the background, one question at a time. A request that has slots goes on
meanwhile, so decoding waits for an answer only where slots could not be granted ahead. One that was
restarted is told what there is (`membership.py`) while they go on.

Decisions are the scheduler's and the coordinator's; this file moves data between them, the model
runner and the worker, in the order that keeps the cache right (docs/architecture.md, "Written,
resident, findable").
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from kvferry.cluster.ports import CoordinatorPort
from kvferry.cluster.serving.limits import Limits, require_fits
from kvferry.cluster.serving.load_orders import LoadOrder, load_result
from kvferry.cluster.serving.membership import Membership, Stage
from kvferry.cluster.serving.move_pulls import MovePulls, Puller
from kvferry.cluster.serving.outbox import Outbox
from kvferry.cluster.serving.pulse import HANGS_AFTER_S, Passes, Pulse
from kvferry.cluster.serving.requests import EngineRequest, Output, OutputBatch
from kvferry.cluster.serving.scheduler import Scheduler
from kvferry.cluster.serving.sequence import Run
from kvferry.proto.errors import (
    ConfigError,
    DeadlineError,
    DrainedError,
    InstanceDiedError,
    InstanceDrainedError,
    KvferryError,
    UnavailableError,
)
from kvferry.proto.ids import BlockHash, BlockId, GroupId, RequestId
from kvferry.proto.messages import InstanceInfo, Registered
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import LoadResult, Step, StepReply
from kvferry.worker.inventory import InventoryPart
from kvferry.worker.pull import failed_pull

log = logging.getLogger(__name__)

NOTHING_FITS_PAUSE_S = 0.01
FOLLOW_PAUSE_S = 0.01
"""So often is asked how far prefills are that requests follow, if nothing else is to be asked."""

IDLE_STEP_S = 1.0
"""So often an idle engine asks for nothing, to hear whether it has to come back."""

IDLE_WAIT_S = 0.5
ANSWER_GRACE_S = 0.005
"""Those who can go on wait so long for those who cannot: one pass for all is cheaper than two."""

MAX_PARALLEL_LOADS = 4


class BlockMover(Puller, Protocol):
    """What the engine needs from whoever holds its KV tensors: all ranks of its instance."""

    def written(self, group_id: GroupId, pairs: Iterable[tuple[BlockHash, BlockId]]) -> None:
        """Blocks of a group are completely written and may be served to peers."""

    def reused(self, block_ids: tuple[BlockId, ...]) -> None:
        """Blocks are about to get other content and must not be served any more."""

    def inventory(self, max_blocks: int) -> Iterator[InventoryPart]:
        """Yield all that may be served to peers now, in parts of at most so many blocks."""


Forward = Callable[[tuple[Run, ...]], dict[RequestId, int]]
"""Run slices through the model; return the chosen token of each run that samples."""


class Engine:
    """Queues, loop and outbox of one instance.

    Args:
        info: the instance as it was registered.
        registered: what came of that.
        coordinator: asked in the background, one question at a time, where slots are needed.
        mover: moves the blocks of the KV tensors, on every rank.
        forward: runs the model over slices and samples.
        hangs_after_s: so long that may take; see `Pulse`.
    """

    def __init__(
        self,
        *,
        info: InstanceInfo,
        registered: Registered,
        limits: Limits,
        scheme: HashScheme,
        eos_token_ids: frozenset[int],
        coordinator: CoordinatorPort,
        mover: BlockMover,
        forward: Forward,
        hangs_after_s: float = HANGS_AFTER_S,
    ) -> None:
        self._info = info
        self._limits = limits
        self._membership = Membership(info, registered.epoch, coordinator)
        self._passes = Passes()
        self._pulse = Pulse(
            info,
            coordinator,
            lambda: self._membership.epoch,
            passes=self._passes,
            hangs_after_s=hangs_after_s,
            on_death=self._hangs,
        )
        self._mover = mover
        self._forward = forward
        self._scheduler = Scheduler(
            limits=limits,
            scheme=scheme,
            eos_token_ids=eos_token_ids,
            tells_content=registered.wants_content,
        )
        self._moves = MovePulls(mover, self._notify, self.fail)
        self._outbox = Outbox(info.instance_id)
        self._wake = threading.Condition()
        self._inbox: deque[EngineRequest | RequestId] = deque()
        self._loads_ended: deque[tuple[LoadResult, int]] = deque()
        self._cancels: dict[RequestId, threading.Event] = {}
        self._stopping = False
        self._failure: KvferryError | None = None
        self._in_flight: set[RequestId] = set()
        self._num_steps = 0
        self._asking: Future[StepReply | None] | None = None
        self._nothing_came = False
        self._asked_s = 0.0
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="kvferry-step")
        self._loaders = ThreadPoolExecutor(MAX_PARALLEL_LOADS, thread_name_prefix="kvferry-load")
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()
        self._pulse.start()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            ConfigError, PromptTooLongError, NeverFitsError: it can never run here, or its id is
                that of a request in flight.
            InstanceDiedError: the loop has failed.
        """
        require_fits(request, self._limits)
        self._outbox.require_alive()
        with self._wake:
            if request.request_id in self._in_flight:
                raise ConfigError(
                    "a request of this id is in flight",
                    given=request.request_id,
                    allowed="an id of its own",
                )
            self._in_flight.add(request.request_id)
            self._inbox.append(request)
            self._wake.notify_all()

    def abort(self, request_id: RequestId) -> None:
        """End a request early; unknown ids are ignored."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify_all()

    def outputs(self, since_seq: int, wait_s: float) -> OutputBatch:
        """Return news from `since_seq` on, waiting up to `wait_s`; earlier news is forgotten."""
        return self._outbox.take(since_seq, wait_s)

    def require_alive(self) -> None:
        """Raise if the loop has failed.

        Raises:
            InstanceDiedError: naming the instance and the reason.
        """
        self._outbox.require_alive()

    def fail(self, error: KvferryError) -> None:
        """End the loop with an error, as if it had met it: the instance cannot go on."""
        with self._wake:
            self._failure = error
            self._wake.notify_all()

    def stop(self, timeout_s: float) -> None:
        """End the loop and its loads; requests in flight get no further news."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._give_up()
        self._thread.join(timeout_s)

    # ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._advance()
        except DrainedError as error:
            log.warning("engine of %s ends: %s", self._info.instance_id, error)
            self._outbox.fail(f"{type(error).__name__}: {error}", InstanceDrainedError, error)
        except Exception as error:  # the loop's end must be told, whatever it was
            log.exception("engine of %s failed", self._info.instance_id)
            self._outbox.fail(f"{type(error).__name__}: {error}", cause=error)
        finally:
            self._pulse.stop()
            # What the loop has begun since it was stopped must end, too; it begins nothing more.
            self._give_up()
            self._moves.stop()
            self._loaders.shutdown(wait=False, cancel_futures=True)
            self._asker.shutdown(wait=False, cancel_futures=True)

    def _give_up(self) -> None:
        """Let loads, moves and whoever asks the coordinator end soon."""
        for cancel in list(self._cancels.values()):
            cancel.set()
        self._moves.cancel()
        self._membership.stop()

    def _advance(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._asking is not None and self._asking.done():
            self._take_answer(self._asking.result())
        if self._asking is None:
            self._take_in()
        runs = self._scheduler.next_runs()
        if not runs and self._nothing_came:
            self._pause(NOTHING_FITS_PAUSE_S)
            self._nothing_came = False
            return
        if self._asking is None and self._has_question():
            self._asked_s = time.monotonic()
            self._asking = self._asker.submit(self._next_question())
            if self._scheduler.lacks_slots() and self._is_answered(ANSWER_GRACE_S):
                return
        if runs:
            self._compute(runs)
        elif self._asking is not None:
            self._is_answered(IDLE_WAIT_S)
        else:
            self._pause(FOLLOW_PAUSE_S if self._scheduler.follows_prefills() else IDLE_WAIT_S)

    def _has_question(self) -> bool:
        """Tell whether the coordinator must be asked, or told, something now."""
        if self._membership.stage is not Stage.MEMBER:
            # What loads still write could be told neither as held nor as free.
            return not self._cancels and self._moves.are_closed()
        since_s = time.monotonic() - self._asked_s
        return self._scheduler.may_ask_before_computing() and (
            self._scheduler.must_ask()
            or self._moves.any_ended()
            or (since_s >= FOLLOW_PAUSE_S and self._scheduler.follows_prefills())
            or since_s >= IDLE_STEP_S
        )

    def _next_question(self) -> Callable[[], StepReply | None]:
        match self._membership.stage:
            case Stage.MEMBER:
                return partial(self._membership.ask, self._next_step())
            case Stage.LOST:
                return partial(self._membership.tell_blocks, self._mover.inventory)
            case Stage.BLOCKS_TOLD:
                self._moves.take_ended()  # told as what is held
                return partial(self._membership.tell_requests, self._scheduler.start_over())

    def _is_answered(self, timeout_s: float) -> bool:
        """Wait for the answer to the question that is out, and tell whether it came."""
        assert self._asking is not None
        return bool(wait([self._asking], timeout=timeout_s).done)

    def _take_in(self) -> None:
        with self._wake:
            inbox, self._inbox = list(self._inbox), deque()
            ended, self._loads_ended = list(self._loads_ended), deque()
        for result, pulled_bytes in ended:
            self._cancels.pop(result.request_id, None)
            self._scheduler.load_ended(result, pulled_bytes)
        for item in inbox:
            if isinstance(item, EngineRequest):
                self._scheduler.add(item)
            else:
                self._cancel_load(self._scheduler.abort(item))
        self._publish(self._scheduler.take_outputs())

    def _take_answer(self, reply: StepReply | None) -> None:
        self._asking = None
        if reply is not None:
            self._take_reply(reply)
        elif self._membership.stage is Stage.LOST:
            # Their sources are not leased any more, nor their destinations theirs.
            for request_id in self._scheduler.cancel_loads():
                self._cancel_load(request_id)
            self._moves.cancel()

    def _take_reply(self, reply: StepReply) -> None:
        work = self._scheduler.apply(reply)
        self._mover.reused(work.reused_block_ids)
        for order in work.loads:
            self._cancels[order.load.request_id] = threading.Event()
            self._loaders.submit(self._load, order, self._cancels[order.load.request_id])
        for request_id in work.cancel_loads:
            self._cancel_load(request_id)
        self._moves.begin(reply.moves)
        self._nothing_came = not (reply.scheduled or reply.loads or reply.prefill_over)
        self._publish(self._scheduler.take_outputs())

    def _compute(self, runs: tuple[Run, ...]) -> None:
        with self._passes.one():
            tokens = self._forward(runs)
        written = self._scheduler.computed(tokens)
        for group_id, blocks in groupby(sorted(written), key=attrgetter("group_id")):
            self._mover.written(group_id, ((b.block_hash, b.block_id) for b in blocks))
        self._publish(self._scheduler.take_outputs())

    def _hangs(self) -> None:
        """Tell that the instance is dead, as the loop cannot; it ends if its pass ever does."""
        error = UnavailableError("a pass through the model does not end")
        self._outbox.fail(f"{type(error).__name__}: {error}")
        self.fail(error)

    def _publish(self, outputs: tuple[Output, ...]) -> None:
        with self._wake:
            self._in_flight -= {o.request_id for o in outputs if o.finished is not None}
        self._outbox.put(outputs)

    def _next_step(self) -> Step:
        self._num_steps += 1
        info = self._info
        step = self._scheduler.build_step(
            call_id=f"{info.instance_id}/{info.incarnation}/step/{self._num_steps}",
            epoch=self._membership.epoch,
            instance_id=info.instance_id,
            incarnation=info.incarnation,
        )
        return replace(step, moves_ended=self._moves.take_ended())

    def _load(self, order: LoadOrder, cancel: threading.Event) -> None:
        load = order.load
        try:
            outcome = self._mover.pull(
                source=load.source,
                lease_id=load.lease_id,
                loads=order.loads,
                timeout_s=load.ttl_s,
                cancel=cancel,
            )
        except (InstanceDiedError, DeadlineError) as error:
            # A rank may still write into the blocks: nobody may hear that they are free.
            self.fail(error)
            return
        except Exception as failure:  # a lost result would hold the request for ever
            log.exception("load of %s failed", load.request_id)
            outcome = failed_pull(failure, len(order.loads))
        result = load_result(order, outcome, self._limits)
        with self._wake:
            self._loads_ended.append((result, outcome.num_bytes))
            self._wake.notify_all()

    def _cancel_load(self, request_id: RequestId | None) -> None:
        if request_id is not None and request_id in self._cancels:
            self._cancels[request_id].set()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _pause(self, timeout_s: float) -> None:
        with self._wake:
            if not (
                self._inbox
                or self._loads_ended
                or self._stopping
                or self._failure
                or (self._moves.any_ended() and self._membership.stage is Stage.MEMBER)
            ):
                self._wake.wait(timeout_s)
