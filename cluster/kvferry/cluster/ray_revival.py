"""What Ray's actors do after a death: Ray makes another process, and nobody calls its `start`."""

import logging
import threading
from collections.abc import Callable

import ray

PAUSE_S = 1.0

_log = logging.getLogger(__name__)


class Revival:
    """Starts an actor that Ray has made anew, however long it takes; to be made in a constructor.

    Args:
        start: serves, or raises; called until it has succeeded once.
        who: is started; for the log.
    """

    def __init__(self, start: Callable[[], object], who: str) -> None:
        self._start = start
        self._who = who
        self._given_up = threading.Event()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            threading.Thread(target=self._start_again, name="kvferry-start", daemon=True).start()

    def give_up(self) -> None:
        """Try no more: the actor is stopped."""
        self._given_up.set()

    def _start_again(self) -> None:
        while not self._given_up.is_set():
            try:
                self._start()
                return
            except Exception as error:  # whatever it is, nobody else would try once more
                _log.warning("%s cannot start yet: %s", self._who, error)
            self._given_up.wait(PAUSE_S)
