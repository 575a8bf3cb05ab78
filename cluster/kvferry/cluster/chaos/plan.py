"""What a chaos run is asked for."""

from dataclasses import dataclass

from kvferry.cluster.chaos.faults import KINDS, FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """`minutes` of faults of these kinds, decided by `seed`; `model` is empty for the demo's."""

    minutes: float
    seed: int
    model: str
    kinds: tuple[FaultKind, ...]

    @property
    def command(self) -> str:
        """The command that makes the same faults."""
        words = ["kvferry chaos", f"--minutes {self.minutes:g}", f"--seed {self.seed}"]
        if self.model:
            words.append(f"--model {self.model}")
        if self.kinds != KINDS:
            words += [f"--only {kind}" for kind in self.kinds]
        return " ".join(words)
