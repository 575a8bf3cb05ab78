import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.ids import BlockId
from kvferry.worker.frames import MAX_PAGE_BYTES, Geometry, Place, Segment, places_of, plan_frames


def geometry(num_layers: int, page_bytes: int) -> Geometry:
    return Geometry(num_layers=num_layers, page_bytes=page_bytes, block_tokens=16)


def segment(hash_index: int, start: int, end: int, offset: int, length: int) -> Segment:
    return Segment(
        hash_index=hash_index, layer_start=start, layer_end=end, offset=offset, length=length
    )


def test_small_blocks_share_a_frame_and_the_last_frame_holds_the_rest() -> None:
    assert list(plan_frames(3, geometry(2, 100), 450)) == [
        (segment(0, 0, 2, 0, 200), segment(1, 0, 2, 200, 200)),
        (segment(2, 0, 2, 0, 200),),
    ]


def test_a_large_block_is_split_by_layers() -> None:
    assert list(plan_frames(2, geometry(3, 100), 250)) == [
        (segment(0, 0, 2, 0, 200),),
        (segment(0, 2, 3, 0, 100),),
        (segment(1, 0, 2, 0, 200),),
        (segment(1, 2, 3, 0, 100),),
    ]


def test_a_page_larger_than_a_frame_travels_alone() -> None:
    assert list(plan_frames(1, geometry(2, 100), 60)) == [
        (segment(0, 0, 1, 0, 100),),
        (segment(0, 1, 2, 0, 100),),
    ]


def test_no_blocks_need_no_frames() -> None:
    assert list(plan_frames(0, geometry(2, 100), 1000)) == []


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 50), st.integers(1, 400))
def test_every_page_is_sent_once_in_order_and_frames_keep_the_limit(
    num_blocks: int, num_layers: int, page_bytes: int, max_frame_bytes: int
) -> None:
    pages = []
    for segments in plan_frames(num_blocks, geometry(num_layers, page_bytes), max_frame_bytes):
        offset = 0
        for part in segments:
            assert part.offset == offset
            offset += part.length
            assert part.length == (part.layer_end - part.layer_start) * page_bytes
            pages += [(part.hash_index, i) for i in range(part.layer_start, part.layer_end)]
        assert 0 < offset <= max(max_frame_bytes, page_bytes)
    assert pages == [(block, layer) for block in range(num_blocks) for layer in range(num_layers)]


@pytest.mark.parametrize("max_frame_bytes", [1000, 250])
def test_the_last_block_may_have_smaller_pages(max_frame_bytes: int) -> None:
    frames = list(plan_frames(2, geometry(3, 100), max_frame_bytes, last_page_bytes=10))
    by_block: list[list[int]] = [[], []]
    for segments in frames:
        assert [part.offset for part in segments] == [300 * i for i in range(len(segments))]
        for part in segments:
            by_block[part.hash_index].append(part.length)
    assert by_block == ([[300], [30]] if max_frame_bytes == 1000 else [[200, 100], [20, 10]])


def test_a_page_over_32_mib_is_refused_with_its_size() -> None:
    assert geometry(1, MAX_PAGE_BYTES).block_bytes == 32 << 20
    with pytest.raises(ConfigError, match="page_bytes=33554433; allowed: at most 33554432 bytes"):
        geometry(1, MAX_PAGE_BYTES + 1)


@pytest.mark.parametrize("max_frame_bytes", [0, -1, MAX_PAGE_BYTES + 1])
def test_a_frame_size_out_of_range_is_refused_before_the_first_frame(max_frame_bytes: int) -> None:
    with pytest.raises(BadInputError, match=f"given: {max_frame_bytes}; allowed: 1 to 33554432"):
        plan_frames(1, geometry(1, 8), max_frame_bytes)


def test_a_geometry_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        geometry(0, 8)


def test_places_follow_the_segments_not_their_number() -> None:
    segments = [segment(1, 0, 2, 0, 8), segment(0, 1, 2, 8, 4)]
    assert places_of(segments, [BlockId(7), BlockId(5)]) == [
        Place(BlockId(5), 0, 2),
        Place(BlockId(7), 1, 2),
    ]
