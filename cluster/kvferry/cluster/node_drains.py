"""Which members are to be drained because Ray is taking their nodes away. Pure, and the watch."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping

from kvferry.proto.drain_messages import Drain, Drained
from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import Incarnation, InstanceId
from kvferry.proto.messages import Command, Describe, Description, Reply, expect

LOOK_S = 1.0
"""So often Ray is asked which nodes it takes away."""

MARGIN_S = 5.0
"""An instance is gone so long before its node: what it told last has arrived by then."""

LEAST_S = 1.0
WITHOUT_DEADLINE_S = 60.0
"""For an instance on a node that Ray drains without saying until when."""

Leaving = Mapping[str, float | None]
"""Ray's ids of the nodes that it takes away, with the seconds until then, None: nobody said."""

Life = tuple[InstanceId, Incarnation]

_log = logging.getLogger(__name__)


def drains_of(
    description: Description, leaving: Leaving, told: Collection[Life] = ()
) -> Iterator[Drain]:
    """Yield a drain for each member on a node that goes, unless it is being drained.

    Args:
        description: of the service.
        leaving: the nodes that go.
        told: lives whose drain the coordinator has begun; a suspect's state does not show it.
    """
    for status in description.instances:
        info = status.info
        nodes = [node for node in info.rank_nodes if node in leaving]
        was_told = status.state == "suspect" and (info.instance_id, info.incarnation) in told
        if not nodes or status.state == "draining" or was_told:
            continue
        yield Drain(
            instance_id=info.instance_id,
            incarnation=info.incarnation,
            deadline_s=min(_deadline_s(leaving[node]) for node in nodes),
        )


class NodeDrains:
    """Drains the members of nodes that go, in a thread of its own, from `start` to `stop`.

    Args:
        call: executes a command at the coordinator.
        leaving: asks Ray which nodes go.
    """

    def __init__(self, call: Callable[[Command], Reply], leaving: Callable[[], Leaving]) -> None:
        self._call = call
        self._leaving = leaving
        self._told: set[Life] = set()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; repeating is fine."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-drains", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End; returns at once. Repeating is fine."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                self._look()
            except KvferryError as error:
                _log.warning("no node is looked after now: %s", error)
            except Exception:  # Ray's own errors are many, and the next look may succeed
                _log.exception("Ray does not tell which nodes go")

    def _look(self) -> None:
        leaving = self._leaving()
        if not leaving:
            return
        description = expect(self._call(Describe()), Description)
        for command in drains_of(description, leaving, self._told):
            try:
                drained = expect(self._call(command), Drained)
            except KvferryError as error:
                # Others go on nevertheless, and this one is asked again at the next look.
                _log.warning("%s is not drained yet: %s", command.instance_id, error)
                continue
            _log.warning("%s is drained: Ray takes its node away", command.instance_id)
            self._told.add((drained.instance_id, drained.incarnation))


def _deadline_s(left_s: float | None) -> float:
    return WITHOUT_DEADLINE_S if left_s is None else max(left_s - MARGIN_S, LEAST_S)
