"""What the service tells of its pools: in order, per instance, with the content engines told."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.unit.coordinator.fleet import Fleet, admit, chain, info, runs, wrote
from tests.unit.coordinator.told import Told

from kvferry.coordinator.pool_events import Cleared, Removed, Stored, StoredContent
from kvferry.coordinator.state import InstanceEvents
from kvferry.proto.errors import BadInputError
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.ids import BlockHash, InstanceId, pack_group
from kvferry.proto.messages import Registered, RegisterInstance
from kvferry.proto.step_messages import AdmitAsk, RequestContent


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(tells_pool_events=True)


def letters(told: list[InstanceEvents]) -> list[tuple[str, str]]:
    """Each event in a word: `+xy` stored, `-x` removed, `!` cleared."""
    words: list[tuple[str, str]] = []
    for instance_id, events in told:
        for event in events:
            if isinstance(event, Stored):
                words.append((instance_id, "+" + "".join(map(last_letter, event.hashes))))
            elif isinstance(event, Removed):
                words.append((instance_id, "-" + "".join(map(last_letter, event.hashes))))
            else:
                words.append((instance_id, "!"))
    return words


def last_letter(block_hash: BlockHash) -> str:
    return chr(block_hash[-1])


def with_content(ask: AdmitAsk) -> AdmitAsk:
    tokens = tuple(range(100, 100 + ask.num_tokens))
    return replace(ask, content=RequestContent(tokens=tokens, keys=RequestKeys(salt="s")))


def test_every_life_of_an_instance_begins_and_ends_with_nothing(fleet: Fleet) -> None:
    take = fleet.service.take_pool_events
    fleet.register("a", num_blocks=4)
    fleet.register("b")
    fleet.cache("a", "xy")
    assert letters(take()) == [("a", "!"), ("b", "!"), ("a", "+xy")]
    fleet.cache("a", "z")
    assert letters(take()) == [("a", "-y"), ("a", "+z")]
    fleet.register("a", incarnation=2)
    fleet.remove("b")
    assert letters(take()) == [("a", "!"), ("a", "!"), ("b", "!")]
    assert take() == []


def test_content_is_wanted_and_events_are_kept_only_where_they_are_told(fleet: Fleet) -> None:
    command = RegisterInstance(call_id="r", info=info("w"))
    for told, service in ((True, fleet), (False, Fleet())):
        for _ in range(2):  # a repeat is told the same
            assert service.ask(command, Registered).wants_content is told
        assert bool(service.service.take_pool_events()) is told


def test_blocks_tell_the_tokens_and_keys_of_the_request_that_filled_them(fleet: Fleet) -> None:
    fleet.register("w")
    fleet.service.take_pool_events()
    fleet.compute("w", with_content(admit("r", "xy", 2)))
    ((_, (event,)),) = fleet.service.take_pool_events()
    assert isinstance(event, Stored)
    assert event.content == StoredContent(tuple(range(100, 108)), (("s",), None), None, None)
    # Two more tokens fill the third block.
    more = replace(wrote("r", 10, 12, chain("xyz")[-1:]), new_tokens=(7, 8))
    fleet.step("w", progress=(more,), running=(runs("r", 12),))
    fleet.step("w", progress=(wrote("r", 12, 12),))
    ((_, (event,)),) = fleet.service.take_pool_events()
    assert isinstance(event, Stored)
    assert (event.parent, event.hashes) == (chain("xy")[-1], chain("xyz")[-1:])
    assert event.content == StoredContent((108, 109, 7, 8), (None,), None, None)


def test_content_that_leaves_tokens_out_is_refused_and_changes_nothing(fleet: Fleet) -> None:
    fleet.register("w")
    ask = with_content(admit("r", "xy", 2))
    assert ask.content is not None
    short = replace(ask, content=replace(ask.content, tokens=ask.content.tokens[:-1]))
    with pytest.raises(BadInputError, match="every token must be told; given: 9; allowed: 10"):
        fleet.step("w", waiting=(short,))
    fleet.compute("w", ask)
    with pytest.raises(BadInputError, match="every token must be told; given: 10; allowed: 11"):
        fleet.step("w", progress=(wrote("r", 10, 11),))


def test_what_a_client_stores_and_what_a_peer_sends_is_told_without_tokens(fleet: Fleet) -> None:
    fleet.register("a")
    fleet.register("b")
    reserved = fleet.reserve("a", "xy")
    fleet.end_reservation("a", reserved.reservation_id, 2)
    told = fleet.service.take_pool_events()
    assert letters(told) == [("a", "!"), ("b", "!"), ("a", "+xy")]
    event = told[-1][1][0]
    assert isinstance(event, Stored)
    assert (event.block_tokens, event.content) == (4, None)
    assert event.origin is not None
    assert event.origin.kind == "full_attention"


def test_a_snapshot_tells_every_copy_of_everything(fleet: Fleet) -> None:
    fleet.register("w")
    fleet.cache("w", "xyz")
    # A prompt that ends with a block computes it again: two copies of z.
    fleet.compute("w", admit("r", "xyz", 0))
    cleared, stored = fleet.service.pool_snapshot(InstanceId("w"))
    assert isinstance(cleared, Cleared)
    assert isinstance(stored, Stored)
    assert sorted(map(last_letter, stored.hashes)) == ["x", "y", "z", "z"]
    assert (len(stored.block_ids), stored.block_tokens, stored.parent) == (4, 4, None)
    told = Told()
    told.follow(fleet.service.take_pool_events())
    assert told.copies["w"] == Counter(pack_group(h, stored.group_id) for h in stored.hashes)
    fleet.remove("w")
    assert fleet.service.pool_snapshot(InstanceId("w")) == [Cleared()]


def test_what_a_client_stores_is_told_with_what_came_before_it(fleet: Fleet) -> None:
    fleet.register("w")
    for text, num_written in (("ab", 2), ("abcd", 4)):
        reserved = fleet.reserve("w", text)
        fleet.end_reservation("w", reserved.reservation_id, num_written)
    stored = [
        e for _, told in fleet.service.take_pool_events() for e in told if isinstance(e, Stored)
    ]
    assert [("".join(map(last_letter, e.hashes)), e.parent) for e in stored] == [
        ("ab", None),
        ("cd", chain("ab")[1]),
    ]


def test_blocks_of_several_hashes_are_told_whole(fleet: Fleet) -> None:
    fleet.register("w", covers=2)
    fleet.service.take_pool_events()
    fleet.compute("w", with_content(admit("r", "abcde", 2)))
    ((_, (event,)),) = fleet.service.take_pool_events()
    assert isinstance(event, Stored)
    assert ("".join(map(last_letter, event.hashes)), event.parent) == ("bd", None)
    assert (event.block_tokens, len(event.block_ids)) == (8, 2)
    assert event.content == StoredContent(tuple(range(100, 116)), (("s",), None), None, None)
    # Two more tokens fill the third block, whose parent is the last hash of the second.
    more = replace(wrote("r", 22, 24, chain("abcdef")[-1:]), new_tokens=(7, 8))
    fleet.step("w", progress=(more,), running=(runs("r", 24),))
    fleet.step("w", progress=(wrote("r", 24, 24),))
    ((_, (event,)),) = fleet.service.take_pool_events()
    assert isinstance(event, Stored)
    assert (event.parent, event.hashes) == (chain("abcd")[-1], chain("abcdef")[-1:])
    assert event.content == StoredContent((*range(116, 122), 7, 8), (None,), None, None)
    _, stored = fleet.service.pool_snapshot(InstanceId("w"))
    assert isinstance(stored, Stored)
    assert (stored.block_tokens, len(stored.hashes)) == (8, 3)
