"""One engine step, as an engine makes it, against an empty call of a Ray actor."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ray

from kvferry.cluster import naming, ray_cluster
from kvferry.cluster.bench.rows import Row, elapsed_ns, measure_pairs
from kvferry.cluster.bench.step_cycle import SCHEME, STEP_BLOCKS, StepCycle, registration
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.cluster.coordinator_process import FrontAddresses, FrontSettings
from kvferry.cluster.ray_coordinator import OPTIONS, RayCoordinatorActor
from kvferry.cluster.ray_handles import get
from kvferry.proto.errors import InvariantError
from kvferry.proto.messages import Registered, expect
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
    with _running_actors() as actors:
        coordinator, call_nothing = actors
        reply = coordinator.call(registration(), timeout_s=_CALL_TIMEOUT_S)
        cycle = StepCycle(expect(reply, Registered).epoch)

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
def _running_actors() -> Iterator[tuple[CoordinatorClient, CallNothing]]:
    """Yield a started coordinator, as a service has it, and a call of an idle actor.

    Raises:
        UnavailableError, DeadlineError: Ray does not start or does not answer.
    """
    with ray_cluster.connected("local", num_ranks=1, namespace=naming.new_namespace()):
        coordinator = remote(**OPTIONS)(RayCoordinatorActor).remote(
            service_id=naming.new_service_id(), fronts=FrontSettings(), scheme=SCHEME
        )
        idle = remote(**OPTIONS)(IdleActor).remote()

        def call_nothing(timeout_s: float) -> None:
            get(idle.nothing.remote(), timeout_s=timeout_s, who="the idle actor")

        addresses: FrontAddresses = get(
            coordinator.start.remote(), timeout_s=START_TIMEOUT_S, who="the coordinator"
        )
        call_nothing(START_TIMEOUT_S)
        yield CoordinatorClient(addresses.control), call_nothing
