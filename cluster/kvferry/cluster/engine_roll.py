"""Which engines have attached to a node lately. No clock: time comes in."""

from kvferry.cluster.engine_info import AttachedEngine, EngineInfo

HEARTBEAT_S = 5.0
"""How often an engine attaches again, to be known to live."""

FORGET_S = 60.0
"""How long one that does not is remembered."""


class EngineRoll:
    """The engines of a node by their ids; one that attaches under a new identity leaves the old."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[EngineInfo, bytes, float]] = {}

    def saw(self, engine: EngineInfo, identity_digest: bytes, now: float) -> None:
        """Note that an engine has attached; `now` in seconds."""
        self._forget(now)
        self._seen[engine.engine_id] = (engine, identity_digest, now)

    def engines(self, now: float) -> tuple[AttachedEngine, ...]:
        """Return the engines that are remembered, in the order in which they came."""
        self._forget(now)
        return tuple(
            AttachedEngine(engine=engine, identity_digest=digest, seen_s=now - seen)
            for engine, digest, seen in self._seen.values()
        )

    def _forget(self, now: float) -> None:
        self._seen = {
            engine_id: one for engine_id, one in self._seen.items() if now - one[2] <= FORGET_S
        }
