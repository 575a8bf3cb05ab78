"""Blocks to canonical bytes and back, whatever the memory order; which bytes is said in frames.py.

Everything takes a list of places so that a whole frame costs one wait for the device.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from kvferry.proto.errors import BadInputError
from kvferry.worker.device import DeviceBytes, Rows
from kvferry.worker.frames import Place
from kvferry.worker.group_memory import GroupMemory

_B = TypeVar("_B", DeviceBytes, memoryview)


def pieces_of(memory: GroupMemory, places: Sequence[Place]) -> list[memoryview]:
    """Return the canonical bytes of the places in pieces, one after the other.

    Where the memory is the host's they may be the memory itself: they change when it is written
    into. From elsewhere they stay valid until the same thread's next call.

    Raises:
        BadInputError: a place outside the memory.
    """
    views = host_views(memory, places)
    if views is not None:
        return views
    pieces = _half_pages(memory, memory.sides, places)
    if memory.has_whole_halves:
        return [piece.data for piece in memory.device.to_host(pieces)]
    rows = _rows_in_canonical_order(memory)
    out = np.empty((len(pieces), len(rows), memory.head_bytes), dtype=np.uint8)
    memory.device.read_rows(pieces, rows, out)
    return [out.reshape(-1).data]


def host_views(memory: GroupMemory, places: Sequence[Place]) -> list[memoryview] | None:
    """Return the places themselves, in the order of their canonical bytes.

    None where they are not in host memory, or do not lie there as they are sent.

    Raises:
        BadInputError: a place outside the memory.
    """
    if memory.host_sides is None or not memory.has_whole_halves:
        return None
    return _half_pages(memory, memory.host_sides, places)


def gather(memory: GroupMemory, places: Sequence[Place]) -> bytes:
    """Return the canonical bytes of the places, one after the other.

    Raises:
        BadInputError: a place outside the memory.
    """
    return b"".join(pieces_of(memory, places))


def scatter(memory: GroupMemory, places: Sequence[Place], payload: bytes | memoryview) -> None:
    """Overwrite the places with what `gather` returned for places of the same sizes.

    The bytes are in place when the call returns.

    Raises:
        BadInputError: a place outside the memory, or a payload of another length.
    """
    half_page_bytes = memory.geometry.page_bytes // 2
    num_halves = 2 * sum(place.layer_end - place.layer_start for place in places)
    if len(payload) != num_halves * half_page_bytes:
        raise BadInputError(
            "the payload does not fill its places",
            given=len(payload),
            allowed=f"{num_halves * half_page_bytes} bytes",
        )
    views = host_views(memory, places)
    if views is not None:
        fill_views(views, payload)
        return
    pieces = _half_pages(memory, memory.sides, places)
    source = np.frombuffer(payload, dtype=np.uint8)
    if memory.has_whole_halves:
        memory.device.from_host(pieces, list(source.reshape(num_halves, half_page_bytes)))
        return
    rows = _rows_in_canonical_order(memory)
    shape = (num_halves, len(rows), memory.head_bytes)
    memory.device.write_rows(pieces, rows, source.reshape(shape))


def fill_views(views: Iterable[memoryview], payload: bytes | memoryview) -> None:
    """Copy consecutive parts of the payload into the views, as much as each one takes."""
    whole, begin = memoryview(payload), 0
    for view in views:
        end = begin + len(view)
        view[:] = whole[begin:end]
        begin = end


def _half_pages(
    memory: GroupMemory, sides: Sequence[tuple[_B, _B]], places: Sequence[Place]
) -> list[_B]:
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
    pieces: list[_B] = []
    for place in places:
        begin = place.block_id * block_step
        end = None if length is None else begin + length
        for keys, values in sides[place.layer_start : place.layer_end]:
            pieces += (keys[begin:end], values[begin:end])
    return pieces


def _rows_in_canonical_order(memory: GroupMemory) -> Rows:
    """Return where the heads of each token of a block lie after its begin, in heads; int64."""
    tokens = np.arange(memory.geometry.block_tokens) * memory.strides.token_step
    heads = np.arange(len(memory.heads)) * memory.strides.head_step
    rows: Rows = np.add.outer(tokens, heads).ravel() // memory.head_bytes
    return rows
