"""The engine's queues: what to ask the coordinator for, and what its answer means.

Pure: no model, no clock, no threads. The engine loop drives it:

    step = scheduler.build_step(...)      -> coordinator -> reply
    work = scheduler.apply(reply)         -> forward pass, loads
    scheduler.computed(tokens)            -> outputs, blocks now written

The policy is expressed by order alone: the coordinator serves running requests first to last and
preempts from the end.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvferry.cluster.serving.requests import (
    EngineRequest,
    Finished,
    FinishReason,
    Output,
)
from kvferry.cluster.serving.sequence import Run, Sequence
from kvferry.proto.errors import ConfigError, NeverFitsError, PromptTooLongError
from kvferry.proto.ids import BlockHash, BlockId, Epoch, Incarnation, InstanceId, RequestId
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import (
    AdmitAsk,
    Load,
    LoadResult,
    Progress,
    Release,
    RunningAsk,
    Scheduled,
    Step,
    StepReply,
)

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one engine can take; sizes in tokens or blocks (null block included)."""

    num_blocks: int
    block_tokens: int
    max_model_len: int
    token_budget: int
    max_running: int
    policy: Policy = "fcfs"

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_model_len", "token_budget", "max_running"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer", given=value, allowed=">= 1")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError("unknown policy", given=self.policy, allowed=["fcfs", "priority"])

    def needed_blocks(self, request: EngineRequest) -> int:
        """Return the blocks a request needs to finish, plus the null block.

        The last generated token is never written, so it needs no slot.
        """
        tokens = len(request.prompt_token_ids)
        tokens += 0 if request.prefill_only else max(request.sampling.max_tokens - 1, 0)
        return -(-tokens // self.block_tokens) + 1


def require_fits(request: EngineRequest, limits: Limits) -> None:
    """Refuse a request that can never run here, before it enters a queue.

    Raises:
        ConfigError: an empty prompt.
        PromptTooLongError: prompt and generated tokens exceed the model's limit.
        NeverFitsError: it needs more blocks than the pool has.
    """
    prompt = len(request.prompt_token_ids)
    if prompt == 0:
        raise ConfigError("the prompt is empty", given=0, allowed=">= 1 token")
    total = prompt + request.sampling.max_tokens
    if total > limits.max_model_len:
        raise PromptTooLongError(
            f"request {request.request_id} is longer than the model's limit",
            given={"prompt_tokens": prompt, "max_tokens": request.sampling.max_tokens},
            allowed={"max_model_len": limits.max_model_len},
        )
    needed = limits.needed_blocks(request)
    if needed > limits.num_blocks:
        raise NeverFitsError(
            f"request {request.request_id} can never fit the pool",
            given={"needed_blocks": needed, "have_blocks": limits.num_blocks},
            allowed=f"num_blocks >= {needed} (null block included)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Blocks to fetch from a peer: `hashes[i]` goes into `block_ids[i]`."""

    load: Load
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId, ...]
    hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine does with one reply, in this order.

    Drop residency of `reused_block_ids`, stop `cancel_loads`, start `loads`, run `runs`.
    """

    reused_block_ids: tuple[BlockId, ...]
    cancel_loads: tuple[RequestId, ...]
    loads: tuple[LoadOrder, ...]
    runs: tuple[Run, ...]


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
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._loading: dict[RequestId, Sequence] = {}
        self._progress: list[Progress] = []
        self._load_results: list[LoadResult] = []
        self._releases: list[Release] = []
        self._runs: list[tuple[Sequence, Scheduled]] = []
        self._outputs: list[Output] = []
        # A request is reported as finished once the coordinator has taken its release: whoever
        # reads that goes on to look for its blocks elsewhere.
        self._ending: list[Output] = []
        self._ending_in_step: list[Output] = []

    def add(self, request: EngineRequest) -> None:
        """Queue a request that fits (`require_fits`), with an id that no other one here has."""
        sequence = Sequence(request, self._scheme, self._limits.block_tokens)
        if sequence.target_tokens == 0:  # a prefill of less than one full block
            self._outputs.append(_end_of(sequence, "prefilled"))
            return
        self._waiting.append(sequence)
        self._sort()

    def abort(self, request_id: RequestId) -> RequestId | None:
        """End a request early; unknown ids are ignored.

        Returns the id of a load that the caller must stop, if one is in flight.
        """
        if request_id in self._loading:
            self._loading[request_id].aborted = True
            return request_id
        for sequence in list(self._running):
            if sequence.request_id == request_id:
                self._end(sequence, "aborted")
        for sequence in list(self._waiting):
            if sequence.request_id == request_id:
                self._waiting.remove(sequence)
                self._outputs.append(_end_of(sequence, "aborted"))
        return None

    def load_ended(self, result: LoadResult, pulled_bytes: int) -> None:
        """Note that a load's writer is closed; unknown ids are ignored."""
        sequence = self._loading.pop(result.request_id, None)
        if sequence is None:
            return
        self._load_results.append(result)
        sequence.pulled_bytes += pulled_bytes
        if sequence.cancelled and not sequence.aborted:
            # The coordinator takes its blocks back and names it in `preempted`.
            self._loading[result.request_id] = sequence
            return
        sequence.num_computed_tokens = result.num_computed_tokens
        sequence.in_place("local", sequence.num_hit_tokens)
        sequence.in_place("remote", result.num_computed_tokens)
        self._running.append(sequence)
        self._sort()
        if sequence.aborted:
            self._end(sequence, "aborted")

    def has_work(self) -> bool:
        """Return whether a step could change anything now."""
        reports = self._progress or self._load_results or self._releases or self._outputs
        return bool(self._waiting or self._running or reports)

    def build_step(
        self, *, call_id: str, epoch: Epoch, instance_id: InstanceId, incarnation: Incarnation
    ) -> Step:
        """Return the next step; its reports are taken over and not repeated."""
        room = self._limits.max_running - len(self._running) - len(self._loading)
        step = Step(
            call_id=call_id,
            epoch=epoch,
            instance_id=instance_id,
            incarnation=incarnation,
            load_results=tuple(self._load_results),
            progress=tuple(self._progress),
            releases=tuple(self._releases),
            running=tuple(
                RunningAsk(request_id=s.request_id, target_tokens=s.target_tokens)
                for s in self._running
            ),
            waiting=tuple(self._ask(s) for s in list(self._waiting)[: max(room, 0)]),
            token_budget=self._limits.token_budget,
        )
        self._load_results, self._progress, self._releases = [], [], []
        self._ending_in_step, self._ending = self._ending, []
        return step

    def apply(self, reply: StepReply) -> Work:
        """Move requests as the coordinator decided; return what to do now."""
        self._outputs += self._ending_in_step
        self._ending_in_step = []
        reused: list[BlockId] = []
        for request_id in reply.preempted:
            self._preempt(request_id)
        for request_id in reply.cancel_loads:
            if request_id in self._loading:
                self._loading[request_id].cancelled = True
        self._runs = []
        for scheduled in reply.scheduled:
            sequence = self._admitted(scheduled.request_id)
            new_ids = scheduled.new_block_ids
            reused.extend(new_ids[scheduled.num_hit_blocks :])
            sequence.block_table.extend(new_ids)
            sequence.num_computed_tokens = scheduled.num_computed_tokens
            sequence.in_place("local", scheduled.num_computed_tokens)
            self._runs.append((sequence, scheduled))
        loads = tuple(self._load_order(load) for load in reply.loads)
        for order in loads:
            reused.extend(order.block_ids)
        return Work(
            reused_block_ids=tuple(reused),
            cancel_loads=reply.cancel_loads,
            loads=loads,
            runs=tuple(
                sequence.run(scheduled.num_new_tokens)
                for sequence, scheduled in self._runs
                if scheduled.num_new_tokens
            ),
        )

    def computed(self, sampled: Mapping[RequestId, int]) -> tuple[tuple[BlockHash, BlockId], ...]:
        """Take in a finished forward pass.

        Args:
            sampled: the chosen token of each run that asked for one.

        Returns the blocks that are now completely written, with their hashes.
        """
        written: list[tuple[BlockHash, BlockId]] = []
        for sequence, scheduled in self._runs:
            before = sequence.num_computed_tokens
            sequence.num_computed_tokens = before + scheduled.num_new_tokens
            sequence.in_place("computed", sequence.num_computed_tokens)
            written.extend(sequence.written_since(before))
            token = sampled.get(sequence.request_id)
            if token is not None:
                sequence.append(token)
                self._outputs.append(Output(request_id=sequence.request_id, token_ids=(token,)))
            self._progress.append(sequence.progress())
            self._end_if_done(sequence, token)
        self._runs = []
        return tuple(written)

    def take_outputs(self) -> tuple[Output, ...]:
        """Return the news since the last call."""
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    # ---------------------------------------------------------------------------------------------

    def _ask(self, sequence: Sequence) -> AdmitAsk:
        sequence.num_reported_hashes = len(sequence.chain.hashes)
        return AdmitAsk(
            request_id=sequence.request_id,
            num_tokens=sequence.num_tokens,
            target_tokens=sequence.target_tokens,
            hashes=tuple(sequence.chain.hashes),
            resumed=sequence.was_admitted,
            content=sequence.content() if self._tells_content else None,
        )

    def _admitted(self, request_id: RequestId) -> Sequence:
        for sequence in self._running:
            if sequence.request_id == request_id:
                return sequence
        sequence = next(s for s in self._waiting if s.request_id == request_id)
        self._waiting.remove(sequence)
        sequence.was_admitted = True
        self._running.append(sequence)
        self._sort()
        return sequence

    def _load_order(self, load: Load) -> LoadOrder:
        sequence = next(s for s in self._waiting if s.request_id == load.request_id)
        self._waiting.remove(sequence)
        sequence.was_admitted = True
        sequence.cancelled = False
        sequence.block_table.extend(load.block_ids)
        sequence.num_hit_tokens = load.num_hit_blocks * self._limits.block_tokens
        self._loading[load.request_id] = sequence
        num_blocks = len(load.block_ids)
        return LoadOrder(
            load=load,
            hashes=tuple(sequence.chain.hashes[load.num_hit_blocks : num_blocks]),
            block_ids=load.block_ids[load.num_hit_blocks :],
            hit_tokens=sequence.num_hit_tokens,
        )

    def _preempt(self, request_id: RequestId) -> None:
        sequence = self._loading.pop(request_id, None)
        if sequence is None:
            sequence = next((s for s in self._running if s.request_id == request_id), None)
            if sequence is None:
                return
            self._running.remove(sequence)
        if sequence.aborted:  # while its cancelled load came to an end
            self._outputs.append(_end_of(sequence, "aborted"))
            return
        sequence.reset()
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)
        self._sort()

    def _end_if_done(self, sequence: Sequence, token: int | None) -> None:
        request = sequence.request
        if request.prefill_only:
            if sequence.num_computed_tokens >= sequence.target_tokens:
                self._end(sequence, "prefilled")
        elif token is not None:
            stops = set(request.sampling.stop_token_ids)
            stops |= frozenset() if request.sampling.ignore_eos else self._eos
            if token in stops:
                self._end(sequence, "stop")
            elif sequence.num_output_tokens >= request.sampling.max_tokens:
                self._end(sequence, "length")

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._running.remove(sequence)
        self._releases.append(
            Release(request_id=sequence.request_id, handoff=reason == "prefilled")
        )
        self._ending.append(_end_of(sequence, reason))

    def _sort(self) -> None:
        if self._limits.policy == "priority":
            self._running.sort(key=Sequence.rank)
            self._waiting = deque(sorted(self._waiting, key=Sequence.rank))


def _end_of(sequence: Sequence, reason: FinishReason) -> Output:
    finished = Finished(
        reason=reason,
        accounting=sequence.accounting(),
        pulled_bytes=sequence.pulled_bytes,
        preemptions=sequence.preemptions,
    )
    return Output(request_id=sequence.request_id, finished=finished)
