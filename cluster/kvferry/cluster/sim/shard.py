"""Some seeds one after the other in this process, a line of JSON each.

Started by `kvferry sim` with a fixed PYTHONHASHSEED: the order of sets of strings is a part of what
a seed decides.
"""

import json
import sys
from dataclasses import asdict, dataclass

from kvferry.cluster.sim.faults import PROFILES, profile_named
from kvferry.cluster.sim.simulation import Result, simulate

ANY_PROFILE = "any"
"""Each seed has one of the profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one process runs: `seeds`, each for `steps` steps with faults."""

    seeds: range
    steps: int
    profile: str

    def to_arguments(self) -> list[str]:
        """Return the command line of the process."""
        ends = self.seeds.start, self.seeds.stop, self.seeds.step
        return [*map(str, ends), str(self.steps), self.profile]


def profile_of(seed: int, profile: str) -> str:
    """Return the profile that a seed runs with.

    Raises:
        BadInputError: no such profile.
    """
    names = sorted(PROFILES)
    name = names[seed % len(names)] if profile == ANY_PROFILE else profile
    profile_named(name)
    return name


def main() -> None:
    """Run the shard of the command line."""
    *numbers, profile = sys.argv[1:]
    start, stop, step, steps = map(int, numbers)
    for seed in range(start, stop, step):
        name = profile_of(seed, profile)
        result: Result = simulate(seed, steps, name, profile_named(name))
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
