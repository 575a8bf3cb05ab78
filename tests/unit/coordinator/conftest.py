import pytest
from tests.unit.coordinator.fleet import Fleet


@pytest.fixture
def fleet() -> Fleet:
    """Two instances, a and b; a file that needs others has its own."""
    fleet = Fleet()
    fleet.register("a")
    fleet.register("b")
    return fleet
