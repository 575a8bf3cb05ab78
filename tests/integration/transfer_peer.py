"""A process that hosts workers for test_transfer.py and obeys its standard input.

`open {"incarnation": 1, "head_size": 8, ..., "behaviour": "slow"}` starts a worker and answers with
its address: block i (from 1) holds hash i - 1, filled by `content_of`; with "empty" nothing is held
and stores are taken. `reuse <address> <block id>` answers "done".
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tests.tampering import as_received, as_sent, corrupted

from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, GroupId, Incarnation, LeaseId
from kvferry.proto.layout import Layout
from kvferry.worker import bulk_server
from kvferry.worker.block_io import scatter
from kvferry.worker.device import open_device
from kvferry.worker.frames import Frame, Header, Place
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.paths import ALL_PATHS, Path
from kvferry.worker.reservations import Reservation
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_wire import FetchAsk


def new_worker(
    incarnation: int,
    *,
    num_blocks: int,
    num_layers: int,
    head_size: int,
    model: str = "tiny",
    paths: Sequence[Path] = (),
) -> "PeerService":
    """Return a worker of one KV head and two tokens per block: a page is 16 * head_size bytes."""
    identity = Identity(
        model=model,
        weight_version="1",
        weight_dtype="float32",
        kv_dtype="float32",
        kv_scales="",
        rope="",
        num_layers=num_layers,
        num_kv_heads=1,
        head_size=head_size,
        groups=(GroupSpec(kind="full", layers=tuple(range(num_layers))),),
    )
    memory = KvMemory(
        open_device("cpu"), identity, num_blocks=num_blocks, layout=Layout(block_tokens=2)
    )
    return PeerService(incarnation=Incarnation(incarnation), memory=memory, paths=paths)


def hash_of(index: int) -> BlockHash:
    return BlockHash(hashlib.sha256(str(index).encode()).digest())


def content_of(index: int, num_bytes: int) -> bytes:
    return np.random.default_rng(index).bytes(num_bytes)


def fill(worker: WorkerService) -> None:
    """Write and declare block i + 1 for every hash index i."""
    (group,) = worker.memory.groups
    for block_id in range(1, group.num_blocks):
        payload = content_of(block_id - 1, group.geometry.block_bytes)
        scatter(group, [Place(BlockId(block_id), 0, group.geometry.num_layers)], payload)
        worker.written(FIRST_GROUP, [(hash_of(block_id - 1), BlockId(block_id))])


class PeerService(WorkerService):
    """Serves in the way the test asks for; every frame holds one block or less."""

    behaviour = "plain"

    @property
    def takes_grpc_only(self) -> bool:
        return not self._paths

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | OutgoingFrame]:
        block_bytes = self.memory.groups[0].geometry.block_bytes
        asked = replace(ask, max_frame_bytes=min(block_bytes, 1 << 20))
        messages = as_received(super().open_fetch(asked))
        return as_sent(
            self._misbehave(message) if isinstance(message, Frame) else message
            for message in messages
            if not (isinstance(message, Frame) and self._drops(message))
        )

    def _drops(self, frame: Frame) -> bool:
        return self.behaviour == "drop" and frame.segments[0].hash_index == 2

    def _misbehave(self, frame: Frame) -> Frame:
        index = frame.segments[0].hash_index
        if self.behaviour == "corrupt" and index == 2:
            return corrupted(frame)
        if self.behaviour == "stall" and index == 2:
            time.sleep(60.0)
        if self.behaviour == "slow":
            time.sleep(0.05)
        if self.behaviour == "reuse" and index == 1:
            # Block 4 (hash index 3) is handed out anew while this fetch is under way.
            self.reused([BlockId(4)])
            (group,) = self.memory.groups
            scatter(group, [Place(BlockId(4), 0, 1)], bytes(group.geometry.page_bytes))
        if self.behaviour == "broken" and index == 2:
            raise ZeroDivisionError("a bug in a handler")
        return frame


class FirstBlocks:
    """Reserves blocks 1, 2, 3 ... for one store."""

    def reserve(self, group_id: GroupId, hashes: Sequence[BlockHash]) -> Reservation:
        block_ids = [BlockId(i) for i in range(1, len(hashes) + 1)]
        return Reservation(reservation_id=LeaseId("r1"), block_ids=block_ids)

    def end(self, reservation_id: LeaseId, num_written: int) -> None:
        print(f"{reservation_id} ended with {num_written}", file=sys.stderr)


def open_worker(settings: dict[str, Any]) -> PeerService:
    behaviour = settings.pop("behaviour", "plain")
    empty = settings.pop("empty", False)
    # The one that pulls chooses.
    worker = new_worker(**settings, paths=ALL_PATHS)
    worker.behaviour = behaviour
    if empty:
        worker.reserver = FirstBlocks()
    else:
        fill(worker)
    return worker


def main() -> None:
    bulk_server.MIN_BULK_BYTES = 1
    workers: dict[str, PeerService] = {}
    for line in sys.stdin:
        command, rest = line.split(maxsplit=1)
        if command == "open":
            settings = json.loads(rest)
            port = settings.pop("port", 0)
            worker = open_worker(settings)
            address = worker.serve(port=port)
            workers[address] = worker
            print(address, flush=True)
        else:
            address, block_id = rest.split()
            workers[address].reused([BlockId(int(block_id))])
            print("done", flush=True)


if __name__ == "__main__":
    main()
