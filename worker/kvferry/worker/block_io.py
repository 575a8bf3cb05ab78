"""Blocks to canonical bytes and back, whatever the memory order; which bytes is said in frames.py.

Both directions take a list of places so that a whole frame costs one wait for the device.
"""

from collections.abc import Sequence

import numpy as np

from kvferry.proto.errors import BadInputError
from kvferry.worker.device import DeviceBytes, Rows
from kvferry.worker.frames import Place
from kvferry.worker.kv_memory import GroupMemory


def gather(memory: GroupMemory, places: Sequence[Place]) -> bytes:
    """Return the canonical bytes of the places, one after the other.

    Raises:
        BadInputError: a place outside the memory.
    """
    pieces = _half_pages(memory, places)
    if memory.has_whole_halves:
        return b"".join(piece.data for piece in memory.device.to_host(pieces))
    rows = _rows_in_canonical_order(memory)
    out = np.empty((len(pieces), len(rows), memory.head_bytes), dtype=np.uint8)
    memory.device.read_rows(pieces, rows, out)
    return out.tobytes()


def scatter(memory: GroupMemory, places: Sequence[Place], payload: bytes | memoryview) -> None:
    """Overwrite the places with what `gather` returned for places of the same sizes.

    The bytes are in place when the call returns.

    Raises:
        BadInputError: a place outside the memory, or a payload of another length.
    """
    pieces = _half_pages(memory, places)
    half_page_bytes = memory.geometry.page_bytes // 2
    if len(payload) != len(pieces) * half_page_bytes:
        raise BadInputError(
            "the payload does not fill its places",
            given=len(payload),
            allowed=f"{len(pieces) * half_page_bytes} bytes",
        )
    source = np.frombuffer(payload, dtype=np.uint8)
    if memory.has_whole_halves:
        memory.device.from_host(pieces, list(source.reshape(len(pieces), half_page_bytes)))
        return
    rows = _rows_in_canonical_order(memory)
    shape = (len(pieces), len(rows), memory.head_bytes)
    memory.device.write_rows(pieces, rows, source.reshape(shape))


def _half_pages(memory: GroupMemory, places: Sequence[Place]) -> list[DeviceBytes]:
    """Return K and V of each layer of each place, in canonical order.

    Each is uint8 [page_bytes / 2] where that lies side by side. Elsewhere it is all bytes from
    where the block begins, because other values lie between its own.
    """
    num_layers = memory.geometry.num_layers
    for place in places:
        if not (
            0 <= place.block_id < memory.num_blocks
            and 0 <= place.layer_start <= place.layer_end <= num_layers
        ):
            raise BadInputError(
                "no such block or layers",
                given=str(place),
                allowed=f"blocks below {memory.num_blocks}, layers below {num_layers}",
            )
    block_step = memory.strides.block_step
    length = memory.geometry.page_bytes // 2 if memory.has_whole_halves else None
    pieces = []
    for place in places:
        begin = place.block_id * block_step
        end = None if length is None else begin + length
        for layer in range(place.layer_start, place.layer_end):
            pieces += [side[begin:end] for side in memory.sides[layer]]
    return pieces


def _rows_in_canonical_order(memory: GroupMemory) -> Rows:
    """Return where the heads of each token of a block lie after its begin, in heads; int64."""
    tokens = np.arange(memory.geometry.block_tokens) * memory.strides.token_step
    heads = np.arange(len(memory.heads)) * memory.strides.head_step
    rows: Rows = np.add.outer(tokens, heads).ravel() // memory.head_bytes
    return rows
