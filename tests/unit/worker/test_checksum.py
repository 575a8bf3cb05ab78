import random
from collections.abc import Iterator

import pytest
import xxhash

from kvferry.proto.ids import BlockId
from kvferry.worker.checksum import (
    WINDOW_BYTES,
    KeptChecksums,
    frame_checksum,
    in_windows,
    segment_checksums,
)
from kvferry.worker.frames import Segment
from kvferry.worker.residency import Resident


def segments_of(*lengths: int) -> list[Segment]:
    return [
        Segment(
            hash_index=index,
            layer_start=0,
            layer_end=1,
            offset=sum(lengths[:index]),
            length=length,
        )
        for index, length in enumerate(lengths)
    ]


def cut(payload: bytes, at: list[int]) -> Iterator[memoryview]:
    whole = memoryview(payload)
    for begin, end in zip([0, *at], [*at, len(payload)], strict=True):
        yield whole[begin:end]


def test_a_frames_checksum_is_that_of_its_segments_checksums_highest_byte_first() -> None:
    payload = bytes(range(10))
    first, second = xxhash.xxh3_64_intdigest(payload[:4]), xxhash.xxh3_64_intdigest(payload[4:])
    joined = first.to_bytes(8, "big") + second.to_bytes(8, "big")
    found = frame_checksum(segment_checksums(segments_of(4, 6), [payload]))
    assert found == xxhash.xxh3_64_intdigest(joined)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_may_be_cut_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 300) for _ in range(rng.randint(1, 6))]
    payload = rng.randbytes(sum(lengths))
    at = sorted(rng.choices(range(len(payload) + 1), k=8))
    segments = segments_of(*lengths)
    assert segment_checksums(segments, cut(payload, at)) == [
        xxhash.xxh3_64_digest(payload[segment.offset : segment.offset + segment.length])
        for segment in segments
    ]


def test_what_is_kept_of_a_block_holds_for_its_generation_and_layers_only() -> None:
    kept, (segment,) = KeptChecksums(), segments_of(4)
    longer = Segment(hash_index=0, layer_start=0, layer_end=2, offset=0, length=8)
    kept.keep(Resident(BlockId(3), 7), segment, b"checksum")
    assert kept.find(Resident(BlockId(3), 7), segment) == b"checksum"
    assert kept.find(Resident(BlockId(3), 8), segment) is None
    assert kept.find(Resident(BlockId(4), 7), segment) is None
    assert kept.find(Resident(BlockId(3), 7), longer) is None
    kept.keep(Resident(BlockId(3), 8), longer, b"replaces")
    assert kept.find(Resident(BlockId(3), 7), segment) is None
    assert kept.find(Resident(BlockId(3), 8), longer) == b"replaces"


def test_windows_hold_all_pieces_in_order_and_none_is_too_large() -> None:
    sizes = (3, WINDOW_BYTES - 3, 1, 2 * WINDOW_BYTES + 5)
    pieces = [memoryview(bytes([index]) * size) for index, size in enumerate(sizes)]
    windows = list(in_windows(pieces))
    assert b"".join(part for window in windows for part in window) == b"".join(pieces)
    assert max(sum(map(len, window)) for window in windows) == WINDOW_BYTES
