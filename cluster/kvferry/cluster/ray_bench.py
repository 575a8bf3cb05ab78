"""One engine step, as an engine makes it, against an empty call of a Ray actor."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import ray

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.bench.rows import Row, elapsed_ns, measure_pairs
from kvferry.cluster.bench.step_cycle import EPOCH, SCHEME, STEP_BLOCKS, StepCycle, registration
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.ray_handles import RayCoordinatorActor, get
from kvferry.coordinator.control_server import ControlServer
from kvferry.proto.errors import InvariantError
from kvferry.proto.ids import Epoch
from kvferry.proto.messages import expect
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import Step, StepReply

remote: Any = ray.remote  # its types do not know all options
START_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 30.0
_CYCLES = 8

CallNothing = Callable[[float], None]
"""Calls a method that does nothing and waits for it, at most so many seconds."""


def step_rows(seconds: float) -> Iterator[Row]:
    """Yield `step_call@256`, in ns per call; starts and stops a local Ray cluster.

    Raises:
        UnavailableError, DeadlineError: Ray does not start or does not answer.
        InvariantError: a step was not granted its blocks.
    """
    with _running_actors(SCHEME, EPOCH) as actors:
        coordinator, call_nothing = actors
        coordinator.call(registration(), timeout_s=_CALL_TIMEOUT_S)
        cycle = StepCycle()

        def call(step: Step) -> StepReply:
            return expect(coordinator.call(step, timeout_s=_CALL_TIMEOUT_S), StepReply)

        def ns_per_step() -> float:
            steps = [step for _ in range(_CYCLES) for step in cycle.next_steps()]
            replies: list[StepReply] = []
            spent = elapsed_ns(lambda: replies.extend(map(call, steps)))
            granted = [sum(map(len, s.new_block_ids)) for reply in replies for s in reply.scheduled]
            if granted != [STEP_BLOCKS] * _CYCLES:
                raise InvariantError("a step was not granted its blocks", given=granted)
            return spent / len(steps)

        def ns_per_empty_call() -> float:
            def calls() -> None:
                for _ in range(2 * _CYCLES):
                    call_nothing(_CALL_TIMEOUT_S)

            return elapsed_ns(calls) / (2 * _CYCLES)

        ns_per_step()
        ns_per_empty_call()
        yield measure_pairs(
            "step_call@256",
            ns_per_step,
            "empty_call",
            ns_per_empty_call,
            unit="ns",
            seconds=seconds,
        )


class IdleActor:
    """An actor whose call costs what any call costs."""

    def nothing(self) -> None:
        """Return at once."""


@contextlib.contextmanager
def _running_actors(
    scheme: HashScheme, epoch: Epoch
) -> Iterator[tuple[CoordinatorClient, CallNothing]]:
    """Yield a started coordinator, as a service has it, and a call of an idle actor.

    Raises:
        UnavailableError, DeadlineError: Ray does not start or does not answer.
    """
    with ray_cluster.connected("local", num_ranks=1, namespace=naming.new_namespace()):
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        coordinator = remote(**options)(RayCoordinatorActor).remote(scheme=scheme, epoch=epoch)
        idle = remote(**options)(IdleActor).remote()

        def call_nothing(timeout_s: float) -> None:
            get(idle.nothing.remote(), timeout_s=timeout_s, who="the idle actor")

        front = functools.partial(ControlServer, bind="127.0.0.1", port=0, insecure=False)
        starting: Any = coordinator.start.remote(front=front)
        get(starting, timeout_s=START_TIMEOUT_S, who="the coordinator")
        address = get(
            coordinator.front_address.remote(), timeout_s=START_TIMEOUT_S, who="the coordinator"
        )
        call_nothing(START_TIMEOUT_S)
        yield CoordinatorClient(address), call_nothing
