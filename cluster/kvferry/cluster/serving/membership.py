"""An engine's place in the service: its questions, and its return to a coordinator that lost it.

Whoever asks blocks until there is an answer: a coordinator that is away comes back, and knows
nothing then. So the engine tells it what there is, in two stages: the blocks, while the engine goes
on; then the requests that run, as they are at that moment.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TypeVar

from kvferry.cluster.ports import CoordinatorPort
from kvferry.proto.errors import (
    KvferryError,
    NotRegisteredError,
    RestoringError,
    UnavailableError,
)
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import (
    Command,
    Done,
    InstanceInfo,
    Registered,
    RegisterInstance,
    expect,
)
from kvferry.proto.restore_messages import RestoreBlocks, RestoredRequest, RestoreRequests
from kvferry.proto.step_messages import Step, StepReply
from kvferry.worker.inventory import InventoryPart

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""Between attempts to reach a coordinator; each pause is twice the one before."""

TOLD_BLOCKS = 16_384
"""Blocks that are told at once: others need not wait long for an answer meanwhile."""

TOLD_HASHES = 65_536
"""Of requests, so many hashes and block ids are told at once, and those of one request at least."""

_R = TypeVar("_R")


class Stage(Enum):
    """What the coordinator knows of an instance."""

    MEMBER = "everything"
    LOST = "nothing"
    BLOCKS_TOLD = "what blocks it holds"


class Membership:
    """Asks one question at a time; only `stop` may be called meanwhile.

    Args:
        info: as it was registered.
        epoch: under which it was.
        coordinator: whom to ask.

    Attributes:
        epoch: the coordinator's life that knows the instance.
        stage: what comes next: `ask`, `tell_blocks` or `tell_requests`.
    """

    def __init__(self, info: InstanceInfo, epoch: Epoch, coordinator: CoordinatorPort) -> None:
        self.epoch = epoch
        self.stage = Stage.MEMBER
        self._info = info
        self._coordinator = coordinator
        self._stopping = threading.Event()
        self._name = f"{info.instance_id}/{info.incarnation}"
        self._num_returns = 0

    def ask(self, step: Step) -> StepReply | None:
        """Return the reply; None from a coordinator that does not know the instance.

        Raises:
            KvferryError: the step was refused, or another life of the instance is registered.
            UnavailableError: `stop` was called.
        """
        return self._as_member(lambda: self._call(step, StepReply))

    def tell_blocks(self, inventory: Callable[[int], Iterable[InventoryPart]]) -> None:
        """Register again and tell what is held; errors as in `ask`.

        Nothing may be written meanwhile but by the requests that run.

        Args:
            inventory: returns what is held, in parts of so many blocks.
        """
        self._as_member(lambda: self._tell_blocks(inventory))

    def tell_requests(self, requests: Iterable[RestoredRequest]) -> None:
        """Tell what runs, after which the instance is a member again; errors as in `ask`."""
        self._as_member(lambda: self._tell_requests(requests))

    def stop(self) -> None:
        """Let whoever asks give up."""
        self._stopping.set()

    def _as_member(self, talk: Callable[[], _R]) -> _R | None:
        try:
            return talk()
        except (NotRegisteredError, RestoringError) as error:
            log.warning("%s comes back: %s", self._name, error)
            self.stage = Stage.LOST
            return None

    @property
    def _registration(self) -> str:
        return f"{self._name}/return/{self._num_returns}"

    def _tell_blocks(self, inventory: Callable[[int], Iterable[InventoryPart]]) -> None:
        self._num_returns += 1
        register = RegisterInstance(call_id=self._registration, info=self._info, returning=True)
        registered = self._call(register, Registered)
        if registered.epoch < self.epoch:
            log.warning("a coordinator answers that is older than epoch %d", self.epoch)
            self._pause(LONGEST_PAUSE_S)
            return
        self.epoch = registered.epoch
        for number, part in enumerate(inventory(TOLD_BLOCKS)):
            self._call(
                RestoreBlocks(
                    call_id=f"{self._registration}/{number}",
                    epoch=self.epoch,
                    instance_id=self._info.instance_id,
                    incarnation=self._info.incarnation,
                    registration=self._registration,
                    group_id=part.group_id,
                    hashes=tuple(part.hashes),
                    block_ids=tuple(part.block_ids),
                ),
                Done,
            )
        self.stage = Stage.BLOCKS_TOLD

    def _tell_requests(self, requests: Iterable[RestoredRequest]) -> None:
        batches = [*_batches(requests)] or [()]
        for number, batch in enumerate(batches, start=1):
            self._call(
                RestoreRequests(
                    call_id=f"{self._registration}/{number}",
                    epoch=self.epoch,
                    instance_id=self._info.instance_id,
                    incarnation=self._info.incarnation,
                    registration=self._registration,
                    requests=batch,
                    is_last=number == len(batches),
                ),
                Done,
            )
        self.stage = Stage.MEMBER

    def _call(self, command: Command, kind: type[_R]) -> _R:
        """Ask until there is an answer."""
        # Repeating is safe: the coordinator answers the same call_id with the same reply.
        for attempt in itertools.count():
            try:
                return expect(self._coordinator.call(command, timeout_s=CALL_TIMEOUT_S), kind)
            except RestoringError:
                raise
            except KvferryError as error:
                if not error.retryable:
                    raise
                log.warning("%s: %s; trying again", self._name, error)
            self._pause(min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    def _pause(self, pause_s: float) -> None:
        if self._stopping.wait(pause_s):
            raise UnavailableError(f"{self._name} stops while it waits for the coordinator")


def _batches(requests: Iterable[RestoredRequest]) -> Iterator[tuple[RestoredRequest, ...]]:
    """Yield the requests in batches that fit a message."""
    batch: list[RestoredRequest] = []
    size = 0
    for request in requests:
        own = len(request.hashes) + sum(map(len, request.block_ids))
        if batch and size + own > TOLD_HASHES:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(request)
        size += own
    if batch:
        yield tuple(batch)
