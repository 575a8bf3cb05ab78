"""The engine's queues: what to ask the coordinator for, what its answer means, what to run.

Pure: no model, no clock, no threads. The engine loop drives it:

    step = scheduler.build_step(...)      -> coordinator, in the background -> reply
    work = scheduler.apply(reply)         -> loads, blocks with new content
    runs = scheduler.next_runs()          -> forward pass
    scheduler.computed(tokens)            -> outputs, blocks now written

Between `build_step` and `apply` only `next_runs` and `computed` may be called: requests that have
slots go on, nothing else changes. A step that was not taken, because the coordinator was restarted,
ends with `start_over` instead, and so does what that returns.

The policy is expressed by order alone: the coordinator serves running requests first to last and
preempts from the end.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvferry.cluster.serving.endings import Endings
from kvferry.cluster.serving.followers import Followers
from kvferry.cluster.serving.limits import Limits
from kvferry.cluster.serving.load_orders import LoadOrder, load_order
from kvferry.cluster.serving.requests import (
    NOTHING_NEEDED,
    EngineRequest,
    FinishReason,
    Output,
)
from kvferry.cluster.serving.sequence import Run, WrittenBlock
from kvferry.cluster.serving.sequence import Sequence as RequestSequence
from kvferry.proto.ids import (
    BlockId,
    Epoch,
    Incarnation,
    InstanceId,
    RequestId,
)
from kvferry.proto.restore_messages import RestoredRequest
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import (
    Load,
    LoadResult,
    RunningAsk,
    Scheduled,
    Step,
    StepReply,
)

AHEAD_BLOCKS = 2
"""Blocks that a running request would like ahead; the coordinator is asked when half are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine does with one reply, in this order.

    Drop residency of `reused_block_ids`, start `loads`, stop `cancel_loads`.
    """

    reused_block_ids: tuple[BlockId, ...]
    loads: tuple[LoadOrder, ...]
    cancel_loads: tuple[RequestId, ...]


class Scheduler:
    """Queues of one engine. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        *,
        limits: Limits,
        scheme: HashScheme,
        eos_token_ids: frozenset[int],
        tells_content: bool = False,
    ) -> None:
        """Start with empty queues; `tells_content`: KV events want the requests' tokens."""
        self._limits = limits
        self._tells_content = tells_content
        self._scheme = scheme
        self._eos = eos_token_ids
        self._ahead_tokens = AHEAD_BLOCKS * limits.block_tokens
        self._waiting: deque[RequestSequence] = deque()
        self._running: list[RequestSequence] = []
        self._loading: dict[RequestId, RequestSequence] = {}
        self._followers = Followers()
        # Written to since the last report, in order.
        self._written: dict[RequestId, RequestSequence] = {}
        self._load_results: list[LoadResult] = []
        self._runs: list[tuple[RequestSequence, int]] = []
        self._outputs: list[Output] = []
        self._endings = Endings()

    def add(self, request: EngineRequest) -> None:
        """Queue a request that fits (`require_fits`), with an id that no other one here has."""
        sequence = RequestSequence(
            request, self._scheme, self._limits.block_tokens, len(self._limits.specs)
        )
        if sequence.target_tokens == 0:
            # A prefill of less than one full block.
            self._outputs.append(sequence.ended("prefilled"))
            return
        reason = sequence.end_reason(self._eos)
        if reason is not None:
            # It came with its last token: its engine died before telling the end.
            self._outputs.append(sequence.ended(reason, NOTHING_NEEDED))
            return
        if request.follows_prefill:
            self._followers.add(sequence)
        else:
            self._waiting.append(sequence)
            self._sort()

    def abort(self, request_id: RequestId) -> RequestId | None:
        """End a request early; unknown ids are ignored.

        Returns the id of a load that the caller must stop, if one is in flight.
        """
        if request_id in self._loading:
            self._loading[request_id].aborted = True
            return request_id
        running, waiting = _find(self._running, request_id), _find(self._waiting, request_id)
        if request_id in self._followers:
            self._end_follower(request_id)
        elif running is not None:
            self._end(running, "aborted")
        elif waiting is not None:
            self._waiting.remove(waiting)
            self._outputs.append(waiting.ended("aborted"))
        return None

    def load_ended(self, result: LoadResult, pulled_bytes: int) -> None:
        """Note that a load's writer is closed; unknown ids are ignored.

        After a failure the next reply may make the request load again.
        """
        sequence = self._loading.pop(result.request_id, None)
        if sequence is None:
            return
        self._load_results.append(result)
        sequence.pulled_bytes += pulled_bytes
        if result.request_id in self._followers:
            sequence.came_ahead(result.num_computed_tokens)
            if sequence.aborted:
                self._end_follower(result.request_id)
            return
        failed = result.failure is not None and not sequence.cancelled
        sequence.load_failed |= failed
        useless = failed and not self._limits.takes_partial_loads
        if (sequence.cancelled or useless) and not sequence.aborted:
            # Unless it loads again, its blocks are taken back and it is named in `preempted`.
            self._loading[result.request_id] = sequence
            return
        sequence.num_computed_tokens = result.num_computed_tokens
        sequence.in_place("local", sequence.num_hit_tokens)
        sequence.in_place("remote", result.num_computed_tokens)
        self._running.append(sequence)
        self._sort()
        if sequence.aborted:
            self._end(sequence, "aborted")
        else:
            self._end_if_done(sequence, None)

    def must_ask(self) -> bool:
        """Return whether the coordinator must be told or asked something now.

        What was written is told along with the next question: before slots run out at the latest.
        """
        if self._load_results or self._endings.any_untold or self._followers.any_new:
            return True
        if self._waiting and self._room() > 0:
            return True
        return any(s.slots_ahead <= self._ahead_tokens // 2 for s in self._running)

    def follows_prefills(self) -> bool:
        """Return whether news may come that only asking again brings."""
        return len(self._followers) > 0

    def may_ask_before_computing(self) -> bool:
        """Return whether no run of `next_runs` will need, for its next token, an answer to this."""
        return all(sequence.slots_ahead > 0 for sequence, _ in self._runs)

    def lacks_slots(self) -> bool:
        """Return whether some request cannot go on until the coordinator has answered."""
        return any(sequence.slots_ahead < 0 for sequence in self._running)

    def build_step(
        self, *, call_id: str, epoch: Epoch, instance_id: InstanceId, incarnation: Incarnation
    ) -> Step:
        """Return the next step; its reports are taken over and not repeated."""
        step = Step(
            call_id=call_id,
            epoch=epoch,
            instance_id=instance_id,
            incarnation=incarnation,
            load_results=tuple(self._load_results),
            progress=tuple(sequence.progress() for sequence in self._written.values()),
            releases=self._endings.take_releases(),
            running=tuple(
                RunningAsk(request_id=s.request_id, target_tokens=s.target_tokens)
                for s in self._running
            ),
            waiting=tuple(
                s.ask(with_content=self._tells_content)
                for s in list(self._waiting)[: max(self._room(), 0)]
            ),
            follows=tuple(
                s.ask(with_content=self._tells_content) for s in self._followers.take_new()
            ),
            token_budget=self._limits.token_budget,
            ahead_tokens=self._ahead_tokens,
        )
        self._load_results = []
        self._written.clear()
        return step

    def apply(self, reply: StepReply) -> Work:
        """Move requests as the coordinator decided; return what to do now."""
        self._outputs += self._endings.told()
        reused: list[BlockId] = []
        for request_id in reply.preempted:
            self._preempt(request_id)
        loads = tuple(self._begin_load(load) for load in reply.loads)
        for request_id in reply.cancel_loads:
            if request_id in self._loading:
                self._loading[request_id].cancelled = True
        for scheduled in reply.scheduled:
            for table in scheduled.new_block_ids:
                reused += [block for block in table[scheduled.num_hit_blocks :] if block]
            self._take_grant(scheduled)
        self._waiting += [
            self._followers.remove(request_id)[0] for request_id in reply.prefill_over
        ]
        self._sort()
        return Work(
            reused_block_ids=tuple(reused),
            loads=loads,
            cancel_loads=reply.cancel_loads,
        )

    def cancel_loads(self) -> tuple[RequestId, ...]:
        """Let every load end without its request; the caller must stop these."""
        for sequence in self._loading.values():
            sequence.cancelled = True
        return tuple(self._loading)

    def start_over(self) -> tuple[RestoredRequest, ...]:
        """Return what runs, for a coordinator that knows of nothing; all else waits again.

        No load is in flight. Nothing of what it was told is told again.
        """
        self._outputs += self._endings.forgotten()
        self._load_results = []
        self._written.clear()
        again = [*self._loading.values(), *self._followers.take_all()]
        self._loading = {}
        for sequence in again:
            sequence.reset()
        self._outputs += [s.ended("aborted") for s in again if s.aborted]
        self._waiting.extendleft(s for s in reversed(again) if not s.aborted)
        self._sort()
        return tuple(s.restored(with_content=self._tells_content) for s in self._running)

    def next_runs(self) -> tuple[Run, ...]:
        """Return what can be computed now, within the token budget; `computed` must follow."""
        self._runs = []
        left = self._limits.token_budget
        for sequence in self._running:
            num_tokens = min(sequence.runnable_tokens, left)
            if num_tokens > 0:
                self._runs.append((sequence, num_tokens))
                left -= num_tokens
        return tuple(sequence.run(num_tokens) for sequence, num_tokens in self._runs)

    def computed(self, sampled: Mapping[RequestId, int]) -> tuple[WrittenBlock, ...]:
        """Take in a finished forward pass over `next_runs`.

        Args:
            sampled: the chosen token of each run that asked for one.

        Returns the blocks that are now completely written.
        """
        written: list[WrittenBlock] = []
        for sequence, num_tokens in self._runs:
            before = sequence.num_computed_tokens
            sequence.num_computed_tokens = before + num_tokens
            sequence.in_place("computed", sequence.num_computed_tokens)
            written.extend(sequence.written_since(before))
            token = sampled.get(sequence.request_id)
            if token is not None:
                sequence.append(token)
                self._outputs.append(Output(request_id=sequence.request_id, token_ids=(token,)))
            self._written[sequence.request_id] = sequence
            self._end_if_done(sequence, token)
        self._runs = []
        return tuple(written)

    def take_outputs(self) -> tuple[Output, ...]:
        """Return the news since the last call."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    # ---------------------------------------------------------------------------------------------

    def _room(self) -> int:
        admitted = [*self._running, *(i for i in self._loading if i not in self._followers)]
        return self._limits.max_running - len(admitted)

    def _take_grant(self, scheduled: Scheduled) -> None:
        request_id = scheduled.request_id
        sequence = _find(self._running, request_id)
        if sequence is not None:
            sequence.grant(scheduled.new_block_ids, scheduled.granted_tokens)
            return
        sequence = _find(self._waiting, request_id)
        if sequence is None:
            return  # it ended while the coordinator was asked; its release is on its way
        self._admit(sequence)
        sequence.grant(scheduled.new_block_ids, scheduled.granted_tokens)
        sequence.num_computed_tokens = scheduled.num_computed_tokens
        sequence.in_place("local", scheduled.num_computed_tokens)
        self._running.append(sequence)
        self._sort()
        self._end_if_done(sequence, None)

    def _admit(self, sequence: RequestSequence) -> None:
        self._waiting.remove(sequence)
        sequence.was_admitted = True
        sequence.cancelled = False

    def _begin_load(self, load: Load) -> LoadOrder:
        """Let a request load that was waiting, follows, or whose earlier load has ended."""
        sequence = self._loading.get(load.request_id) or _find(self._running, load.request_id)
        if load.ahead:
            sequence = self._followers.get(load.request_id)
        elif sequence is None:
            sequence = next(s for s in self._waiting if s.request_id == load.request_id)
            self._admit(sequence)
        elif sequence in self._running:
            self._running.remove(sequence)
        self._loading[load.request_id] = sequence
        sequence.take_tables(load.block_ids)
        sequence.num_hit_tokens = load.num_hit_blocks * self._limits.block_tokens
        return load_order(
            load,
            sequence.chain.hashes,
            block_tokens=self._limits.block_tokens,
            hash_block_tokens=self._scheme.hash_block_tokens,
        )

    def _preempt(self, request_id: RequestId) -> None:
        sequence = self._loading.pop(request_id, None)
        gave_way = sequence is None or sequence.cancelled
        if sequence is None:
            sequence = _find(self._running, request_id)
            if sequence is None:
                return
            self._running.remove(sequence)
        if sequence.aborted:  # while its cancelled load came to an end
            self._outputs.append(sequence.ended("aborted"))
            return
        self._written.pop(request_id, None)
        sequence.reset()
        if gave_way:
            sequence.preemptions += 1
        self._waiting.appendleft(sequence)
        self._sort()

    def _end_if_done(self, sequence: RequestSequence, token: int | None) -> None:
        if sequence.request.prefill_only:
            if sequence.num_computed_tokens >= sequence.target_tokens:
                self._end(sequence, "prefilled")
        elif token is not None:
            reason = sequence.end_reason(self._eos)
            if reason is not None:
                self._end(sequence, reason)

    def _end_follower(self, request_id: RequestId) -> None:
        sequence, is_known = self._followers.remove(request_id)
        if is_known:
            self._endings.add(sequence, "aborted")
        else:
            self._outputs.append(sequence.ended("aborted"))

    def _end(self, sequence: RequestSequence, reason: FinishReason) -> None:
        self._running.remove(sequence)
        self._endings.add(sequence, reason)

    def _sort(self) -> None:
        if self._limits.policy == "priority":
            self._running.sort(key=RequestSequence.rank)
            self._waiting = deque(sorted(self._waiting, key=RequestSequence.rank))


def _find(sequences: Iterable[RequestSequence], request_id: RequestId) -> RequestSequence | None:
    return next((found for found in sequences if found.request_id == request_id), None)
