"""What goes wrong, and when: drawn from the world's chance, and over at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.cluster.sim.network import Network, Weather
from kvferry.cluster.sim.world import Process, World
from kvferry.proto.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How rough a run is. Chances are from 0 to 1, pauses between events of a kind in seconds."""

    weather: Weather = field(default_factory=Weather)
    new_weights_every_s: float | None = 8.0
    drain_every_s: float | None = 5.0
    restart_every_s: float | None = None
    crash_every_s: float | None = None
    mistake_every_s: float | None = None
    pause_every_s: float | None = None
    cut_every_s: float | None = None
    longest_pause_s: float = 8.0
    longest_cut_s: float = 8.0
    clock_skew: float = 0.0


def _rough() -> Weather:
    return Weather(
        longest_delay_s=0.01, late=0.02, lost=0.01, twice=0.02, broken=0.01, corrupt=0.02
    )


PROFILES: dict[str, Profile] = {
    "calm": Profile(),
    "network": Profile(weather=_rough(), cut_every_s=4.0),
    "crashes": Profile(
        restart_every_s=5.0,
        crash_every_s=4.0,
        mistake_every_s=6.0,
        pause_every_s=3.0,
        clock_skew=0.05,
    ),
    "all": Profile(
        weather=_rough(),
        restart_every_s=8.0,
        crash_every_s=6.0,
        mistake_every_s=8.0,
        pause_every_s=3.0,
        cut_every_s=5.0,
        clock_skew=0.05,
    ),
}


def profile_named(name: str) -> Profile:
    """Return a profile.

    Raises:
        BadInputError: no such profile, naming those there are.
    """
    if name not in PROFILES:
        raise BadInputError("no such profile", given=name, allowed=sorted(PROFILES))
    return PROFILES[name]


class Victim(Protocol):
    """What may die, or be taken for dead."""

    def crash(self) -> None:
        """End where it stands."""

    def take_for_dead(self) -> None:
        """Be replaced, and go on all the same."""


class Faults:
    """Makes a profile's faults happen, until `stop`.

    Args:
        network: is cut, and has the profile's weather.
        profile: what happens how often.
        processes: all that may be paused or cut off, as they are now.
        coordinator: dies, or is taken for dead, in a rhythm of its own.
        victims: all others that may, as they are now.
        renew: lets the model have new weights, which is no fault, but comes at such times too.
        drain: drains a member, likewise.
    """

    def __init__(
        self,
        network: Network,
        profile: Profile,
        *,
        processes: Callable[[], list[Process]],
        coordinator: Victim,
        victims: Callable[[], Sequence[Victim]],
        renew: Callable[[], None],
        drain: Callable[[], None],
    ) -> None:
        self._network = network
        self._world: World = network.world
        self._profile = profile
        self._processes = processes
        self._coordinator = coordinator
        self._victims = victims
        self._renew = renew
        self._drain = drain
        self._is_over = False

    def start(self) -> None:
        """Begin; in a task of a process of its own."""
        profile = self._profile
        self._network.weather = profile.weather
        for pause_s, fault in (
            (profile.new_weights_every_s, self._renew),
            (profile.drain_every_s, self._drain),
            (profile.restart_every_s, self._restart_coordinator),
            (profile.crash_every_s, lambda: self._hit_one(lambda one: one.crash())),
            (profile.mistake_every_s, lambda: self._hit_one(lambda one: one.take_for_dead())),
            (profile.pause_every_s, self._pause_one),
            (profile.cut_every_s, self._cut_some),
        ):
            if pause_s is not None:
                self._world.spawn(lambda p=pause_s, f=fault: self._repeat(p, f))  # type: ignore[misc]

    def stop(self) -> None:
        """Let everything be well from now on."""
        self._is_over = True
        self._network.weather = Weather()
        self._network.cut.clear()
        for process in self._processes():
            process.paused_until_s = min(process.paused_until_s, self._world.now_s)

    def _repeat(self, every_s: float, fault: Callable[[], None]) -> None:
        while True:
            self._world.sleep(self._world.random.expovariate(1.0 / every_s))
            if self._is_over:
                return
            fault()

    def _restart_coordinator(self) -> None:
        if self._world.random.random() < 0.5:
            self._coordinator.crash()
        else:
            self._coordinator.take_for_dead()

    def _hit_one(self, fault: Callable[[Victim], None]) -> None:
        victims = self._victims()
        if victims:
            fault(self._world.random.choice(victims))

    def _pause_one(self) -> None:
        process = self._world.random.choice(self._processes())
        self._world.pause(process, self._world.random.random() * self._profile.longest_pause_s)

    def _cut_some(self) -> None:
        random = self._world.random
        one, other = random.sample(self._processes(), 2)
        pairs = {(one.name, other.name), (other.name, one.name)}
        if random.random() < 0.5:
            pairs.pop()
        self._network.cut |= pairs
        self._world.sleep(random.random() * self._profile.longest_cut_s)
        self._network.cut -= pairs
