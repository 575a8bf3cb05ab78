"""Members that are drained while others freeze or come back, each as a script of the simulator."""

from collections.abc import Iterator

import pytest
from tests.sim.scripted import Scenario, answer, prompt, scenario

from kvferry.proto.drain_messages import Drain
from kvferry.proto.ids import InstanceId


@pytest.fixture
def service() -> Iterator[Scenario]:
    with scenario() as running:
        yield running


def drain(service: Scenario, deadline_s: float) -> None:
    service.ask(Drain(instance_id=InstanceId("x"), deadline_s=deadline_s))


def test_what_was_to_come_from_a_drained_life_is_not_taken_from_the_next_one(
    service: Scenario,
) -> None:
    """The peer that was to get it is frozen from before the drain until the next life has it."""
    first, peer = service.add("x"), service.add("y")
    tokens = prompt(1, 13)
    service.compute(first, "seed", tokens)
    service.pause(peer, 1.4)
    drain(service, deadline_s=0.8)
    service.until(lambda: not service.is_member(first), 1.3)
    service.kill(first)
    second = service.add("x", incarnation=2)
    service.compute(second, "seed", tokens)
    service.run_for(1.0)
    service.submit(peer, "r", tokens)
    output, finished = service.result(peer, "r")
    assert (output, finished.accounting.remote_hit_tokens) == (answer(tokens), 12)
    assert service.counter("drained_blocks") == 0
    service.require_nothing_held()


def test_nothing_moves_from_a_suspect_before_it_is_heard_again(service: Scenario) -> None:
    leaving, peer = service.add("x"), service.add("y")
    service.compute(leaving, "seed", prompt(1, 13))
    service.pause(peer, 1.8)
    service.pause(leaving, 4.0)
    drain(service, deadline_s=20.0)
    service.run_for(3.0)
    assert service.known_of(leaving).is_suspect
    assert service.counter("drained_blocks") == 0
    service.until(lambda: service.counter("drains") == 1, 10.0)
    assert service.counter("drained_blocks") == 3
