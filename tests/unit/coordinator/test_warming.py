"""An instance that is new pulls the hottest prefixes of its peers into a part of its blocks."""

import pytest
from tests.unit.coordinator.drains import BLOCK_BYTES, drain, end, move_all, moves_of
from tests.unit.coordinator.fleet import Fleet, admit, chain, info, release
from tests.unit.coordinator.returning import requests_command

from kvferry.coordinator import warming as warming_plan
from kvferry.proto.errors import ConfigError


def warming(share: float = 0.25) -> Fleet:
    return Fleet(warm_share=share)


def test_a_new_instance_gets_what_was_used_last_up_to_its_share() -> None:
    fleet = warming()
    fleet.register("a", 40)
    fleet.cache("a", "abcdef")
    fleet.cache("a", "xyz")
    fleet.register("b", 17)  # 16 blocks, a quarter of them is 4
    (move,) = moves_of(fleet, "b")
    assert move.hashes == (*chain("xyz"), chain("a")[0])
    fleet.now += 2.0
    end(fleet, "b", move)
    assert (fleet.locate("xyz")["b"], fleet.locate("abcdef")["b"]) == (3, 1)
    assert moves_of(fleet, "b") == ()
    counters = fleet.describe().counters
    assert (counters["warmed_blocks"], counters["warmed_bytes"]) == (4, 4 * BLOCK_BYTES)
    assert [e.detail for e in fleet.effects if e.kind == "instance_warmed"] == [
        f"b: 4 blocks ({4 * BLOCK_BYTES} bytes) in 2.0 s"
    ]


def test_of_a_peer_only_so_many_of_the_hottest_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warming_plan, "_MAX_LISTED", 2)
    fleet = warming(1.0)
    fleet.register("a", 40)
    fleet.cache("a", "abcd")
    fleet.register("b", 30)
    assert [move.hashes for move in move_all(fleet, "b")] == [chain("ab")]


def test_it_takes_from_each_of_its_peers_in_turn() -> None:
    fleet = warming(0.5)
    for name, text in (("a", "pqrs"), ("b", "wxyz")):
        fleet.register(name, 20)
        fleet.cache(name, text)
    fleet.register("c", 9)
    moved = move_all(fleet, "c")
    assert {move.source.instance_id: move.hashes for move in moved} == {
        "a": chain("pq"),
        "b": chain("wx"),
    }


def test_a_block_in_use_comes_with_the_chain_before_it() -> None:
    fleet = warming(1.0)
    fleet.register("a", 40)
    fleet.cache("a", "abcd")
    fleet.compute("a", admit("r", "ab", allow_remote=False))
    fleet.register("b", 30)
    (move,) = moves_of(fleet, "b")
    assert move.hashes == chain("abcd")


def test_a_prefix_that_several_hold_comes_once() -> None:
    fleet = warming(0.5)
    for name in "ab":
        fleet.register(name, 20)
        fleet.cache(name, "pq")
    fleet.register("c", 17)
    assert [move.hashes for move in move_all(fleet, "c")] == [chain("pq")]


def test_who_comes_back_or_is_alone_is_not_warmed() -> None:
    fleet = warming()
    fleet.register("a", 20)
    fleet.cache("a", "pq")
    fleet.remove("a")
    fleet.register("b", 20)
    assert moves_of(fleet, "b") == ()
    fleet.cache("b", "pq")
    fleet.enter(info("a", 20, identity=fleet.identity), returning=True)
    fleet.send(requests_command(fleet, "a"))
    assert moves_of(fleet, "a") == ()


def test_without_a_share_nobody_is_warmed() -> None:
    fleet = Fleet()
    fleet.register("a", 20)
    fleet.cache("a", "pq")
    fleet.register("b", 20)
    assert moves_of(fleet, "b") == ()


def test_a_drain_ends_the_warming_of_who_goes() -> None:
    fleet = warming()
    fleet.register("a", 20)
    fleet.cache("a", "pq")
    fleet.register("b", 20)
    drain(fleet, "b")
    assert moves_of(fleet, "b") == ()


def test_a_source_that_is_gone_is_passed_over() -> None:
    fleet = warming()
    fleet.register("a", 20)
    fleet.cache("a", "pq")
    fleet.register("b", 20)
    fleet.remove("a")
    assert moves_of(fleet, "b") == ()
    fleet.register("c", 20)
    fleet.step("c", releases=(release("nobody"),))
    assert fleet.num_free("b") == 19


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", True])
def test_a_share_that_is_no_part_is_refused(share: object) -> None:
    with pytest.raises(ConfigError, match="warm_share"):
        Fleet(warm_share=share)
