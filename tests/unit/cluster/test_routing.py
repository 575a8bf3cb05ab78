"""Which instances a request is sent to."""

import pytest

from kvferry.cluster.serving.routing import Route, choose_route, without
from kvferry.proto.ids import InstanceId
from kvferry.proto.messages import Role

Holder = tuple[str, Role, int]
"""An instance and how many hashes of the prompt it holds."""


def holder(name: str, role: Role, num_hashes: int) -> Holder:
    return name, role, num_hashes


def route(
    *holders: Holder, in_flight: dict[str, int] | None = None, blocks: int = 60, least: int = 1
) -> Route | None:
    counts = {InstanceId(name): count for name, count in (in_flight or {}).items()}
    return choose_route(
        {InstanceId(name): role for name, role, _ in holders},
        {InstanceId(name): held for name, _, held in holders if held},
        counts,
        num_prompt_hashes=blocks,
        min_prefill_hashes=least,
        hash_block_tokens=16,
    )


def test_instances_are_avoided_where_another_has_their_role() -> None:
    roles: dict[InstanceId, Role] = {
        InstanceId("p0"): "prefill",
        InstanceId("d0"): "decode",
        InstanceId("d1"): "decode",
    }
    p0, d0, d1 = roles
    assert without(roles, set()) == roles
    assert without(roles, {d0}) == {p0: "prefill", d1: "decode"}
    assert without(roles, {p0, d1}) == {p0: "prefill", d0: "decode"}
    assert without(roles, {p0, d0, d1}) == roles


P0, D0, D1 = holder("p0", "prefill", 0), holder("d0", "decode", 0), holder("d1", "decode", 0)


def test_a_new_prompt_goes_through_a_prefill_instance() -> None:
    assert route(P0, D0, D1) == Route(decode=InstanceId("d0"), prefill=InstanceId("p0"))


def test_where_nobody_is_known_to_hold_anything_the_load_decides() -> None:
    assert route(D0, D1, in_flight={"d0": 1}) == Route(decode=InstanceId("d1"), prefill=None)


def test_a_prompt_that_some_instance_holds_needs_no_prefill() -> None:
    found = route(P0, D0, holder("d1", "decode", 60))
    assert found == Route(decode=InstanceId("d1"), prefill=None)


def test_a_prefix_held_by_the_prefill_instance_is_pulled_without_another_prefill() -> None:
    found = route(holder("p0", "prefill", 60), D0, D1)
    assert found == Route(decode=InstanceId("d0"), prefill=None)


@pytest.mark.parametrize(("queued", "chosen"), [(1, "d0"), (2, "d1")])
def test_pulling_a_long_prefix_is_worth_it_once_the_holder_is_busy(
    queued: int, chosen: str
) -> None:
    # 60 blocks to pull cost as much as 6 computed ones; each queued request as much as 4.
    found = route(P0, holder("d0", "decode", 60), D1, in_flight={"d0": queued})
    assert found is not None
    assert found.decode == chosen


def test_the_less_busy_of_two_prefill_instances_is_taken() -> None:
    found = route(P0, holder("p1", "prefill", 0), D0, in_flight={"p0": 1})
    assert found is not None
    assert found.prefill == "p1"


@pytest.mark.parametrize(("least", "prefill"), [(2, "p0"), (3, None)])
def test_few_missing_blocks_are_left_to_the_decode_instance(
    least: int, prefill: str | None
) -> None:
    found = route(P0, holder("d0", "decode", 58), least=least)
    assert found is not None
    assert found.prefill == prefill


def test_without_a_prefill_instance_the_decode_instance_computes() -> None:
    assert route(D0) == Route(decode=InstanceId("d0"), prefill=None)


def test_without_a_decode_instance_there_is_no_route() -> None:
    assert route(P0) is None
    assert route() is None


def test_a_store_holds_blocks_but_never_decodes() -> None:
    assert route(holder("s0", "store", 60), D0) == Route(decode=InstanceId("d0"), prefill=None)
