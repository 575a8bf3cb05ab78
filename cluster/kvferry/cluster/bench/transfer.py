"""How fast blocks travel from one process to another by each path, beside what the machine can."""

import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from kvferry.cluster.bench.redis_peer import redis_get, redis_is_here
from kvferry.cluster.bench.report import describe_machine
from kvferry.cluster.bench.rows import Row, elapsed_ns, rounds, row_of_pairs
from kvferry.cluster.bench.transfer_peer import (
    TOTAL_BYTES,
    PeerAddresses,
    hashes_of,
    made_credentials,
    new_worker,
    running_peer,
    scattered_blocks,
)
from kvferry.cluster.progress import Progress
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import TransferError
from kvferry.proto.ids import FIRST_GROUP, Incarnation, InstanceId, LeaseId
from kvferry.proto.step_messages import Source
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.paths import Path

BLOCK_BYTES = {"64KiB": 64 << 10, "256KiB": 256 << 10, "1MiB": 1 << 20}
PATHS: dict[str, tuple[Path, ...]] = {"grpc": (), "bulk": ("bulk",), "shm": ("shm",)}
TLS_PATHS = ("grpc", "bulk")
TIMEOUT_S = 60.0

Work = Callable[[], object]
"""Moves `TOTAL_BYTES` once."""


def bench_transfer(*, seconds: float, progress: Progress) -> tuple[dict[str, object], list[Row]]:
    """Measure everything and return the machine and the rows.

    Args:
        seconds: time per block size and work.
        progress: takes a line per row.

    Raises:
        TransferError: not all blocks arrived.
    """
    if not redis_is_here():
        progress(
            "no rows against Redis: redis-server, or its client with hiredis, is not installed"
        )
    rows = []
    for name, block_bytes in BLOCK_BYTES.items():
        with _works(block_bytes) as (ours, baselines):
            for row in _rows(name, ours, baselines, seconds):
                progress(f"{row.name}: {row.value:.3f} GB/s, {row.ratio:.3f} of {row.baseline}")
                rows.append(row)
    for row in _intertoken_rows(seconds, progress):
        progress(f"{row.name}: {row.value:.1f} ms, {row.ratio:.3f} of {row.baseline}")
        rows.append(row)
    return describe_machine(None), rows


def _intertoken_rows(seconds: float, progress: Progress) -> Iterator[Row]:
    if importlib.util.find_spec("transformers") is None:  # of the extra `demo`
        return
    from kvferry.cluster.bench.intertoken import measure_intertoken

    yield from measure_intertoken(seconds, progress)


@contextmanager
def _works(block_bytes: int) -> Iterator[tuple[dict[str, Work], dict[str, Work]]]:
    with ExitStack() as running:
        peer = running.enter_context(running_peer(block_bytes))
        ours: dict[str, Work] = {}
        for name, paths in PATHS.items():
            pull = _Pull(block_bytes, peer, paths)
            running.callback(pull.close)
            ours[name] = pull.once
        credentials = running.enter_context(made_credentials())
        if credentials is not None:
            secured = running.enter_context(running_peer(block_bytes, credentials))
            for name in TLS_PATHS:
                pull = _Pull(block_bytes, secured, PATHS[name], credentials)
                running.callback(pull.close)
                ours[f"{name}_tls"] = pull.once
        baselines: dict[str, Work] = {"tcp": _Socket(peer.socket_port).receive, "memcpy": _copy()}
        redis = running.enter_context(redis_get(block_bytes, TOTAL_BYTES // block_bytes))
        if redis is not None:
            baselines["redis"] = redis
        yield ours, baselines


def _rows(
    size: str, ours: dict[str, Work], baselines: dict[str, Work], seconds: float
) -> Iterator[Row]:
    """Yield the rows of a block size; everything is done in turn, so one noise falls on all."""
    works = {**ours, **baselines}
    measured: list[dict[str, float]] = [
        {name: TOTAL_BYTES / elapsed_ns(work) for name, work in works.items()}
        for _ in rounds(seconds * len(works))
    ]
    for name in ours:
        for baseline in baselines:
            pairs = [(one[name], one[baseline]) for one in measured]
            yield row_of_pairs(f"{name}@{size}", pairs, baseline, unit="GB/s", better="higher")


class _Pull:
    """A fetch of all blocks by hash: gather, checksums and scatter included."""

    def __init__(
        self,
        block_bytes: int,
        peer: PeerAddresses,
        paths: Sequence[Path],
        credentials: Credentials | None = None,
    ) -> None:
        num_blocks = TOTAL_BYTES // block_bytes
        self._worker = new_worker(block_bytes, incarnation=2, paths=paths, credentials=credentials)
        self._source = Source(
            instance_id=InstanceId("peer"),
            incarnation=Incarnation(1),
            layout=self._worker.memory.layout,
            rank_addresses=(peer.transfer,),
        )
        hashes = hashes_of(num_blocks)
        self._load = GroupLoad(
            group_id=FIRST_GROUP,
            first_block=0,
            block_ids=scattered_blocks(self._worker, num_blocks, seed=2),
            hashes=hashes,
            first_source_block=0,
            source_hashes=hashes,
        )
        self.once()  # connects

    def once(self) -> None:
        outcome = self._worker.pull(
            source=self._source,
            lease_id=LeaseId(""),
            loads=[self._load],
            timeout_s=TIMEOUT_S,
            cancel=threading.Event(),
        )
        if outcome.error is not None:
            raise TransferError("not all blocks arrived", given=outcome.error)

    def close(self) -> None:
        self._worker.stop()


class _Socket:
    """As many bytes over a TCP connection of its own, received in place."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._into = np.ones(TOTAL_BYTES, dtype=np.uint8).data

    def receive(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_S) as connection:
            received = 0
            while received < TOTAL_BYTES:
                count = connection.recv_into(self._into[received:])
                if not count:
                    raise TransferError("the socket was closed early", given=received)
                received += count


def _copy() -> Work:
    """Return a copy of as many bytes to where bytes have been before."""
    source = np.ones(TOTAL_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    return lambda: np.copyto(target, source)
