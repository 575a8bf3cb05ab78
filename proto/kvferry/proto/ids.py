"""Names for every value that looks like another, and the packing of a group into an index key.

Decides nothing. Imported by everyone.
"""

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
GROUP_ID_BYTES = 4


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
