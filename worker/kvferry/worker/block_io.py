"""Blocks to canonical bytes and back; which bytes those are is said in frames.py.

Both directions take a list of places so that a whole frame costs one wait for the device.
"""

from collections.abc import Sequence

import numpy as np

from kvferry.proto.errors import BadInputError
from kvferry.worker.device import DeviceBytes
from kvferry.worker.frames import Place
from kvferry.worker.kv_memory import GroupMemory


def gather(memory: GroupMemory, places: Sequence[Place]) -> bytes:
    """Return the canonical bytes of the places, one after the other.

    Raises:
        BadInputError: a place outside the memory.
    """
    pieces = _half_pages(memory, places)
    return b"".join(piece.data for piece in memory.device.to_host(pieces))


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
    sources = np.frombuffer(payload, dtype=np.uint8).reshape(len(pieces), half_page_bytes)
    memory.device.from_host(pieces, list(sources))


def _half_pages(memory: GroupMemory, places: Sequence[Place]) -> list[DeviceBytes]:
    """Return K and V of each layer of each place, in canonical order, uint8 [page_bytes / 2]."""
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
    return [
        memory.byte_layers[layer][half, place.block_id]
        for place in places
        for layer in range(place.layer_start, place.layer_end)
        for half in (0, 1)
    ]
