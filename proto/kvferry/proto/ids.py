"""Names for every value that looks like another, and how hashes are joined and packed.

Also which blocks of a reservation are new, which both its sides must see alike. Decides nothing.
Imported by everyone.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NewType

from kvferry.proto.errors import BadInputError

BlockHash = NewType("BlockHash", bytes)
"""One link of the hash chain: 32 bytes (sha256*) or 16 bytes (xxhash*)."""

GroupedHash = NewType("GroupedHash", bytes)
"""`BlockHash` followed by the group id as 4 big-endian bytes: the key of every index."""

BlockId = NewType("BlockId", int)
"""Index of a block in an instance's pool, the same on every rank; 0 is the null block."""

GroupId = NewType("GroupId", int)
InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
Incarnation = NewType("Incarnation", int)
"""One life of an instance's process; larger is later."""

Epoch = NewType("Epoch", int)
"""One life of the coordinator; larger is later."""

NULL_BLOCK = BlockId(0)
FIRST_GROUP = GroupId(0)
"""The only group of most identities."""

GROUP_ID_BYTES = 4
HASH_SIZES_BYTES = (16, 32)

# Four million tokens in blocks of 16: more than any prompt, and little enough for one message.
MAX_HASHES = 262_144


def pack_group(block_hash: BlockHash, group_id: GroupId) -> GroupedHash:
    """Return the index key of one hash in one group.

    Raises:
        BadInputError: the group id does not fit 4 unsigned bytes.
    """
    if not 0 <= group_id < 1 << 32:
        raise BadInputError("group id out of range", given=group_id, allowed="0 to 2**32 - 1")
    return GroupedHash(block_hash + group_id.to_bytes(GROUP_ID_BYTES, "big"))


def unpack_group(key: GroupedHash) -> tuple[BlockHash, GroupId]:
    """Return the hash and the group id that `pack_group` joined."""
    group_id = GroupId(int.from_bytes(key[-GROUP_ID_BYTES:], "big"))
    return BlockHash(key[:-GROUP_ID_BYTES]), group_id


def join_hashes(hashes: Sequence[BlockHash]) -> tuple[bytes, int]:
    """Return the hashes without separators, and the size of each in bytes (of none: 32).

    Raises:
        BadInputError: they are not all of one size, or that is no hash's, or more than
            `MAX_HASHES`.
    """
    _require_number_of_hashes(len(hashes))
    sizes = sorted({len(block_hash) for block_hash in hashes} or {HASH_SIZES_BYTES[-1]})
    if len(sizes) > 1 or sizes[0] not in HASH_SIZES_BYTES:
        raise BadInputError(
            "hashes must all have one size in bytes", given=sizes, allowed=list(HASH_SIZES_BYTES)
        )
    return b"".join(hashes), sizes[0]


def split_hashes(joined: bytes, hash_bytes: int) -> tuple[BlockHash, ...]:
    """Return the hashes that `join_hashes` joined.

    Raises:
        BadInputError: `hash_bytes` is no hash's size, or `joined` is no whole number of hashes, or
            more than `MAX_HASHES`.
    """
    if hash_bytes not in HASH_SIZES_BYTES or len(joined) % hash_bytes:
        raise BadInputError(
            "the joined hashes cannot be split",
            given={"hash_bytes": hash_bytes, "hashes_bytes": len(joined)},
            allowed=f"whole hashes of one of {list(HASH_SIZES_BYTES)} bytes",
        )
    # Before any is cut out: a message has room for millions.
    _require_number_of_hashes(len(joined) // hash_bytes)
    return tuple(
        BlockHash(joined[start : start + hash_bytes]) for start in range(0, len(joined), hash_bytes)
    )


def runs_of_reserved(block_ids: Sequence[BlockId | None]) -> Iterator[range]:
    """Yield the positions, in a row, of a reservation's blocks that were not here already."""
    for is_held, positions in groupby(range(len(block_ids)), key=lambda i: block_ids[i] is None):
        if not is_held:
            run = list(positions)
            yield range(run[0], run[-1] + 1)


def _require_number_of_hashes(number: int) -> None:
    if number > MAX_HASHES:
        raise BadInputError(
            "too many hashes in one call", given=number, allowed=f"at most {MAX_HASHES}"
        )
