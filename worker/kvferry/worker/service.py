"""One worker: its KV memory, what is resident in it, and its side of every transfer."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    IdentityMismatchError,
    MismatchError,
    StaleError,
)
from kvferry.proto.identity import identity_from_cbor, require_equal_identities
from kvferry.proto.ids import BlockHash, BlockId, GroupId, Incarnation, LeaseId, pack_group
from kvferry.proto.layout_text import layout_text
from kvferry.proto.placement import shape_of
from kvferry.proto.step_messages import Source
from kvferry.worker.block_io import scatter
from kvferry.worker.checksum import KeptChecksums
from kvferry.worker.fetch_terms import Fetcher, FetchTerms
from kvferry.worker.frames import BULK_FRAME_BYTES, DEFAULT_FRAME_BYTES, Frame, Header, SharedOffer
from kvferry.worker.group_load import GroupLoad
from kvferry.worker.heap import keep_freed_memory
from kvferry.worker.inventory import InventoryPart, inventory_parts
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.layout_pull import pull_loads, read_shared
from kvferry.worker.memory_door import MemoryDoor
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.paths import ALL_PATHS, Path, this_place
from kvferry.worker.pull import PullOutcome
from kvferry.worker.reservations import Reserver
from kvferry.worker.residency import Residency, Resident
from kvferry.worker.served import served_of
from kvferry.worker.shared_blocks import SharedBlocks, SharedReader
from kvferry.worker.source import find_prefix, read_frames
from kvferry.worker.stats import StatsCounter, WorkerStats
from kvferry.worker.store_sink import accept_blocks
from kvferry.worker.take_wire import TakeAsk
from kvferry.worker.taking import require_takeable, take_blocks
from kvferry.worker.transfer_client import TransferClient
from kvferry.worker.transfer_server import TransferServer
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import (
    FetchAsk,
    StoreAsk,
    WorkerDescription,
)


class WorkerService:
    """Thread-safe. Whoever writes into the memory keeps this order.

    Before a block is written into: `reused`. After it is completely written: `written`. Only then
    may the coordinator be told. A block is of one group at a time: `written` says of which,
    `reused` ends it for whichever it was.

    Args:
        incarnation: this life of the process.
        memory: the KV tensors, and the identity of what they hold.
        paths: those that it serves and pulls by, besides gRPC.
        credentials: what it shows to its peers, and asks of them; None speaks plaintext.
        fetcher: what it pulls with; one that speaks gRPC by itself if not told.

    Attributes:
        counter: where all calls to it and by it are counted.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        memory: KvMemory,
        paths: Sequence[Path] = ALL_PATHS,
        credentials: Credentials | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        keep_freed_memory()
        self.identity = memory.identity
        self.incarnation = incarnation
        self.memory = memory
        self.residency = Residency(memory.num_blocks)
        self.reserver: Reserver | None = None
        self._identity_digest = self.identity.digest()
        self._checksums = KeptChecksums()
        self.counter = StatsCounter()
        self._paths = tuple(paths)
        self._credentials = credentials
        self._fetcher = fetcher or TransferClient(credentials, paths=paths, counter=self.counter)
        self._server: TransferServer | None = None
        self._door: MemoryDoor | None = None

    def written(
        self,
        group_id: GroupId,
        pairs: Iterable[tuple[BlockHash, BlockId]],
        num_resets: int | None = None,
    ) -> None:
        """Say that each block is completely written and holds its hash's content in the group.

        What was begun when there had been only `num_resets` is passed over after another one.

        Raises:
            InvariantError: a block that still holds another hash, or one of another group, or the
                null block.
            BadInputError: no such group, naming those there are.
        """
        self.memory.group(group_id)
        keyed = ((pack_group(block_hash, group_id), block_id) for block_hash, block_id in pairs)
        self.residency.mark_written(keyed, num_resets)

    def reused(self, block_ids: Iterable[BlockId]) -> None:
        """Say that the blocks are about to be written into; call before the first byte."""
        self.residency.mark_reused(block_ids)

    def inventory(self, max_blocks: int) -> Iterator[InventoryPart]:
        """Yield what is held now, in parts of at most so many blocks; see `inventory_parts`."""
        return inventory_parts(self.residency, max_blocks)

    def serve(
        self,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        insecure: bool = False,
        reflection: bool = False,
    ) -> str:
        """Start the transfer server and return its address, "host:port" with the host of `bind`.

        Peers connect to that address, so across machines bind this machine's own address.

        Raises:
            InsecureBindError, PortTakenError, ConfigError: as `TransferServer`, or it serves
                already.
        """
        if self._server is not None:
            raise ConfigError("this worker serves already", given=self._server.address)
        self._server = TransferServer(
            self,
            bind=bind,
            port=port,
            insecure=insecure,
            bulk="bulk" in self._paths,
            credentials=self._credentials,
            reflection=reflection,
        )
        has_arenas = self.memory.arena is not None and self.residency.arena is not None
        if "shm" in self._paths and has_arenas and this_place():
            self._door = MemoryDoor(self.memory, self.residency, self.incarnation)
        return self._server.address

    def pull(
        self,
        *,
        source: Source,
        lease_id: LeaseId,
        loads: Sequence[GroupLoad],
        timeout_s: float,
        cancel: threading.Event,
        num_resets: int | None = None,
    ) -> PullOutcome:
        """Fetch this rank's part of some blocks from an instance of any layout; blocks until ended.

        When it returns, nothing writes into the blocks any more, and the verified first blocks of
        every load are resident here, as `written` with `num_resets`. Never raises for a peer's
        failure: the outcome says what arrived and why no more. A load that fails ends the pull:
        nothing of those after it arrives.

        Raises:
            BadInputError: destinations that do not fit the hashes or the memory, or no such group.
        """
        self.reused(block_id for load in loads for block_id in load.block_ids)
        outcome = pull_loads(
            self._fetcher,
            self.memory,
            source,
            loads,
            lease_id=lease_id,
            timeout_s=timeout_s,
            cancel=cancel,
        )
        for load, arrived in zip(loads, outcome.num_blocks_of_run, strict=True):
            pairs = zip(load.hashes[:arrived], load.block_ids[:arrived], strict=True)
            self.written(load.group_id, pairs, num_resets)
        self.counter.add(
            num_blocks_pulled=sum(outcome.num_blocks_of_run),
            num_checksum_failures=outcome.num_checksum_failures,
        )
        return outcome

    def read_shared(
        self,
        *,
        source: Source,
        lease_id: LeaseId,
        group_id: GroupId,
        hashes: Sequence[BlockHash],
        read: Callable[[SharedBlocks], None],
        timeout_s: float,
        cancel: threading.Event,
    ) -> int:
        """Have `read` copy this rank's part of blocks straight out of a source's memory.

        That goes where an earlier `pull` has mapped it, and it has this rank's layout. Nothing
        becomes resident here.

        Returns:
            how many of the first blocks `read` has copied rightly; the others may be pulled, which
            says why they were not.

        Raises:
            BadInputError: no such group.
            DeadlineError: the source is silent, or the time is over.
        """
        if not isinstance(self._fetcher, SharedReader):
            return 0
        terms = FetchTerms(lease_id=lease_id, end_s=time.monotonic() + timeout_s, cancel=cancel)
        num_read = read_shared(
            self._fetcher, self.memory, source, read, group_id=group_id, hashes=hashes, terms=terms
        )
        self.counter.add(num_blocks_pulled=num_read)
        return num_read

    def describe(self) -> WorkerDescription:
        """Say who this worker is."""
        return WorkerDescription(
            incarnation=self.incarnation,
            identity=self.identity,
            geometry_of_group={GroupId(i): g.geometry for i, g in enumerate(self.memory.groups)},
            num_resident_blocks=self.residency.num_blocks(),
            pid=os.getpid(),
        )

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | OutgoingFrame]:
        """Yield a header with the length of the resident prefix, then its frames.

        With a selection, both count its chunks (`Chunks`) instead of blocks. A caller that can map
        this memory is told in the header where the blocks lie instead.

        Raises:
            IdentityMismatchError: another identity.
            MismatchError: meant for another rank, or for one of another layout.
            StaleError: meant for another life of this worker.
            NotFoundError: a block left its place while it was read.
            BadInputError: no such group, a frame size out of range, or a selection that does not
                fit the asked blocks or this memory.
        """
        self._require_same(ask)
        self._require_own_place(ask)
        if ask.incarnation not in (0, self.incarnation):
            raise StaleError(
                "the worker at this address is in another life",
                given=ask.incarnation,
                allowed=self.incarnation,
            )
        group = self.memory.group(ask.group_id)
        residents = find_prefix(self.residency, ask.hashes, ask.group_id)
        served = served_of(
            group,
            self.residency,
            residents,
            ask.selection,
            num_asked=len(ask.hashes),
            checksums=self._checksums,
        )
        max_frame_bytes = ask.max_frame_bytes or _frame_bytes(ask)
        frames = read_frames(served, ask.hashes, max_frame_bytes)
        offer = self._shared_offer(ask, residents)
        yield Header(
            incarnation=self.incarnation,
            num_found=served.num_found,
            geometry=served.geometry,
            offer=offer,
        )
        if offer is None:
            yield from frames

    def accept_store(self, parts: Iterator[StoreAsk | Frame]) -> int:
        """Take a client's blocks; return the length of the prefix of its hashes that is here now.

        Raises:
            MismatchError: this worker takes no stores.
            IdentityMismatchError: another identity.
            BadInputError: the first part is no header, or no such group.
            TransferError: a frame that is corrupt, out of place or missing.
            KvferryError: the owner of the blocks refused.
        """
        reserver = self._require_reserver()
        ask = next(parts, None)
        if not isinstance(ask, StoreAsk):
            raise BadInputError("a store must begin with a header", given=type(ask).__name__)
        self._require_same(ask)
        group = self.memory.group(ask.group_id)
        session = PullSession(len(ask.hashes), group.geometry)
        try:
            return accept_blocks(
                ask,
                parts,
                session,
                write=partial(scatter, group),
                residency=self.residency,
                reserver=reserver,
            )
        finally:
            self.counter.add(num_checksum_failures=session.num_checksum_failures)

    def accept_take(self, ask: TakeAsk, *, timeout_s: float, cancel: threading.Event) -> int:
        """Fetch blocks from an instance of any layout; return the prefix of the hashes here now.

        What the source lacks shortens the prefix and is no error.

        Raises:
            MismatchError: this worker takes no stores, or the source's blocks are not of its size.
            IdentityMismatchError: another identity.
            BadInputError: no such group, or a source whose ranks cannot hold the model.
            DeadlineError: `timeout_s` seconds have passed, or `cancel` was set.
            KvferryError: the owner of the blocks refused, or why the source gave less.
        """
        reserver = self._require_reserver()
        self._require_same(ask)
        shape = shape_of(self.identity, ask.group_id)
        require_takeable(ask.source, self.memory.layout, shape)

        def pull(loads: Sequence[GroupLoad], num_resets: int) -> PullOutcome:
            return self.pull(
                source=ask.source,
                lease_id=LeaseId(""),
                loads=loads,
                timeout_s=timeout_s,
                cancel=cancel,
                num_resets=num_resets,
            )

        return take_blocks(ask, pull=pull, residency=self.residency, reserver=reserver)

    def stats(self) -> WorkerStats:
        """Return what was moved and refused so far."""
        return self.counter.read()

    def stop(self) -> None:
        """Stop serving and pulling; running calls get a short grace. Repeating is fine."""
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._server is not None:
            self._server.stop()
            self._server = None
        self._fetcher.close()

    def _shared_offer(self, ask: FetchAsk, residents: Sequence[Resident]) -> SharedOffer | None:
        """Return where the blocks lie, for a caller that runs where this memory can be mapped."""
        if self._door is None or "shm" not in ask.paths or ask.place != this_place():
            return None
        return SharedOffer(
            socket=self._door.name,
            block_ids=tuple(resident.block_id for resident in residents),
            generations=tuple(resident.generation for resident in residents),
        )

    def _require_reserver(self) -> Reserver:
        if self.reserver is None:
            raise MismatchError("this worker takes no stores", allowed="a store instance")
        return self.reserver

    def _require_same(self, ask: FetchAsk | StoreAsk | TakeAsk) -> None:
        if ask.identity_digest != self._identity_digest:
            if ask.identity_cbor:
                theirs = identity_from_cbor(ask.identity_cbor)
                require_equal_identities(self.identity, theirs, who="the caller")
            raise IdentityMismatchError(
                "the caller has another identity",
                given=ask.identity_digest.hex(),
                allowed=self._identity_digest.hex(),
            )

    def _require_own_place(self, ask: FetchAsk) -> None:
        """Refuse a caller that takes this for another rank: it would read other bytes."""
        own = self.memory.layout
        asked = None if ask.layout is None else replace(ask.layout, memory=own.memory)
        one_rank = asked is None and own.num_ranks == 1
        if not one_rank and (asked, ask.rank) != (own, self.memory.rank):
            raise MismatchError(
                "the caller takes this worker for another rank, or one of another layout",
                given={"layout": asked and layout_text(asked), "rank": ask.rank},
                allowed={"layout": layout_text(own), "rank": self.memory.rank},
            )


def _frame_bytes(ask: FetchAsk) -> int:
    """Return the bytes of a frame where the caller names none: more where it takes a bulk socket.

    What goes over one is checked a quarter of a MiB at a time, whatever the frame; in the stream
    of the call a frame is a message.
    """
    return BULK_FRAME_BYTES if "bulk" in ask.paths else DEFAULT_FRAME_BYTES
