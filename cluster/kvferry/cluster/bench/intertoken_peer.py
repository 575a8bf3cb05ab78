"""A process that pulls blocks from a decoding instance at an even pace, when told to."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvferry.cluster.bench.peer_process import answer_of, running_process
from kvferry.cluster.bench.transfer_peer import hashes_of
from kvferry.proto.errors import TransferError
from kvferry.proto.identity import Identity
from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation, InstanceId, LeaseId
from kvferry.proto.layout import Layout
from kvferry.proto.step_messages import Source
from kvferry.worker.device import open_device
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.paths import Path
from kvferry.worker.service import WorkerService

MIN_BYTES_PER_S = 0.3e9
PACE_BYTES_PER_S = 0.36e9
BLOCK_TOKENS = 64
NUM_BLOCKS = 24
"""Blocks of a pull."""

PULL_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Pulled:
    """How fast the peer pulled; known once it has stopped."""

    bytes_per_s: float = 0.0


class Puller:
    """The pulling process, seen from the one it pulls from."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @contextmanager
    def pulling(self) -> Iterator[Pulled]:
        """Let it pull inside of the `with`.

        Raises:
            DeadlineError: it does not begin or stop.
            UnavailableError: a pull failed, which ended it.
        """
        pulled = Pulled()
        self._pipe.send("go")
        answer_of(self._pipe)  # it has begun
        yield pulled
        with suppress(ConnectionError):  # ended by a pull that failed: its silence tells
            self._pipe.send("stop")
        pulled.bytes_per_s = answer_of(self._pipe)


@contextmanager
def running_puller(address: str, identity: Identity, paths: Sequence[Path]) -> Iterator[Puller]:
    """Start the process, wait until it has pulled once, and end it afterwards.

    Raises:
        DeadlineError, UnavailableError: it did not start; as `answer_of`.
    """
    with running_process(_pull_when_told, address, identity, paths) as pipe:
        answer_of(pipe)  # it has pulled
        yield Puller(pipe)


def _pull_when_told(
    pipe: Connection, address: str, identity: Identity, paths: Sequence[Path]
) -> None:
    layout = Layout(block_tokens=BLOCK_TOKENS)
    memory = KvMemory(open_device("cpu"), identity, num_blocks=NUM_BLOCKS + 1, layout=layout)
    worker = WorkerService(incarnation=Incarnation(2), memory=memory, paths=paths)
    source = Source(
        instance_id=InstanceId("decoding"),
        incarnation=Incarnation(1),
        layout=layout,
        rank_addresses=(address,),
    )
    hashes = hashes_of(NUM_BLOCKS)
    load = GroupLoad(
        group_id=FIRST_GROUP,
        first_block=0,
        block_ids=[BlockId(index + 1) for index in range(NUM_BLOCKS)],
        hashes=hashes,
        first_source_block=0,
        source_hashes=hashes,
    )

    def pull() -> None:
        outcome = worker.pull(
            source=source,
            lease_id=LeaseId(""),
            loads=[load],
            timeout_s=PULL_TIMEOUT_S,
            cancel=threading.Event(),
        )
        if outcome.error is not None:
            raise TransferError(outcome.error)

    pull()  # connects
    pipe.send("ready")
    bytes_per_pull = NUM_BLOCKS * memory.groups[0].geometry.block_bytes
    while True:
        pipe.recv()
        pipe.send("begun")
        start = time.monotonic()
        num_pulls = 0
        while not pipe.poll():
            pull()
            num_pulls += 1
            behind = start + num_pulls * bytes_per_pull / PACE_BYTES_PER_S - time.monotonic()
            time.sleep(max(behind, 0.0))
        pipe.recv()
        pipe.send(num_pulls * bytes_per_pull / (time.monotonic() - start))
