"""Links of the hash chain from packed tokens: one block at a time, or many encoded at once.

Both ways give the same bytes. Encoding many at once costs tens of microseconds before the first
block and then a third of the time per block, so it pays from `_MANY_BLOCKS` on.

Canonical CBOR writes an unsigned integer in its shortest form: the value itself below 24, else a
head byte and 1, 2, 4 or 8 bytes of the value, big-endian. Up to 32 bits that fits a 64-bit word:
head and value are added there, and of each word the bytes in use are gathered.
"""

from array import array
from collections.abc import Sequence
from typing import cast

import cbor2
import numpy as np
from numpy.typing import NDArray

from kvferry.proto.digest import depends_on_identity, digest, start_digest, with_own_objects
from kvferry.proto.ids import BlockHash
from kvferry.proto.scheme import HashScheme

ExtraKeys = tuple[object, ...] | None
"""What `block_extra_keys` returns for one block."""

MAX_PACKED_TOKEN = 2**32 - 1
"""The largest id that `link_many` takes: the next form has 9 bytes. No vocabulary comes near."""

_MANY_BLOCKS = 12
# So many are encoded together that the arrays stay in a core's cache.
_SLAB_BLOCKS = 256
_NULL = b"\xf6"

# By form, of 1, 2, 3 or 5 bytes: what is added to the value, and the mask of the bytes in use, one
# byte 0 or 1 for each byte of the big-endian word.
_HEADS = np.array([0, 0x18 << 8, 0x19 << 16, 0x1A << 32], dtype=np.uint64)
_MASKS = np.array([[0] * (8 - n) + [1] * n for n in (1, 2, 3, 5)], dtype=np.uint8).view(np.uint64)


def link_blocks(
    scheme: HashScheme, parent: bytes, tokens: "array[int]", extra_keys: Sequence[ExtraKeys]
) -> list[BlockHash]:
    """Return the hashes of the blocks that `tokens` fills, first block first.

    Args:
        scheme: the service's scheme; `scheme.hash_block_tokens` tokens make a block.
        parent: the hash before the first block.
        tokens: as `pack_tokens` returns them, whole blocks only.
        extra_keys: one entry per block.

    Raises:
        BadInputError: extra keys that cannot be serialised.
    """
    if (
        len(extra_keys) < _MANY_BLOCKS
        or depends_on_identity(scheme.algorithm)
        or np.frombuffer(tokens, dtype=np.uint64).max() > MAX_PACKED_TOKEN
    ):
        return link_each(scheme, parent, tokens, extra_keys)
    return link_many(scheme, parent, tokens, extra_keys)


def link(
    scheme: HashScheme, parent: bytes, tokens: Sequence[int], extra_keys: ExtraKeys
) -> BlockHash:
    """Return the hash of one full block: the digest of `(parent, tokens, extra_keys)`.

    Raises:
        BadInputError: extra keys that cannot be serialised.
    """
    if extra_keys is not None and depends_on_identity(scheme.algorithm):
        extra_keys = with_own_objects(extra_keys)
    return BlockHash(digest(scheme.algorithm, (parent, tuple(tokens), extra_keys)))


def link_each(
    scheme: HashScheme, parent: bytes, tokens: "array[int]", extra_keys: Sequence[ExtraKeys]
) -> list[BlockHash]:
    """Do `link_blocks` one block after the other: any algorithm, any token. Errors are the same."""
    size = scheme.hash_block_tokens
    links: list[BlockHash] = []
    for first, keys in zip(range(0, len(tokens), size), extra_keys, strict=True):
        links.append(link(scheme, parent, tokens[first : first + size], keys))
        parent = links[-1]
    return links


def link_many(
    scheme: HashScheme, parent: bytes, tokens: "array[int]", extra_keys: Sequence[ExtraKeys]
) -> list[BlockHash]:
    """Do `link_blocks` with all tokens encoded at once.

    Only for the CBOR algorithms and tokens up to `MAX_PACKED_TOKEN`. Errors are the same.
    """
    size = scheme.hash_block_tokens
    # The root may have another length than the hashes, whose head in CBOR is always the same.
    parent = bytes(link(scheme, parent, tokens[:size], extra_keys[0]))
    links = [parent]
    # Copying a digest that has taken the constant heads is cheaper than starting one.
    started = start_digest(scheme.algorithm, b"\x83" + _canonical(parent)[: -len(parent)])
    # A 0 is written as one byte, so what stands before that many of them is the array's head.
    array_head = _canonical((0,) * size)[:-size]
    packed = np.frombuffer(tokens, dtype=np.uint64)
    copy = started.copy
    for first in range(1, len(extra_keys), _SLAB_BLOCKS):
        slab = slice(first, first + _SLAB_BLOCKS)
        encoded, ends = _encode(packed[slab.start * size : slab.stop * size], size, array_head)
        start = 0
        for end, keys in zip(ends, extra_keys[slab], strict=True):
            link_digest = copy()
            link_digest.update(parent)
            if keys is None:
                link_digest.update(encoded[start:end])
            else:
                link_digest.update(encoded[start : end - len(_NULL)] + _canonical(keys))
            parent = link_digest.digest()
            links.append(parent)
            start = end
    # Once for all: a call per block is felt.
    return cast("list[BlockHash]", links)


def _encode(
    tokens: NDArray[np.uint64], block_tokens: int, array_head: bytes
) -> tuple[bytes, list[int]]:
    """Return every block as canonical CBOR, and where each one's ends.

    A block is its array of tokens, behind `array_head` (of 1 to 3 bytes), and a null for the extra
    keys: hashing it takes one call then.
    """
    num_blocks = len(tokens) // block_tokens
    narrow = tokens.astype(np.uint32)
    longest = (narrow >= 1 << 16).view(np.uint8)
    form = (narrow >= 24).view(np.uint8)
    form += (narrow >= 1 << 8).view(np.uint8)
    form += longest
    words = np.empty((num_blocks, block_tokens + 2), dtype=np.uint64)
    words[:, 0] = int.from_bytes(array_head, "big")
    np.add(
        tokens.reshape(num_blocks, block_tokens),
        _HEADS.take(form).reshape(num_blocks, block_tokens),
        out=words[:, 1:-1],
    )
    words[:, -1] = _NULL[0]
    forms = np.zeros(words.shape, dtype=np.uint8)
    forms[:, 0] = len(array_head) - 1
    forms[:, 1:-1] = form.reshape(num_blocks, block_tokens)
    # Gathering by index is faster than by the mask, whose branches no processor can predict.
    in_use = _MASKS.take(forms.ravel()).view(np.bool_).nonzero()[0]
    encoded = words.astype(">u8").view(np.uint8).ravel().take(in_use, mode="wrap").tobytes()
    num_bytes = form + longest + np.uint8(1)
    firsts = np.arange(0, len(num_bytes), block_tokens)
    lengths = np.add.reduceat(num_bytes, firsts, dtype=np.int64) + len(array_head) + len(_NULL)
    return encoded, lengths.cumsum().tolist()


def _canonical(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)
