"""Calls and streams between processes: late, lost, twice, broken off, or cut off one way."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.cluster.sim.blocking import Condition, Event
from kvferry.cluster.sim.world import Process, World
from kvferry.proto.errors import DeadlineError, KvferryError, UnavailableError

_T = TypeVar("_T")

RETRY_S = 0.2
"""So often TCP tries again what does not come through."""


@dataclass(slots=True, kw_only=True)
class Weather:
    """What may happen to a message; chances from 0 to 1, times in seconds."""

    longest_delay_s: float = 0.003
    late: float = 0.0
    latest_s: float = 3.0
    lost: float = 0.0
    twice: float = 0.0
    broken: float = 0.0
    corrupt: float = 0.0


@dataclass(slots=True)
class Network:
    """Connects all processes of a world. `cut` has the pairs (from, to) that are cut off."""

    world: World
    weather: Weather = field(default_factory=Weather)
    cut: set[tuple[str, str]] = field(default_factory=set)

    def call(
        self,
        to: Process,
        work: Callable[[], _T],
        *,
        timeout_s: float | None,
        reliable: bool = False,
    ) -> _T:
        """Do some work in another process, and return or raise what came back of it.

        It may be done though its answer is lost, and more than once, unless it is `reliable`: calls
        of Ray's actors are done once, as long as both live and nothing is cut off.

        Raises:
            KvferryError: as `work` raised it.
            UnavailableError: the other process ended, or the connection did.
            DeadlineError: no answer in time.
        """
        caller, answer = self.world.process, _Answer(self.world)

        def serve() -> None:
            value: Any = None
            error: KvferryError | None = None
            try:
                value = work()
            except KvferryError as refusal:
                error = refusal
            self._send(to, caller, lambda: answer.give(value, error), reliable=reliable)

        gone = UnavailableError(f"{to.name} is gone")
        if to.is_alive:
            to.at_end.append(lambda: answer.give(None, gone))
            self._send(caller, to, serve, reliable=reliable)
        elif (caller.name, to.name) not in self.cut:
            self.world.sleep(self.delay_s())
            raise gone
        if not reliable and self.happens(self.weather.broken):
            self.world.sleep(self.delay_s())
            raise UnavailableError(f"the connection to {to.name} broke")
        if not answer.given.wait(timeout_s):
            raise DeadlineError(f"{to.name} did not answer", allowed=f"{timeout_s} s")
        if answer.error is not None:
            raise answer.error
        value: _T = answer.value
        return value

    def happens(self, chance: float) -> bool:
        """Tell whether something happens this time."""
        return chance > 0.0 and self.world.random.random() < chance

    def delay_s(self) -> float:
        """Return how long a message takes this time."""
        weather, random = self.weather, self.world.random
        longest = weather.latest_s if self.happens(weather.late) else weather.longest_delay_s
        return random.random() * longest

    def is_cut(self, sender: Process, receiver: Process) -> bool:
        """Tell whether nothing comes through from one process to the other now."""
        return (sender.name, receiver.name) in self.cut

    def _send(
        self, sender: Process, receiver: Process, work: Callable[[], None], *, reliable: bool
    ) -> None:
        if self.is_cut(sender, receiver) or (not reliable and self.happens(self.weather.lost)):
            return
        for _ in range(1 + (not reliable and self.happens(self.weather.twice))):
            self.world.spawn(work, receiver, after_s=self.delay_s())


class _Answer:
    """What a caller waits for; the first answer counts."""

    def __init__(self, world: World) -> None:
        self.given = Event(world)
        self.value: Any = None
        self.error: KvferryError | None = None

    def give(self, value: object, error: KvferryError | None) -> None:
        if not self.given.is_set():
            self.value, self.error = value, error
            self.given.set()


class Stream:
    """Messages in order from one process to another, a few at most under way.

    Args:
        network: carries them.
        sender: ends the stream with UnavailableError if it ends.
        receiver: who takes them.
    """

    MAX_UNDER_WAY = 2

    def __init__(self, network: Network, sender: Process, receiver: Process) -> None:
        self.is_closed = False
        self._network = network
        self._ends = sender, receiver
        self._changed = Condition(network.world)
        self._messages: deque[object] = deque()
        sender.at_end.append(lambda: self._put(UnavailableError(f"{sender.name} is gone")))

    def send(self, messages: Iterator[object]) -> None:
        """Send all messages, and the error that ends them; in a task of the sender."""
        network = self._network
        try:
            for message in messages:
                while len(self._messages) >= self.MAX_UNDER_WAY and not self.is_closed:
                    self._changed.wait(RETRY_S)
                network.world.sleep(network.delay_s())
                while network.is_cut(*self._ends) and not self.is_closed:
                    network.world.sleep(RETRY_S)
                if self.is_closed:
                    return
                if network.happens(network.weather.broken):
                    raise UnavailableError("the stream broke")
                self._put(message)
        except KvferryError as error:
            self._put(error)
        else:
            self._put(None)

    def take(self, timeout_s: float) -> tuple[bool, object]:
        """Return whether there is a message in time, and it; None at the end.

        Raises:
            KvferryError: what ended the stream.
        """
        if not self._changed.wait_for(lambda: self._messages, timeout_s):
            return False, None
        message = self._messages.popleft()
        self._changed.notify_all()
        if isinstance(message, KvferryError):
            raise message
        return True, message

    def close(self) -> None:
        """Take no more."""
        self.is_closed = True
        self._changed.notify_all()

    def _put(self, message: object) -> None:
        self._messages.append(message)
        self._changed.notify_all()
