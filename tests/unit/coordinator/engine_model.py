"""An engine as simple as one can be: it believes the replies and does what they say."""

from dataclasses import dataclass, field, replace

from tests.unit.coordinator.fleet import BLOCK_TOKENS, Fleet, chain, failed, loaded, num_granted

from kvferry.proto.ids import InstanceId, RequestId
from kvferry.proto.step_messages import (
    AdmitAsk,
    LoadResult,
    Progress,
    Release,
    RunningAsk,
    StepReply,
)

MAX_TOKENS = 20


@dataclass
class Loading:
    ask: AdmitAsk
    hit_tokens: int
    asked_tokens: int
    tried: tuple[InstanceId, ...]
    ahead: bool = False
    cancelled: bool = False
    aborted: bool = False


@dataclass
class Running:
    ask: AdmitAsk
    num_computed: int
    granted: int = 0
    tried: tuple[InstanceId, ...] = ()


@dataclass(frozen=True)
class Behaviour:
    """What happens at an engine before its next step."""

    budget: int = 100
    grow: bool = True
    ahead: int = 0
    finish: bool = False
    handoff: bool = False
    end: frozenset[int] = frozenset()
    arrived: tuple[int, ...] = ()
    error_type: str = "UnavailableError"


@dataclass
class EngineModel:
    """Requests of one engine; asserts that every reply makes sense to it."""

    waiting: list[AdmitAsk] = field(default_factory=list)
    running: dict[RequestId, Running] = field(default_factory=dict)
    loading: dict[RequestId, Loading] = field(default_factory=dict)
    following: dict[RequestId, AdmitAsk] = field(default_factory=dict)
    not_told: list[AdmitAsk] = field(default_factory=list)
    partial_loads: bool = True
    block_tokens: int = BLOCK_TOKENS

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.loading or self.following)

    def follow(self, ask: AdmitAsk) -> None:
        """Take a request in whose prefill runs elsewhere."""
        self.following[ask.request_id] = ask
        self.not_told.append(ask)

    def step(self, fleet: Fleet, name: str, does: Behaviour) -> None:
        """Report, ask, and take the reply in."""
        results = self.end_loads(does.arrived, does.error_type)
        progress = self._write(does.grow)
        releases = self._release(does)
        loading_before = set(self.loading)
        follows, self.not_told = tuple(self.not_told), []
        reply = fleet.step(
            name,
            does.budget,
            load_results=results,
            progress=progress,
            releases=releases,
            running=tuple(
                RunningAsk(request_id=request_id, target_tokens=running.ask.num_tokens)
                for request_id, running in self.running.items()
            ),
            waiting=tuple(self.waiting),
            follows=follows,
            ahead_tokens=does.ahead,
        )
        load_again = {load.request_id for load in reply.loads if load.request_id in self.running}
        assert set(reply.cancel_loads) <= loading_before | load_again
        assert sum(num_granted(s) - does.ahead for s in reply.scheduled) <= does.budget
        ahead = {request_id for request_id, load in self.loading.items() if load.ahead}
        if reply.preempted or set(reply.cancel_loads) - ahead:
            assert {load.request_id for load in reply.loads} == load_again
        self._take(reply)

    def end_loads(self, arrived: tuple[int, ...], error_type: str) -> tuple[LoadResult, ...]:
        """End the oldest loads; `arrived[i]` blocks of the i-th came whole, then came the error."""
        results = []
        for request_id, num_arrived in zip(list(self.loading), arrived, strict=False):
            load = self.loading.pop(request_id)
            computed = min(load.hit_tokens + num_arrived * self.block_tokens, load.asked_tokens)
            failure, ask = None, load.ask
            if computed < load.asked_tokens:
                computed = computed if self.partial_loads else load.hit_tokens
                failure = failed(computed // self.block_tokens, error_type)
                # As engines do: who failed must not be asked again.
                ask = ask if load.cancelled else replace(ask, allow_remote=False)
            results.append(loaded(request_id, computed, failure))
            if not (load.aborted or load.ahead):
                self.running[request_id] = Running(ask, computed, tried=load.tried)
        return tuple(results)

    def come_back(self) -> None:
        """Go on without a coordinator that knew of anything but what runs: the rest waits again."""
        ended = [load.ask for load in self.loading.values() if not (load.aborted or load.ahead)]
        self.waiting = [*ended, *self.waiting, *self.following.values()]
        self.loading, self.following, self.not_told = {}, {}, []

    def _write(self, grow: bool) -> tuple[Progress, ...]:
        progress = []
        for request_id, running in self.running.items():
            if running.granted <= running.num_computed:
                continue
            old_hashes = len(running.ask.hashes)
            # Whatever has slots is computed without a call, tokens generated on the way as well.
            while running.num_computed < min(running.granted, running.ask.num_tokens):
                running.num_computed = min(running.granted, running.ask.num_tokens)
                ask = running.ask
                if grow and running.num_computed == ask.num_tokens < MAX_TOKENS:
                    running.ask = _one_token_more(ask)
            progress.append(
                Progress(
                    request_id=request_id,
                    num_tokens=running.ask.num_tokens,
                    num_computed_tokens=running.num_computed,
                    new_hashes=running.ask.hashes[old_hashes:],
                )
            )
        return tuple(progress)

    def _release(self, does: Behaviour) -> tuple[Release, ...]:
        releases = []
        told = [name for name in self.following if self.following[name] not in self.not_told]
        for number, request_id in enumerate(dict.fromkeys([*self.running, *self.loading, *told])):
            running = self.running.get(request_id)
            finished = running is not None and running.num_computed == running.ask.num_tokens
            if number not in does.end and not (does.finish and finished):
                continue
            releases.append(Release(request_id=request_id, handoff=does.handoff))
            self.following.pop(request_id, None)
            self.running.pop(request_id, None)
            if request_id in self.loading:
                self.loading[request_id].aborted = True
        return tuple(releases)

    def _take(self, reply: StepReply) -> None:
        for request_id in reply.preempted:
            ask = self.running.pop(request_id).ask
            self.waiting.insert(0, replace(ask, resumed=True))
        for request_id in set(reply.cancel_loads) & set(self.loading):
            self.loading[request_id].cancelled = True
        asks = {ask.request_id: ask for ask in self.waiting} | self.following
        for load in reply.loads:
            used = [block for table in load.block_ids for block in table if block]
            assert len(set(used)) == len(used)
            hit_tokens = load.num_hit_blocks * self.block_tokens
            (num_blocks,) = {len(table) for table in load.block_ids}
            asked_tokens = num_blocks * self.block_tokens
            before = self.running.pop(load.request_id, None)
            ask, tried = (before.ask, before.tried) if before else (asks[load.request_id], ())
            assert hit_tokens < asked_tokens < ask.num_tokens
            assert before is None or before.num_computed == hit_tokens
            source = load.source.instance_id
            assert source not in tried
            assert load.ahead == (load.request_id in self.following)
            self.loading[load.request_id] = Loading(
                ask,
                hit_tokens,
                asked_tokens,
                (*tried, source),
                ahead=load.ahead,
                cancelled=load.request_id in reply.cancel_loads,
            )
        for scheduled in reply.scheduled:
            if scheduled.request_id in asks:
                self.running[scheduled.request_id] = Running(
                    asks[scheduled.request_id], scheduled.num_computed_tokens
                )
            running = self.running[scheduled.request_id]
            assert running.num_computed == scheduled.num_computed_tokens
            running.granted = scheduled.granted_tokens
        admitted = {load.request_id for load in reply.loads}
        admitted |= {scheduled.request_id for scheduled in reply.scheduled}
        self.waiting = [ask for ask in self.waiting if ask.request_id not in admitted]
        self.waiting += [self.following.pop(request_id) for request_id in reply.prefill_over]


def _one_token_more(ask: AdmitAsk) -> AdmitAsk:
    num_tokens = ask.num_tokens + 1
    hashes = ask.hashes
    if num_tokens % BLOCK_TOKENS == 0:
        text = hashes[-1].decode().strip("\0") if hashes else ""
        hashes += chain(text + "g")[-1:]
    return replace(ask, num_tokens=num_tokens, target_tokens=num_tokens, hashes=hashes)
