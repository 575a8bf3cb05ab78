"""The heartbeat of an engine, from a thread of its own: a pass through a model may take long.

But not for ever: behind a pass that hangs the heartbeat stops, and then the engine is given up.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.cluster.ports import CoordinatorPort
from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import Heartbeat, InstanceInfo

PULSE_S = 1.0
"""Between one heartbeat's answer and the next heartbeat."""

HANGS_AFTER_S = 60.0
"""Longer than any pass takes: a pass computes one token budget, on a slow CPU in some seconds."""

BEAT_TIMEOUT_S = 2.0
"""A heartbeat that is not answered by then was lost; the next one follows."""

DEAD_AFTER_S = 10.0
"""An engine whose heart has stopped behind a pass for so long is given up, like a frozen one."""

log = logging.getLogger(__name__)


class Passes:
    """The passes of a loop: which of them is under way.

    Attributes:
        present: its number; None between passes.
    """

    def __init__(self) -> None:
        self.present: int | None = None
        self._num_begun = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Be a pass inside."""
        self._num_begun += 1
        self.present = self._num_begun
        try:
            yield
        finally:
            self.present = None


@dataclass(slots=True)
class PassWatch:
    """For how many looks in a row one pass has been under way. Pure.

    Looks are counted and not seconds, as whoever looks may have been paused itself.
    """

    hangs_after: int
    _present: int | None = None
    _num_looks: int = 0

    def look(self, present: int | None) -> None:
        """Take note of the pass that is under way."""
        is_same = present is not None and present == self._present
        self._num_looks = self._num_looks + 1 if is_same else 0
        self._present = present

    @property
    def hangs(self) -> bool:
        """Tell whether the pass takes too long to be alive."""
        return self._num_looks >= self.hangs_after

    @property
    def is_dead(self) -> bool:
        """Tell whether it has hung for so long that nobody waits for it any more."""
        return self._num_looks >= self.hangs_after + DEAD_AFTER_S / PULSE_S


class Pulse:
    """Beats from `start` to `stop`, but not while a pass hangs.

    A coordinator that does not know the instance is left to its steps, which ask for more.

    Args:
        info: as it was registered.
        coordinator: hears the heartbeat.
        epoch: returns the life of the coordinator that the instance is registered with.
        passes: of the engine's loop.
        hangs_after_s: so long a pass may take.
        on_death: called once, when a pass has hung for `DEAD_AFTER_S` more.
    """

    def __init__(
        self,
        info: InstanceInfo,
        coordinator: CoordinatorPort,
        epoch: Callable[[], Epoch],
        *,
        passes: Passes,
        hangs_after_s: float,
        on_death: Callable[[], None],
    ) -> None:
        self._info = info
        self._coordinator = coordinator
        self._epoch = epoch
        self._passes = passes
        self._watch = PassWatch(math.ceil(hangs_after_s / PULSE_S))
        self._on_death = on_death
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-pulse", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; returns at once. Repeating is fine."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(PULSE_S):
            self._watch.look(self._passes.present)
            if self._watch.is_dead:
                log.error("%s is given up: its pass does not end", self._info.instance_id)
                self._on_death()
                return
            if not self._watch.hangs:
                self._beat()

    def _beat(self) -> None:
        command = Heartbeat(
            epoch=self._epoch(),
            instance_id=self._info.instance_id,
            incarnation=self._info.incarnation,
        )
        try:
            self._coordinator.call(command, timeout_s=BEAT_TIMEOUT_S)
        except KvferryError as error:
            log.debug("%s was not heard: %s", self._info.instance_id, error)
        except Exception:  # without a pulse the instance would be taken for dead
            log.exception("a heartbeat of %s failed", self._info.instance_id)
