"""Rank 0 of an engine instance: it starts the other ranks, registers, and runs the engine loop.

A plain class; the launcher wraps it with Ray. The other ranks are its own: they are made by it and
end with it.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from kvferry.cluster.naming import outside_ray
from kvferry.cluster.ports import CoordinatorPort, PendingCall, RankPort
from kvferry.cluster.serving.all_ranks import AllRanks
from kvferry.cluster.serving.engine import Engine
from kvferry.cluster.serving.limits import Limits
from kvferry.cluster.serving.pool_size import PoolPlan
from kvferry.cluster.serving.rank import OpenOrder, Rank, RankOpened, RankSettings
from kvferry.cluster.serving.requests import EngineRequest, OutputBatch
from kvferry.proto.errors import ConfigError, KvferryError, UnavailableError
from kvferry.proto.group_specs import specs_of
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import Incarnation, RequestId
from kvferry.proto.messages import InstanceInfo, Registered, RegisterInstance, expect
from kvferry.proto.scheme import HashScheme
from kvferry.worker.model.sharded_group import MeetingPoint

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Bounds what rank 0 waits for while ranks load and open; the launcher gives up far earlier."""

REGISTER_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 0.5
PING_PERIOD_S = 1.0

SpawnRank = Callable[[RankSettings], RankPort]
"""Starts a process that plays a `Rank`."""


def scheme_of_this_process(settings: RankSettings) -> HashScheme:
    """Return the hash scheme, its root taken from this process's own PYTHONHASHSEED.

    Raises:
        ConfigError: the variable is not set, so that no two processes would agree.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        raise ConfigError(
            "PYTHONHASHSEED is not set in this process, so its block hashes would match nobody's",
            given="unset",
            allowed="the service's hash seed, through Ray's runtime environment",
        )
    return make_scheme(
        seed=seed,
        hash_block_tokens=settings.hash_block_tokens,
        algorithm=settings.algorithm,
        key_format=settings.key_format,
    )


class RankActor:
    """Nothing happens before `start`, so construction cannot fail.

    Args:
        settings: of rank 0.
        node_host: returns the address by which other machines reach this one.
        spawn: starts the other ranks, where the layout has some.
        node_id: returns Ray's id of this node.
    """

    def __init__(
        self,
        settings: RankSettings,
        node_host: Callable[[], str],
        spawn: SpawnRank,
        node_id: Callable[[], str] = outside_ray,
    ) -> None:
        self._settings = settings
        self._spawn = spawn
        self._own = Rank(settings, node_host, node_id)
        self._others: list[RankPort] = []
        self._meeting: MeetingPoint | None = None
        self._engine: Engine | None = None

    def start(self, coordinator: CoordinatorPort) -> InstanceInfo:
        """Load the model on every rank, open their transfer servers, register, start the loop.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: sizes, layout or the environment are wrong, or the memory is too small.
            MismatchError: the coordinator refused the registration.
            InstanceDiedError, UnavailableError: a rank ended meanwhile.
        """
        settings = self._settings
        scheme = scheme_of_this_process(settings)
        self._others = [
            self._spawn(replace(settings, rank=rank))
            for rank in range(1, settings.layout.num_ranks)
        ]
        loading = self._begin("load")
        pools: list[PoolPlan] = [self._own.load(), *_results(loading)]
        # Every block id must be there on every rank.
        pool = min(pools, key=lambda one: one.num_blocks)
        info = self._open(pool, scheme)
        registered = self._register(coordinator, info)
        ranks = AllRanks(self._own, self._others, pass_timeout_s=settings.rank_timeout_s)
        engine = Engine(
            info=info,
            registered=registered,
            limits=_limits(settings, info),
            scheme=scheme,
            eos_token_ids=frozenset(self._own.loaded.eos_token_ids),
            coordinator=coordinator,
            mover=ranks,
            forward=ranks.forward,
            hangs_after_s=settings.hangs_after_s,
        )
        self._engine = engine
        engine.start()
        for rank, other in enumerate(self._others, start=1):
            threading.Thread(
                target=watch_rank,
                args=(engine, rank, other, settings.rank_timeout_s),
                name="kvferry-watch",
                daemon=True,
            ).start()
        return info

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; raises what `Engine.submit` raises."""
        self._started().submit(request)

    def abort(self, request_id: RequestId) -> None:
        """End a request early; unknown ids are ignored."""
        self._started().abort(request_id)

    def outputs(self, since_seq: int, wait_s: float) -> OutputBatch:
        """Return news from `since_seq` on, waiting up to `wait_s` for the first."""
        return self._started().outputs(since_seq, wait_s)

    def stop(self) -> None:
        """End loop and servers on every rank; may be called at any time and more than once."""
        if self._engine is not None:
            self._engine.stop(STOP_TIMEOUT_S)
        stopping = self._begin("stop")
        self._own.stop()
        for call in stopping:
            call.done(STOP_TIMEOUT_S)

    def _open(self, pool: PoolPlan, scheme: HashScheme) -> InstanceInfo:
        settings = self._settings
        self._meeting = meeting = self._own.meeting_point() if self._others else None
        order = OpenOrder(
            num_blocks=pool.num_blocks,
            incarnation=Incarnation(time.time_ns()),
            meeting_address=meeting.address if meeting is not None else "",
        )
        opening = self._begin("open", order)
        opened = [self._open_own(order, opening), *_results(opening)]
        return InstanceInfo(
            instance_id=settings.instance_id,
            role=settings.role,
            incarnation=order.incarnation,
            identity=self._own.loaded.identity,
            scheme=scheme,
            layout=settings.layout,
            num_blocks=pool.num_blocks,
            rank_addresses=tuple(one.address for one in opened),
            max_model_len=pool.max_model_len,
            max_in_flight_tokens=settings.token_budget,
            rank_pids=tuple(one.pid for one in opened),
            rank_nodes=tuple(one.node_id for one in opened if one.node_id),
            rank_metrics=tuple(one.metrics_address for one in opened if one.metrics_address),
            version=version("kvferry"),
        )

    def _open_own(self, order: OpenOrder, opening: list[PendingCall]) -> RankOpened:
        try:
            return self._own.open(order)
        except UnavailableError:
            # Somebody did not come: if that one can say why, it shall be heard.
            _results(opening)
            raise

    def _register(self, coordinator: CoordinatorPort, info: InstanceInfo) -> Registered:
        command = RegisterInstance(
            call_id=f"{info.instance_id}/{info.incarnation}/register", info=info
        )
        return expect(coordinator.call(command, timeout_s=REGISTER_TIMEOUT_S), Registered)

    def _begin(self, method: str, *arguments: Any) -> list[PendingCall]:
        return [other.begin(method, *arguments) for other in self._others]

    def _started(self) -> Engine:
        if self._engine is None:
            raise ConfigError(f"instance {self._settings.instance_id} has not been started")
        return self._engine


def _results(calls: list[PendingCall]) -> list[Any]:
    return [call.result(START_TIMEOUT_S) for call in calls]


def watch_rank(engine: Engine, rank: int, other: RankPort, rank_timeout_s: float) -> None:
    """Let the engine fail when a rank ends or stops answering, whatever the engine does then."""
    waiting = other.begin("wait_until_stopped")
    while not waiting.done(PING_PERIOD_S):
        if not other.begin("ping").done(rank_timeout_s):
            engine.fail(
                UnavailableError(
                    f"rank {rank} of the instance does not answer", given=f"{rank_timeout_s:g} s"
                )
            )
            return
    try:
        waiting.result(0.0)
        error: KvferryError = UnavailableError("it was stopped")
    except KvferryError as ended:
        error = ended
    engine.fail(UnavailableError(f"rank {rank} of the instance is gone: {error}"))


def _limits(settings: RankSettings, info: InstanceInfo) -> Limits:
    block_tokens = info.layout.virtual_block_tokens
    return Limits(
        num_blocks=info.num_blocks,
        block_tokens=block_tokens,
        max_model_len=info.max_model_len,
        token_budget=settings.token_budget,
        max_running=settings.max_running,
        specs=specs_of(info.identity, block_tokens),
        policy=settings.policy,
    )
