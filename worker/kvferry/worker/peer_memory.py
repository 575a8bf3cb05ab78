"""Another worker's memory on this host, mapped: its blocks are read without asking it."""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgpack

from kvferry.proto.errors import MismatchError, TransferError
from kvferry.proto.ids import GroupId
from kvferry.worker.arena import cut, map_arena, page_aligned, touch, written_extents
from kvferry.worker.checksum import KeptChecksums
from kvferry.worker.destination import Destination
from kvferry.worker.device import open_device
from kvferry.worker.fetch_terms import FetchTerms, Peer
from kvferry.worker.frames import DEFAULT_FRAME_BYTES, SharedOffer
from kvferry.worker.group_memory import GroupMemory, MemoryPlan
from kvferry.worker.memory_door import peer_process
from kvferry.worker.outgoing import OutgoingFrame, Served
from kvferry.worker.residency import GENERATION_BYTES, Generations, Resident
from kvferry.worker.served import served_of
from kvferry.worker.shared_blocks import SharedBlocks
from kvferry.worker.source import read_frames
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import FetchAsk

# Both are on one host, and the other side has nothing to do for it.
ATTACH_TIMEOUT_S = 1.0
MAX_GREETING_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """What a worker of one life has handed out; stays readable after that worker's end."""

    num_blocks: int
    groups: tuple[GroupMemory, ...]
    generations: Generations

    def served(self, offer: SharedOffer, ask: FetchAsk) -> Served:
        """Return what is offered, as the peer itself would serve it.

        Raises:
            TransferError: an offer of blocks that the memory does not have.
        """
        residents = self._residents(offer)
        return served_of(
            self.groups[ask.group_id],
            self.generations,
            residents,
            ask.selection,
            num_asked=len(ask.hashes),
            checksums=KeptChecksums(),
        )

    def blocks(self, offer: SharedOffer, group_id: GroupId, terms: FetchTerms) -> SharedBlocks:
        """Return the blocks that are offered, to be copied by whoever asked for them.

        Raises:
            TransferError: as `served`.
        """
        residents = self._residents(offer)
        return SharedBlocks(self.groups[group_id], self.generations, residents, terms)

    def _residents(self, offer: SharedOffer) -> list[Resident]:
        wrong = [block_id for block_id in offer.block_ids if not 0 < block_id < self.num_blocks]
        if wrong or len(offer.block_ids) != len(offer.generations):
            raise TransferError(
                "an offer of blocks that are not there",
                given=wrong or f"{len(offer.block_ids)} with {len(offer.generations)} generations",
                allowed=f"1 to {self.num_blocks - 1}",
            )
        return [*map(Resident, offer.block_ids, offer.generations)]


def read_shared(served: Served, ask: FetchAsk) -> Iterator[OutgoingFrame]:
    """Return the frames of what is served, cut as in the stream of a call; as `read_frames`."""
    return read_frames(served, ask.hashes, ask.max_frame_bytes or DEFAULT_FRAME_BYTES)


def copy_frames(
    frames: Iterator[OutgoingFrame],
    session: PullSession,
    destination: Destination,
    terms: FetchTerms,
) -> None:
    """Copy frames from where they lie to where they belong; what still holds then counts.

    Raises:
        NotFoundError: a block was handed out anew meanwhile.
        DeadlineError, CancelledPullError: as `FetchTerms.require_s`.
    """
    for frame in frames:
        terms.require_s()
        views = destination.views(frame.segments)
        if views is None or len(views) != len(frame.pieces):
            destination.write(frame.segments, b"".join(frame.pieces))
        else:
            for view, piece in zip(views, frame.pieces, strict=True):
                view[:] = piece
        session.placed(frame.segments[: frame.settle()])


def attach(
    name: str, peer: Peer, timeout_s: float = ATTACH_TIMEOUT_S
) -> tuple[PeerMemory, socket.socket]:
    """Return the memory of the worker behind a `MemoryDoor`, and the open connection to the door.

    The connection is closed from the other side when the worker ends, however it does.

    Args:
        name: of its socket.
        peer: whom it must be.
        timeout_s: how long the worker may take.

    Raises:
        MismatchError: the memory cannot be had, or is not what was expected.
    """
    with ExitStack() as received, ExitStack() as failed:
        try:
            connection = failed.enter_context(_connect(name, timeout_s))
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_GREETING_BYTES, 2)
        except OSError as error:
            raise MismatchError("the peer's memory cannot be had", given=str(error)) from error
        for descriptor in descriptors:
            received.callback(os.close, descriptor)
        num_blocks = _num_blocks(message, descriptors, peer.incarnation)
        plan = MemoryPlan(peer.identity, num_blocks=num_blocks, layout=peer.layout, rank=peer.rank)
        memory = map_arena(descriptors[0], sum(map(page_aligned, plan.storage_sizes)))
        # As many pages as a prompt has take as long to map, one by one, as to copy.
        threading.Thread(
            target=touch,
            args=(memory, written_extents(descriptors[0])),
            name="kvferry-touch",
            daemon=True,
        ).start()
        generations = map_arena(descriptors[1], num_blocks * GENERATION_BYTES)
        failed.pop_all()
    attached = PeerMemory(
        num_blocks,
        plan.groups(open_device("cpu"), cut(memory, plan.storage_sizes)),
        Generations(generations[: num_blocks * GENERATION_BYTES]),
    )
    return attached, connection


def _connect(name: str, timeout_s: float) -> socket.socket:
    with ExitStack() as failed:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        failed.enter_context(connection)
        connection.settimeout(timeout_s)
        connection.connect(f"\0{name}")
        pid, user = peer_process(connection)
        if user != os.getuid():
            raise MismatchError(
                "the peer's memory is offered by another user",
                given=f"process {pid} of user {user}",
                allowed=f"user {os.getuid()}",
            )
        failed.pop_all()
    return connection


def _num_blocks(message: bytes, descriptors: Sequence[int], incarnation: int) -> int:
    try:
        facts = msgpack.unpackb(message)
        found: object = facts["incarnation"]
        num_blocks: object = facts["num_blocks"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise MismatchError("not the memory of a worker", given=f"{len(message)} bytes") from error
    if found != incarnation or len(descriptors) != 2 or not isinstance(num_blocks, int):
        raise MismatchError(
            "the memory of another life, or not all of it",
            given=f"incarnation {found}, {num_blocks} blocks, {len(descriptors)} descriptors",
            allowed=f"incarnation {incarnation}, a number of blocks, 2 descriptors",
        )
    return num_blocks
