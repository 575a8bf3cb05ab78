"""The coordinator in the simulator: its lives, one after the other, at times two at once."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvferry.cluster.sim.command_checks import check_no_suspects, nothing_changes_by_others
from kvferry.cluster.sim.world import Process, World
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import InvariantError, UnavailableError
from kvferry.proto.messages import Command, Reply, Tick
from kvferry.proto.scheme import HashScheme

LONGEST_RESTART_S = 3.0
SUSPECT_AFTER_S = 1.5
DEAD_AFTER_S = 6.0
"""Less than a service takes: runs are short, and pauses and cuts are often longer than this."""


class _Actor(CoordinatorActor):
    """Checks more than it does by itself, and tells the world of it.

    Args:
        violated: hears of what must not be, whoever else is told, or swallows it.
        settings: as `CoordinatorActor`.
    """

    def __init__(self, violated: Callable[[Exception], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._violated = violated
        self._answered: set[tuple[type, str]] = set()

    @property
    def service(self) -> CoordinatorService | None:
        return self._service

    def call(self, command: Command) -> Reply:
        try:
            return self._checked(command)
        except InvariantError as error:
            self._violated(error)
            raise

    def _checked(self, command: Command) -> Reply:
        service = self._service
        if service is None:
            return super().call(command)
        tick = partial(super().call, Tick())
        with nothing_changes_by_others(service, command, tick):
            reply = super().call(command)
        key = type(command), getattr(command, "call_id", "")
        if key not in self._answered:
            check_no_suspects(service, reply)
        if key[1]:
            self._answered.add(key)  # a repeat tells what was right then
        return reply


class Coordinators:
    """`process` is where the present life is: whoever calls looks there.

    Args:
        world: where they live.
        scheme: how members hash.
        operator: the process that starts them.
        clock_skew: how wrong their clocks may go.
        lease_cap_s, step_lease_s, warm_share: as `CoordinatorService`.
    """

    def __init__(
        self,
        world: World,
        scheme: HashScheme,
        *,
        operator: Process,
        clock_skew: float,
        lease_cap_s: float,
        step_lease_s: float,
        warm_share: float = 0.0,
    ) -> None:
        self.process = Process("coordinator:0")
        self._world = world
        self._scheme = scheme
        self._operator = operator
        self._clock_skew = clock_skew
        self._lease_cap_s = lease_cap_s
        self._step_lease_s = step_lease_s
        self._warm_share = warm_share
        self._registry = ProcessRegistry()
        self._actors: dict[str, _Actor] = {}
        self._num_lives = 0

    @property
    def num_restarts(self) -> int:
        """How many lives began after the first."""
        return self._num_lives - 1

    def count(self, name: str) -> int:
        """Return the sum of a counter over all lives."""
        services = [actor.service for actor in self._actors.values()]
        return sum(service.state.counters[name] for service in services if service is not None)

    def begin(self) -> None:
        """Begin the next life, whether or not the last one has ended."""
        random = self._world.random
        self._num_lives += 1
        self.process = Process(
            f"coordinator:{self._num_lives}",
            clock_offset_s=1000.0 * random.random(),
            clock_rate=1.0 + self._clock_skew * (2 * random.random() - 1),
        )
        self._world.spawn(self._live, self.process)

    def crash(self) -> None:
        """End the present life where it stands; another one begins."""
        self._world.kill(self.process)
        after_s = self._world.random.random() * LONGEST_RESTART_S
        self._world.spawn(self.begin, self._operator, after_s=after_s)

    def take_for_dead(self) -> None:
        """Begin the next life while the last one goes on."""
        self.begin()

    def handle(self, command: Command) -> Reply:
        """Execute a command in the life that the running task belongs to."""
        actor = self._actors.get(self._world.process.name)
        if actor is None:
            raise UnavailableError("the coordinator is starting")
        return actor.call(command)

    def service(self) -> CoordinatorService | None:
        """Return that of the present life; None while it starts."""
        actor = self._actors.get(self.process.name)
        return None if actor is None else actor.service

    def _live(self) -> None:
        actor = _Actor(
            self._world.fail,
            scheme=self._scheme,
            registry=self._registry,
            lease_cap_s=self._lease_cap_s,
            step_lease_s=self._step_lease_s,
            suspect_after_s=SUSPECT_AFTER_S,
            dead_after_s=DEAD_AFTER_S,
            warm_share=self._warm_share,
            check_invariants=True,
        )
        actor.start()
        self._actors[self._world.process.name] = actor
