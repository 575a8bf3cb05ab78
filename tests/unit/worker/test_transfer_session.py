import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tampering import make_frame

from kvferry.proto.errors import TransferError
from kvferry.worker.frames import Frame, Geometry, Header, Segment, plan_frames
from kvferry.worker.transfer_session import PullSession

GEOMETRY = Geometry(num_layers=3, page_bytes=10, block_tokens=4)


def opened(num_found: int = 2, num_asked: int = 2) -> PullSession:
    session = PullSession(num_asked, GEOMETRY)
    session.open(Header(incarnation=1, num_found=num_found, geometry=GEOMETRY))
    return session


def frame(*parts: tuple[int, int, int]) -> Frame:
    """Return a right frame of (hash_index, layer_start, layer_end) parts."""
    segments, offset = [], 0
    for index, start, end in parts:
        length = (end - start) * GEOMETRY.page_bytes
        segments.append(
            Segment(
                hash_index=index, layer_start=start, layer_end=end, offset=offset, length=length
            )
        )
        offset += length
    return make_frame(tuple(segments), bytes(offset))


def take(session: PullSession, *frames: Frame) -> None:
    for one in frames:
        session.admit(one)
        session.placed(one.segments)


def test_a_block_counts_once_all_its_layers_are_in_place() -> None:
    session = opened()
    take(session, frame((0, 0, 2)))
    assert (session.num_complete, session.is_finished) == (0, False)
    take(session, frame((0, 2, 3), (1, 0, 3)))
    assert (session.num_complete, session.is_finished, session.num_bytes) == (2, True, 60)
    session.close()


def test_only_the_prefix_counts_when_a_later_block_arrives_first() -> None:
    session = opened()
    take(session, frame((1, 0, 3)))
    assert session.num_complete == 0
    take(session, frame((0, 0, 3)))
    assert session.num_complete == 2


def test_admitted_bytes_do_not_count_before_they_are_placed() -> None:
    session = opened()
    session.admit(frame((0, 0, 3), (1, 0, 3)))
    assert (session.num_complete, session.num_bytes) == (0, 0)


def test_a_source_that_holds_nothing_finishes_at_once() -> None:
    session = opened(num_found=0)
    assert session.is_finished
    session.close()


def test_an_early_end_fails_with_what_arrived() -> None:
    session = opened()
    take(session, frame((0, 0, 3)))
    with pytest.raises(TransferError, match="ended early; given: 1 whole blocks; allowed: 2"):
        session.close()
    assert session.num_complete == 1


def test_an_end_without_a_header_fails() -> None:
    with pytest.raises(TransferError, match="allowed: a header"):
        PullSession(1, GEOMETRY).close()


GOOD = frame((0, 0, 3))
PART = GOOD.segments[0]
REFUSED = {
    "a checksum is wrong": (replace(GOOD, checksum=GOOD.checksum ^ 1), "checksum is wrong"),
    "an unknown block": (frame((2, 0, 3)), "not announced; given: 2; allowed: 0 to 1"),
    "a negative block": (frame((-1, 0, 3)), "not announced; given: -1"),
    "layers past the end": (frame((0, 2, 4)), r"given: \[2, 4\); allowed: within \[0, 3\)"),
    "no layers": (
        make_frame((replace(PART, layer_start=1, layer_end=1, length=0),), b""),
        "layers that do not exist",
    ),
    "a wrong length": (
        make_frame((replace(PART, length=29),), bytes(29)),
        "wrong length; given: 29; allowed: 30",
    ),
    "the same page twice": (frame((0, 0, 2), (0, 1, 3)), "a page came twice; given: block 0"),
    "a hole": (make_frame((replace(PART, offset=1),), bytes(31)), "leave a hole; given: 1"),
    "bytes of nobody": (make_frame((PART,), bytes(31)), "do not cover the payload"),
    "missing bytes": (make_frame((PART,), bytes(29)), "do not cover the payload"),
    "overlapping segments": (
        make_frame((PART, replace(PART, hash_index=1, offset=20)), bytes(50)),
        "overlap or leave a hole; given: 20; allowed: 30",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_frame_is_refused_and_nothing_of_it_counts(name: str) -> None:
    wrong, message = REFUSED[name]
    session = opened()
    with pytest.raises(TransferError, match=message):
        session.admit(wrong)
    assert (session.num_complete, session.num_bytes) == (0, 0)
    assert session.num_checksum_failures == (1 if name == "a checksum is wrong" else 0)


def test_a_page_that_is_in_place_is_refused_when_it_comes_again() -> None:
    session = opened()
    take(session, frame((0, 0, 1)))
    with pytest.raises(TransferError, match="a page came twice"):
        session.admit(frame((0, 0, 3)))


def test_a_frame_before_the_header_is_refused() -> None:
    with pytest.raises(TransferError, match="before the header"):
        PullSession(2, GEOMETRY).admit(GOOD)


def test_a_second_header_is_refused() -> None:
    session = opened()
    with pytest.raises(TransferError, match="second header"):
        session.open(Header(incarnation=1, num_found=2, geometry=GEOMETRY))


def test_a_header_that_announces_more_than_asked_is_refused() -> None:
    with pytest.raises(TransferError, match="given: 3; allowed: 0 to 2"):
        opened(num_found=3)


def test_a_source_with_other_block_sizes_is_refused_with_both() -> None:
    other = replace(GEOMETRY, block_tokens=8)
    with pytest.raises(TransferError, match=r"block_tokens=8.*allowed.*block_tokens=4"):
        PullSession(2, GEOMETRY).open(Header(incarnation=1, num_found=2, geometry=other))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 100), st.integers(0, 10**6))
def test_whatever_the_order_of_frames_the_prefix_is_what_is_whole(
    num_blocks: int, max_frame_bytes: int, seed: int
) -> None:
    plan = list(plan_frames(num_blocks, GEOMETRY, max_frame_bytes))
    random.Random(seed).shuffle(plan)
    session = opened(num_blocks, num_blocks)
    missing = {(block, layer) for block in range(num_blocks) for layer in range(3)}
    for segments in plan:
        take(session, make_frame(segments, bytes(sum(part.length for part in segments))))
        for part in segments:
            missing -= {
                (part.hash_index, layer) for layer in range(part.layer_start, part.layer_end)
            }
        assert session.num_complete == min((block for block, _ in missing), default=num_blocks)
    assert session.is_finished
