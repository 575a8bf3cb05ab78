"""The other process of the transfer benchmark: a worker that serves blocks, and a raw socket."""

import hashlib
import importlib
import importlib.util
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from kvferry.cluster.bench.peer_process import answer_of, running_process
from kvferry.proto.credentials import DEFAULT_SERVER_NAME, Credentials
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, Incarnation
from kvferry.proto.layout import Layout
from kvferry.worker.device import open_device
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.paths import ALL_PATHS, Path
from kvferry.worker.service import WorkerService

TOTAL_BYTES = 64 << 20
TOKEN_BYTES = 16 << 10
"""K and V of 8 layers with 8 heads of 64 values in float16."""

SOCKET_PIECE_BYTES = 1 << 20

IDENTITY = Identity(
    model="bench",
    weight_version="1",
    weight_dtype="float16",
    kv_dtype="float16",
    kv_scales="",
    rope="",
    num_layers=8,
    num_kv_heads=8,
    head_size=64,
    groups=(GroupSpec(kind="full", layers=tuple(range(8))),),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddresses:
    """Where the other process listens: its transfer server, and the port of its raw socket."""

    transfer: str
    socket_port: int


def hashes_of(num_blocks: int) -> list[BlockHash]:
    """Return the hashes of the served blocks, in the order in which they are asked for."""
    return [BlockHash(hashlib.sha256(b"%d" % index).digest()) for index in range(num_blocks)]


def new_worker(
    block_bytes: int,
    *,
    incarnation: int,
    paths: Sequence[Path] = ALL_PATHS,
    credentials: Credentials | None = None,
) -> WorkerService:
    """Return a worker with room for twice the blocks that are moved, all bytes touched."""
    num_blocks = 2 * TOTAL_BYTES // block_bytes
    memory = KvMemory(
        open_device("cpu"),
        IDENTITY,
        num_blocks=num_blocks + 1,
        layout=Layout(block_tokens=block_bytes // TOKEN_BYTES),
    )
    for layer in memory.layers:
        layer.view(torch.uint8).random_()
    return WorkerService(
        incarnation=Incarnation(incarnation), memory=memory, paths=paths, credentials=credentials
    )


def scattered_blocks(worker: WorkerService, num_blocks: int, *, seed: int) -> list[BlockId]:
    """Return so many of a worker's blocks, in disorder."""
    order = np.random.default_rng(seed).permutation(worker.memory.num_blocks - 1) + 1
    return [BlockId(block_id) for block_id in order[:num_blocks].tolist()]


@contextmanager
def made_credentials() -> Iterator[Credentials | None]:
    """Yield credentials for mTLS, of certificates made for a while; None without trustme."""
    if importlib.util.find_spec("trustme") is None:
        yield None
        return
    authority: Any = importlib.import_module("trustme").CA()
    issued = authority.issue_cert(DEFAULT_SERVER_NAME)
    with tempfile.TemporaryDirectory() as name:
        folder = FilePath(name)
        authority.cert_pem.write_to_path(folder / "ca.crt")
        issued.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
        both = folder / "both.pem"
        yield Credentials(certificate=both, key=both, ca=folder / "ca.crt")


@contextmanager
def running_peer(
    block_bytes: int, credentials: Credentials | None = None
) -> Iterator[PeerAddresses]:
    """Start the other process and yield where it listens; end it afterwards.

    Raises:
        DeadlineError, UnavailableError: it did not start; as `answer_of`.
    """
    with running_process(_serve, block_bytes, credentials) as pipe:
        yield answer_of(pipe)


def _serve(pipe: Connection, block_bytes: int, credentials: Credentials | None) -> None:
    num_blocks = TOTAL_BYTES // block_bytes
    worker = new_worker(block_bytes, incarnation=1, credentials=credentials)
    blocks = scattered_blocks(worker, num_blocks, seed=1)
    worker.written(FIRST_GROUP, zip(hashes_of(num_blocks), blocks, strict=True))
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_to_all, args=(listener,), daemon=True).start()
    port: int = listener.getsockname()[1]
    pipe.send(PeerAddresses(transfer=worker.serve(), socket_port=port))
    threading.Event().wait()  # until it is killed


def _send_to_all(listener: socket.socket) -> None:
    """Send every caller all bytes, as fast as the socket takes them."""
    # From memory as blocks are, not one piece again and again from the processor's cache.
    source = np.random.default_rng(3).integers(0, 256, TOTAL_BYTES, dtype=np.uint8).data
    while True:
        with listener.accept()[0] as caller:
            for begin in range(0, TOTAL_BYTES, SOCKET_PIECE_BYTES):
                caller.sendall(source[begin : begin + SOCKET_PIECE_BYTES])
