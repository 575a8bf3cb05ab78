"""Which fault comes when: decided by the seed alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

FaultKind = Literal[
    "kill_coordinator",
    "pause_coordinator",
    "kill_instance",
    "pause_instance",
    "kill_raylet",
    "kill_node",
    "pause_node",
]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

PAUSES_S = (0.5, 3.0, 14.0)
"""Nobody minds, somebody is suspected, somebody is given up and wakes up after all."""

MAX_CALM_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One process, or all of a node, is killed, or stopped for a while.

    `calm_s` seconds after all had recovered from the last fault; `choice` in [0, 1) says which of
    those that there are; `pause_s` seconds are for pauses.
    """

    kind: FaultKind
    calm_s: float
    choice: float
    pause_s: float

    @property
    def is_pause(self) -> bool:
        """Tell whether the victim goes on afterwards."""
        return self.kind.startswith("pause")

    def victim(self, candidates: Sequence[str]) -> str:
        """Return one of the names, of which there must be one at least."""
        return candidates[int(self.choice * len(candidates))]


def faults(seed: int, kinds: Sequence[FaultKind] = KINDS) -> Iterator[Fault]:
    """Yield faults without end: each kind once, in any order, then each once more, and so on."""
    chance = random.Random(f"faults {seed}")
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            yield Fault(
                kind=kind,
                calm_s=chance.uniform(0.0, MAX_CALM_S),
                choice=chance.random(),
                pause_s=chance.choice(PAUSES_S),
            )
