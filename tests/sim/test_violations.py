"""What only a broken kvferry does ends a run of the simulator, whoever would get over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sim.scripted import Scenario, prompt, scenario

from kvferry.cluster.sim.faults import profile_named
from kvferry.cluster.sim.simulation import simulate
from kvferry.proto.errors import InvariantError, UnavailableError


@pytest.fixture
def service() -> Iterator[Scenario]:
    with scenario() as running:
        yield running


@pytest.mark.parametrize("error", [InvariantError("x"), AssertionError("x"), KeyError("x")])
def test_what_must_never_be_raised_in_a_pull_ends_the_run(
    service: Scenario, error: Exception
) -> None:
    sender, taker = service.add("p", "prefill"), service.add("d")
    tokens = prompt(1, 9)
    service.compute(sender, "seed", tokens)

    def fail() -> None:
        raise error

    taker.fetch.before_fetch = fail
    service.submit(taker, "r", tokens)
    with pytest.raises(type(error), match="x"):
        service.run_for(1.0)


def test_a_loop_that_ends_ends_the_run_unless_it_had_to_go(service: Scenario) -> None:
    life = service.add("d")
    service.world.spawn(life.member.watch, life.member.process)
    service.run_for(1.0)
    # Its words are those of an end that is allowed; its kind is not.
    life.engine.fail(UnavailableError("rank 1 of the instance: StaleError, DrainedError"))
    with pytest.raises(UnavailableError, match="the engine of instance d has failed"):
        service.run_for(3.0)


def test_a_seed_leaves_no_file_open() -> None:
    num_open = [0, 0]
    for index in range(2):
        simulate(3, 300, "all", profile_named("all"))
        num_open[index] = len(list(Path("/proc/self/fd").iterdir()))
    assert num_open[0] == num_open[1]
