"""When members are not heard: suspects first, who get nothing new, then dead.

Silence is counted in time in which the coordinator would have heard: while its process was paused
it heard nobody, and that says nothing of them.
"""

import math
from collections.abc import Mapping

from kvferry.coordinator.instances import Instance
from kvferry.coordinator.leases import require_ttl
from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import InstanceId

SUSPECT_AFTER_S = 2.0
DEAD_AFTER_S = 10.0

LONGEST_STEP_S = 1.0
"""Commands and ticks come closer together; a larger step of the clock means that it was paused."""


class Silence:
    """How long each member has not been heard.

    Args:
        suspect_after_s: of a live member, after which it is a suspect.
        dead_after_s: after which it is dead.

    Raises:
        BadInputError: no positive numbers of seconds, or dead before it could be a suspect.

    """

    def __init__(self, suspect_after_s: float, dead_after_s: float) -> None:
        require_ttl("suspect_after_s", suspect_after_s)
        require_ttl("dead_after_s", dead_after_s)
        if dead_after_s <= suspect_after_s:
            raise BadInputError(
                "dead_after_s must be more than suspect_after_s",
                given=dead_after_s,
                allowed=f"above {suspect_after_s:g}",
            )
        self.suspect_after_s = suspect_after_s
        self.dead_after_s = dead_after_s
        self._last_now_s = -math.inf
        self._listened_s = 0.0
        # Nothing can have become of anybody's silence before this moment.
        self._due_s = math.inf

    def hear(self, instance: Instance) -> bool:
        """Take note that a member lives, and tell whether it was a suspect."""
        was_suspect, instance.is_suspect = instance.is_suspect, False
        instance.heard_s = self._listened_s
        self._due_s = min(self._due_s, self._listened_s + self.suspect_after_s)
        return was_suspect

    @property
    def is_young(self) -> bool:
        """Tell whether a member may live that was not heard since the beginning."""
        return self._listened_s < self.dead_after_s

    def of(self, instance: Instance) -> float:
        """Return for how many seconds a member has not been heard."""
        return self._listened_s - instance.heard_s

    def pass_time(
        self, now: float, instances: Mapping[InstanceId, Instance]
    ) -> tuple[list[Instance], list[Instance]]:
        """Let it be `now`, in seconds; return who has become a suspect, and who is dead."""
        step_s, self._last_now_s = now - self._last_now_s, now
        if step_s <= LONGEST_STEP_S:
            self._listened_s += step_s
        if self._listened_s < self._due_s:
            return [], []
        suspects: list[Instance] = []
        dead: list[Instance] = []
        self._due_s = math.inf
        for instance in instances.values():
            silent_s = self.of(instance)
            if silent_s >= self.dead_after_s:
                dead.append(instance)
                continue
            if silent_s >= self.suspect_after_s and not instance.is_suspect:
                instance.is_suspect = True
                suspects.append(instance)
            limit_s = self.dead_after_s if instance.is_suspect else self.suspect_after_s
            self._due_s = min(self._due_s, instance.heard_s + limit_s)
        return suspects, dead
