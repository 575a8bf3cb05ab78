"""Known failures with several groups, drafters and ranks; the number names the case."""

import pytest
from tests.unit.coordinator.caches import cache_of, full_cache, spec_of
from tests.unit.coordinator.pool_checks import check_owners, check_pool

from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.pool_events import Stored
from kvferry.coordinator.request_state import KnownContent, RequestState
from kvferry.proto.errors import BadInputError
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import GroupedHash, RequestId
from kvferry.proto.specs import (
    ChunkedLocalSpec,
    CrossSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    MlaSpec,
    SlidingWindowSpec,
)

FULL = spec_of(FullSpec)
WINDOW_8 = spec_of(SlidingWindowSpec, window_tokens=8)
WINDOW_16 = spec_of(SlidingWindowSpec, window_tokens=16)
STATES = spec_of(MambaSpec, mode="all")


def request(manager: CacheManager, name: str, tokens: list[int]) -> RequestState:
    scheme = make_scheme(hash_block_tokens=manager.config.hash_block_tokens)
    return RequestState(
        request_id=RequestId(name),
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        hashes=list(hash_tokens(scheme, tokens)),
        content=KnownContent(tokens=list(tokens)),
    )


def compute(manager: CacheManager, asked: RequestState, num_external: int = 0) -> int:
    """Admit and compute all tokens of a request; return how many were hit."""
    blocks, hits = manager.get_computed_blocks(asked)
    granted = manager.allocate_slots(
        asked,
        asked.num_tokens - hits - num_external,
        num_new_computed_tokens=hits,
        new_computed_blocks=blocks,
        num_external_computed_tokens=num_external,
    )
    assert granted is not None
    asked.num_computed_tokens = asked.num_tokens
    manager.start_step()
    return hits


def decode(manager: CacheManager, asked: RequestState, token: int) -> None:
    """Take one more token and compute it."""
    assert asked.content is not None
    tokens = [*asked.content.tokens, token]
    grown = request(manager, asked.request_id, tokens)
    asked.num_tokens, asked.hashes, asked.content = len(tokens), grown.hashes, grown.content
    assert manager.allocate_slots(asked, 1) is not None
    asked.num_computed_tokens = asked.num_tokens


def saves(manager: CacheManager) -> list[tuple[int, int]]:
    """Return from where to where each event since the last call stored tokens."""
    told = [event for event in manager.pool.take_events() if isinstance(event, Stored)]
    ends = []
    for event in told:
        assert event.content is not None
        first = event.content.tokens[0] - 1
        ends.append((first, first + len(event.content.tokens)))
        assert len(event.hashes) * event.block_tokens == len(event.content.tokens)
    return ends


def test_b13_only_full_blocks_are_found_and_saved() -> None:
    manager = full_cache(20, 4, 100)
    compute(manager, request(manager, "r0", list(range(1, 11))))
    assert saves(manager) == [(0, 8)]
    again = request(manager, "r1", [*range(1, 12)])
    table_of_r0 = manager.block_table(RequestId("r0"))[0]
    assert compute(manager, again) == 8
    assert list(manager.block_table(again.request_id)[0]) == [*table_of_r0[:2], 4]
    for token in range(12, 18):
        decode(manager, again, token)
    assert saves(manager) == [(8, 12), (12, 16)]


def test_b13_nothing_is_loaded_over_blocks_that_are_here() -> None:
    manager = full_cache(20, 4, 100)
    compute(manager, request(manager, "r0", list(range(1, 10))))
    asked = request(manager, "r1", list(range(1, 22)))
    assert compute(manager, asked, num_external=8) == 8
    table = list(manager.block_table(asked.request_id)[0])
    assert table == [1, 2, 4, 5, 6, 7]
    assert [manager.pool.ref_count(block) for block in table] == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOW_8), (FULL, WINDOW_8, WINDOW_16)], ids=["1", "2", "3"]
)
@pytest.mark.parametrize(("use_eagle", "tokens"), [(True, 36), (False, 40)])
def test_b24_one_block_is_given_up_once_however_many_groups_there_are(
    groups: tuple[LayerSpec, ...], use_eagle: bool, tokens: int
) -> None:
    manager = cache_of(*groups, use_eagle=use_eagle)
    compute(manager, request(manager, "r0", list(range(1, 42))))
    blocks, hits = manager.get_computed_blocks(request(manager, "r1", list(range(1, 42))))
    assert hits == tokens
    assert {len(found) for found in blocks} == {tokens // 4}


def test_b24_profile_017_gives_up_one_block_per_pass_as_vllm_did() -> None:
    found = {}
    for groups in ((FULL,), (FULL, WINDOW_8), (FULL, WINDOW_8, WINDOW_16)):
        manager = cache_of(*groups, use_eagle=True, profile="0.17")
        compute(manager, request(manager, "r0", list(range(1, 42))))
        asked = request(manager, "r1", list(range(1, 42)))
        found[len(groups)] = manager.get_computed_blocks(asked)[1]
    assert found == {1: 36, 2: 32, 3: 0}


def test_b25_the_length_of_a_hit_is_what_every_group_holds() -> None:
    manager = cache_of(FULL, STATES, use_eagle=True)
    compute(manager, request(manager, "r0", list(range(1, 18))))
    full, states = manager.block_table(RequestId("r0"))
    blocks, hits = manager.get_computed_blocks(request(manager, "r1", list(range(1, 18))))
    assert hits == 12
    assert [list(found) for found in blocks] == [list(full[:3]), [0, 0, states[2]]]


def test_b25_without_the_state_at_the_agreed_position_nothing_is_hit() -> None:
    manager = cache_of(FULL, STATES, use_eagle=True)
    compute(manager, request(manager, "r0", list(range(1, 18))))
    states = manager.block_table(RequestId("r0"))[1]
    manager.evict_blocks(states[:3])
    asked = request(manager, "r1", list(range(1, 18)))
    assert manager.get_computed_blocks(asked) == (([], []), 0)


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        (FULL, 12),
        (spec_of(MlaSpec), 12),
        (WINDOW_8, 12),
        (WINDOW_16, 12),
        # A drafter has no such layers: its block is given up by the groups it does have.
        (STATES, 16),
    ],
)
def test_b25_every_kind_returns_the_length_that_it_holds(spec: LayerSpec, tokens: int) -> None:
    manager = cache_of(spec, use_eagle=True)
    compute(manager, request(manager, "r0", list(range(1, 18))))
    (blocks,), hits = manager.get_computed_blocks(request(manager, "r1", list(range(1, 18))))
    assert (hits, len(blocks)) == (tokens, tokens // 4)
    assert blocks[-1] == manager.block_table(RequestId("r0"))[0][tokens // 4 - 1]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_of(ChunkedLocalSpec, chunk_tokens=8), "eagle_with_chunked_local"),
        (spec_of(CrossSpec), "cross_attention_lookup"),
    ],
)
def test_b25_a_kind_that_cannot_give_a_block_up_says_so(spec: LayerSpec, reason: str) -> None:
    manager = cache_of(spec, use_eagle=True)
    with pytest.raises(BadInputError, match=f"reason={reason}"):
        manager.get_computed_blocks(request(manager, "r", list(range(1, 18))))


def test_b26_rolling_back_keeps_no_rejected_token() -> None:
    manager = full_cache(20, 4, 100)
    asked = request(manager, "r", [1, 2, 3])
    compute(manager, asked)
    for wrong in (-5, 4):
        with pytest.raises(BadInputError, match=f"given: {wrong}; allowed: 0 to 3 tokens"):
            manager.truncate(asked, wrong)
    manager.truncate(asked, 3)
    assert asked.num_computed_tokens == 3
    manager.truncate(asked, 0)
    assert (asked.num_tokens, asked.num_computed_tokens, asked.hashes) == (0, 0, [])
    assert manager.block_table(asked.request_id) == ([],)
    assert manager.pool.num_free_blocks == 19


def test_b26_a_block_that_was_rolled_back_in_part_is_found_no_more() -> None:
    manager = full_cache(20, 4, 100)
    asked = request(manager, "r", list(range(1, 10)))
    compute(manager, asked)
    assert manager.pool.num_keys == 2
    manager.truncate(asked, 6)
    assert list(manager.block_table(asked.request_id)[0]) == [1, 2]
    assert list(manager.pool.free_order())[:2] == [3, 4]
    assert manager.get_computed_blocks(request(manager, "q", list(range(1, 10)))) == (([1],), 4)
    for token in (17, 18):
        decode(manager, asked, token)
    other = request(manager, "q", [*range(1, 7), 17, 18, 19])
    assert manager.get_computed_blocks(other) == (([1, 2],), 8)
    check_pool(manager.pool)
    check_owners(manager, [])


def test_b26_rolling_back_is_refused_where_others_or_lost_blocks_are_in_the_way() -> None:
    manager = full_cache(20, 4, 100)
    first, second = (request(manager, name, list(range(1, 10))) for name in ("r", "q"))
    compute(manager, first)
    compute(manager, second)
    with pytest.raises(BadInputError, match="others use"):
        manager.truncate(first, 6)
    manager.truncate(first, 8)
    hybrid = cache_of(FULL, WINDOW_8)
    asked = request(hybrid, "r", list(range(1, 30)))
    compute(hybrid, asked)
    decode(hybrid, asked, 99)
    before = hybrid.block_table(asked.request_id)
    with pytest.raises(BadInputError, match="given back; given: num_tokens=12, group=1"):
        hybrid.truncate(asked, 12)
    assert hybrid.block_table(asked.request_id) == before
    hybrid.truncate(asked, 29)
    states = cache_of(STATES)
    asked = request(states, "r", list(range(1, 10)))
    compute(states, asked)
    with pytest.raises(BadInputError, match="its states cannot"):
        states.truncate(asked, 8)


def test_drafts_are_never_found() -> None:
    manager = full_cache(20, 4, 100)
    asked = request(manager, "r", list(range(1, 8)))
    compute(manager, asked)
    assert manager.allocate_slots(asked, 6) is not None
    assert len(manager.block_table(asked.request_id)[0]) == 4
    assert manager.pool.num_keys == 1


def test_b27_hits_are_multiples_of_what_a_block_covers_over_all_ranks() -> None:
    manager = cache_of(FULL, dcp=4, hash_block_tokens=16)
    tokens = list(range(1, 34))
    compute(manager, request(manager, "r0", tokens))
    assert len(manager.block_table(RequestId("r0"))[0]) == 3
    asks = {
        "r1": [*tokens[:4], *range(101, 130)],
        "r2": [*tokens[:20], *range(101, 114)],
        "r3": tokens,
    }
    hits = {
        name: manager.get_computed_blocks(request(manager, name, asks[name]))[1] for name in asks
    }
    assert hits == {"r1": 0, "r2": 16, "r3": 32}


@pytest.mark.parametrize(("profile", "pcp", "covered"), [("0.17", 2, 16), ("0.32", 2, 8)])
def test_b27_prefill_ranks_count_in_017_only(profile: str, pcp: int, covered: int) -> None:
    manager = cache_of(FULL, dcp=2, pcp=pcp, hash_block_tokens=covered, profile=profile)
    assert manager.block_tokens == covered


def test_b27_caches_of_other_rank_counts_share_no_key() -> None:
    def keys(dcp: int) -> set[GroupedHash]:
        manager = cache_of(FULL, dcp=dcp, hash_block_tokens=4 * dcp)
        compute(manager, request(manager, "r", list(range(1, 34))))
        return {key for key, _ in manager.pool.index_items()}

    assert (len(keys(2)), len(keys(4))) == (4, 2)
    assert keys(2).isdisjoint(keys(4))
