"""Ends the processes of actors that are frozen, so that Ray makes others in their place.

Ray itself notices only processes that have ended.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from kvferry.cluster.canary import Canary

TURN_S = 1.0
JOIN_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 1.0
"""For an answer that is here already."""

log = logging.getLogger(__name__)


class _Question(NamedTuple):
    """A call that is parked at an actor."""

    actor: "ActorHandle[Any]"
    ref: Any


class FrozenWatch:
    """Works from construction to `stop`, in a thread of its own.

    Args:
        names: returns the names of the actors to look after, of this process's namespace. All of
            them restart.
        have_started: they serve already.
    """

    def __init__(self, names: Callable[[], Iterable[str]], *, have_started: bool = False) -> None:
        self._names = names
        self._have_started = have_started
        self._questions: dict[str, _Question] = {}
        self._canaries: dict[str, Canary] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-frozen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look after nobody any more. Repeating is fine."""
        self._stopping.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.wait(TURN_S):
            try:
                for name in self._names():
                    self._look_after(name)
            except Exception as error:  # the cluster may not answer; it is asked again
                log.warning("frozen processes cannot be looked for now: %s", error)

    def _look_after(self, name: str) -> None:
        canary = self._canaries.setdefault(name, Canary(self._have_started))
        question = self._questions.get(name)
        if question is not None:
            if ray.wait([question.ref], timeout=0.0)[0]:
                if _is_answered(question.ref):
                    canary.answered()
                else:
                    canary.ended()
            elif not canary.is_frozen():
                return
            elif not self._stopping.is_set():
                log.error("%s does not answer; its process is ended", name)
                ray.kill(question.actor, no_restart=False)
                self._canaries[name] = Canary()
            del self._questions[name]
        try:
            actor = ray.get_actor(name)
        except ValueError:  # it is gone for good
            self._canaries.pop(name, None)
            return
        ready: Any = actor.__ray_ready__  # of every actor; Ray's types do not know it
        self._questions[name] = _Question(actor, ready.remote())


def _is_answered(ref: Any) -> bool:
    """Tell whether the process itself has ended a call, and not Ray, as the process is gone."""
    try:
        ray.get(ref, timeout=ANSWER_TIMEOUT_S)
    except RayTaskError:  # it comes from the process
        return True
    except RayError:
        return False
    return True
