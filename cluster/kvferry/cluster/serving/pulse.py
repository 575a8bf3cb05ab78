"""The heartbeat of an engine, from a thread of its own: a pass through a model may take long."""

import logging
import threading
from collections.abc import Callable

from kvferry.cluster.ports import CoordinatorPort
from kvferry.proto.errors import KvferryError
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import Heartbeat, InstanceInfo

PULSE_S = 1.0
"""Between one heartbeat's answer and the next heartbeat."""

BEAT_TIMEOUT_S = 2.0
"""A heartbeat that is not answered by then was lost; the next one follows."""

log = logging.getLogger(__name__)


class Pulse:
    """Beats from `start` to `stop`.

    A coordinator that does not know the instance is left to its steps, which ask for more.

    Args:
        info: as it was registered.
        coordinator: hears the heartbeat.
        epoch: returns the life of the coordinator that the instance is registered with.
    """

    def __init__(
        self, info: InstanceInfo, coordinator: CoordinatorPort, epoch: Callable[[], Epoch]
    ) -> None:
        self._info = info
        self._coordinator = coordinator
        self._epoch = epoch
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
