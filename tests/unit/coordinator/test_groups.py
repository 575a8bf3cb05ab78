"""What several kinds of groups share, and what the recorded scenarios do not show."""

import pytest
from tests.unit.coordinator.caches import cache_of, full_cache, spec_of
from tests.unit.coordinator.fleet import chain
from tests.unit.coordinator.test_cases_groups import compute, request

from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.event_content import describe_run
from kvferry.coordinator.hash_view import HashView, view_at
from kvferry.coordinator.pool_events import GroupOrigin, Stored, StoredContent
from kvferry.coordinator.request_state import KnownContent, RequestState
from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.extra_keys import LoraKey, MultimodalItem, RequestKeys
from kvferry.proto.hashing import merged_view
from kvferry.proto.ids import GroupId, RequestId, pack_group
from kvferry.proto.scheme import KeyFormat
from kvferry.proto.specs import FullSpec, MambaSpec, ProfileName, SinkSpec, SlidingWindowSpec

FULL = spec_of(FullSpec)


@pytest.mark.parametrize("key_format", ["0.17", "0.32"])
@pytest.mark.parametrize("ratio", [2, 3])
def test_a_view_of_hashes_is_the_merged_list_however_it_is_cut(
    key_format: KeyFormat, ratio: int
) -> None:
    hashes = chain("abcdefgh")
    whole = merged_view(hashes, ratio=ratio, key_format=key_format)
    view = HashView(hashes, ratio, key_format)
    assert (tuple(view), len(view)) == (whole, 8 // ratio)
    for start in range(5):
        for stop in range(start, 6):
            assert view[start:stop] == whole[start:stop]
    assert [view[i] for i in range(len(view))] == list(whole)
    with pytest.raises(IndexError):
        view[len(view)]
    assert view_at(hashes, 1, key_format) is hashes


def test_the_common_prefix_is_what_all_requests_with_blocks_share() -> None:
    manager = cache_of(FULL, spec_of(MambaSpec, mode="all"))
    tokens = list(range(1, 14))
    compute(manager, request(manager, "r0", tokens))
    compute(manager, request(manager, "r1", [*tokens[:9], 99, 98, 97, 96]))
    assert manager.count_common_prefix_blocks(RequestId("r0")) == (2, 0)
    manager.free(RequestId("r1"))
    assert manager.count_common_prefix_blocks(RequestId("r0")) == (4, 0)
    assert manager.count_common_prefix_blocks(RequestId("nobody")) == (0, 0)


def test_an_event_tells_the_run_and_nothing_of_tokens_that_nobody_told() -> None:
    manager = full_cache(10, 4, 100)
    asked = RequestState(request_id=RequestId("r"), num_tokens=9, hashes=list(chain("xy")))
    manager.allocate_slots(asked, 9)
    (event,) = manager.pool.take_events()
    assert isinstance(event, Stored)
    assert (event.hashes, event.parent, event.block_tokens) == (chain("xy"), None, 4)
    assert event.origin == GroupOrigin("full_attention", None)
    assert event.content is None


def test_no_event_is_kept_where_nobody_asked_for_them() -> None:
    manager = full_cache(10, 4, 100, record_events=False)
    compute(manager, request(manager, "r", list(range(1, 10))))
    manager.evict_blocks(manager.block_table(RequestId("r"))[0])
    manager.free(RequestId("r"))
    assert manager.reset_prefix_cache()
    assert manager.pool.take_events() == []


def test_events_tell_keys_without_tags_and_017_counts_an_item_that_just_ended() -> None:
    keys = RequestKeys(
        lora=LoraKey(name="ad", path="p"),
        salt="s",
        multimodal=(MultimodalItem(identifier="img", offset=1, length=3),),
    )
    content = KnownContent(tokens=list(range(12)), keys=keys, lora_id=7)
    blocks = [(0, 4), (4, 8)]
    new = describe_run(content, "0.32", (0, 8), blocks)
    assert new == StoredContent(tuple(range(8)), (("ad", ("img", 1), "s"), ("ad",)), 7, "ad")
    assert describe_run(content, "0.17", (0, 8), blocks).extra == (("ad", "img", "s"), ("ad",))
    assert describe_run(content, "0.17", (4, 8), blocks[1:]).extra == (("ad", "img"),)
    assert describe_run(content, "0.32", (4, 8), []).extra is None


def test_a_hit_inside_a_block_is_copied_and_both_ends_are_kept_until_then() -> None:
    spec = spec_of(MambaSpec, block_tokens=8, mode="align")
    manager = cache_of(spec_of(FullSpec, block_tokens=8), spec)
    first = request(manager, "r0", list(range(1, 15)))
    # Computing stops at the last hash of the prompt, in the middle of the second block.
    assert manager.allocate_slots(first, 12) == ([1, 2], [0, 3])
    first.num_computed_tokens = 12
    second = request(manager, "r1", list(range(1, 16)))
    blocks, hits = manager.get_computed_blocks(second)
    assert (blocks, hits) == (([1, 2], [0, 3]), 12)
    refused = manager.allocate_slots(
        second, 3, num_new_computed_tokens=12, new_computed_blocks=blocks
    )
    assert refused is None, "the state is not written before the next step"
    manager.start_step()
    granted = manager.allocate_slots(
        second, 3, num_new_computed_tokens=12, new_computed_blocks=blocks
    )
    assert granted == ([4], [5])
    assert manager.block_table(second.request_id) == ([1, 4], [0, 5])
    copies = manager.take_copies()
    assert copies == [(2, 4), (3, 5)]
    assert [manager.pool.ref_count(block) for copy in copies for block in copy] == [2, 2, 2, 2]
    manager.release_copies(copies)
    assert [manager.pool.ref_count(block) for copy in copies for block in copy] == [1, 1, 1, 1]
    assert manager.take_copies() == []


def test_profile_017_knows_no_reserve() -> None:
    manager = full_cache(10, 4, 100, profile="0.17")
    asked = request(manager, "r", [1, 2, 3])
    with pytest.raises(BadInputError, match=r"given: 0\.17; allowed: profile 0\.32"):
        manager.allocate_slots(asked, 3, reserved_blocks=1)


def test_an_admission_leaves_the_watermark_free_beside_others_only() -> None:
    manager = full_cache(10, 4, 100, watermark=0.5)
    asked = request(manager, "r", list(range(1, 21)))
    assert manager.allocate_slots(asked, 20, has_scheduled=True) is None
    assert manager.allocate_slots(asked, 20) == ([1, 2, 3, 4, 5],)
    assert manager.allocate_slots(asked, 24, has_scheduled=True) is not None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"profile": "0.18"}, "unknown profile; given: 0.18; allowed: .*0.17"),
        ({"watermark": -0.1}, "watermark; given: -0.1"),
        ({"dcp": 0}, "dcp must be a positive integer; given: 0"),
        ({"eagle_groups": (GroupId(1),)}, r"eagle_groups; given: \[1\]; allowed: 0 to 0"),
        ({"profile": "0.17", "retention_interval": 4}, "retention_interval; given: 4"),
        ({"hash_block_tokens": 2}, "reason=hash_unit_must_equal_block, hash_block_tokens=2"),
    ],
)
def test_a_setting_that_can_never_work_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        cache_of(FULL, **changes)


@pytest.mark.parametrize("profile", ["0.17", "0.32"])
def test_with_a_shared_chain_a_block_is_found_by_the_last_hash_it_covers(
    profile: ProfileName,
) -> None:
    manager = cache_of(FULL, hash_block_tokens=2, shared_chain=True, profile=profile)
    asked = request(manager, "r", list(range(11)))
    # Where this prompt would resume is inside a block, which nobody looks for.
    asked.num_prompt_tokens = 11
    compute(manager, asked)
    assert [key for key, _ in manager.pool.index_items()] == [
        pack_group(block_hash, GroupId(0)) for block_hash in asked.hashes[1::2][:2]
    ]
    assert manager.get_computed_blocks(request(manager, "s", list(range(11))))[1] == 8


def test_with_a_shared_chain_too_a_hash_must_divide_a_block() -> None:
    with pytest.raises(
        ConfigError, match=r"reason=block_not_multiple_of_hash_unit, .*4.*multiples of 3"
    ):
        cache_of(FULL, hash_block_tokens=3, shared_chain=True)


def test_a_sink_larger_than_the_pool_is_refused() -> None:
    config = CacheConfig(
        num_blocks=3,
        groups=(spec_of(SinkSpec, sink_tokens=12),),
        hash_block_tokens=4,
        max_model_len=100,
        profile="0.17",
    )
    with pytest.raises(ConfigError, match="smaller than the sink; given: num_blocks=3"):
        CacheManager(config)


def test_a_kind_that_nobody_manages_is_refused() -> None:
    class Strange(FullSpec):
        pass

    with pytest.raises(ConfigError, match="unknown kind of group; given: Strange"):
        cache_of(spec_of(Strange))


def test_a_request_is_not_short_of_blocks_that_its_own_window_gives_back() -> None:
    manager = CacheManager(
        CacheConfig(
            num_blocks=4,
            groups=(spec_of(SlidingWindowSpec, window_tokens=4),),
            hash_block_tokens=4,
            max_model_len=100,
        )
    )
    asked = request(manager, "r", list(range(12)))
    assert manager.allocate_slots(asked, 12) is not None
    asked.num_computed_tokens = 12
    # Blocks 1 and 2 have left the window of the token at position 12.
    assert manager.count_missing_blocks(asked, 8) == 0
    assert manager.block_table(asked.request_id) == ([0, 0, 3],)
