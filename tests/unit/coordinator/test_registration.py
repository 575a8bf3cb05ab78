"""Instances whose pool or groups cannot work are refused, and nothing has changed then."""

from dataclasses import replace

import pytest
from tests.unit.coordinator.fleet import IDENTITY, Fleet

from kvferry.proto.errors import ConfigError
from kvferry.proto.identity import GroupSpec


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.register("a")
    return fleet


def test_a_life_whose_pool_cannot_be_made_leaves_the_one_before_it(fleet: Fleet) -> None:
    fleet.cache("a", "xy")
    with pytest.raises(ConfigError, match="unknown dtype"):
        fleet.register("a", incarnation=2, identity=replace(IDENTITY, kv_dtype="fp7"))
    assert fleet.locate("xy")["a"] == 2


def test_chunks_that_are_no_whole_blocks_are_refused(fleet: Fleet) -> None:
    groups = (GroupSpec(kind="chunked_local", layers=(0,), chunk_tokens=6),)
    with pytest.raises(ConfigError, match="must be whole blocks; given: chunk_tokens=6"):
        fleet.register("c", identity=replace(IDENTITY, groups=groups))
