import pytest
from tests.unit.connectors.made_up import Answers, Clock, make_half

from kvferry.cluster.connectors.scheduler_half import SchedulerHalf


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def half(answers: Answers, clock: Clock) -> SchedulerHalf:
    return make_half(answers, clock)
