"""One worker: its KV memory, what is resident in it, and its side of every transfer."""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    IdentityMismatchError,
    KvferryError,
    MismatchError,
    StaleError,
)
from kvferry.proto.identity import Identity, identity_from_cbor, require_equal_identities
from kvferry.proto.ids import BlockHash, BlockId, GroupId, Incarnation, LeaseId, pack_group
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.frames import DEFAULT_FRAME_BYTES, Frame, Header, plan_frames
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.pull import PullOutcome
from kvferry.worker.residency import Residency
from kvferry.worker.source import find_prefix, read_frames
from kvferry.worker.stats import StatsCounter, WorkerStats
from kvferry.worker.store_sink import Reserver, accept_blocks
from kvferry.worker.transfer_client import TransferClient
from kvferry.worker.transfer_server import TransferServer
from kvferry.worker.transfer_session import PullSession
from kvferry.worker.transfer_wire import (
    FetchAsk,
    StoreAsk,
    WorkerDescription,
    make_fetch_ask,
)

ONLY_GROUP = GroupId(0)
"""Instances with several groups of layers come later."""


class WorkerService:
    """Thread-safe. Whoever writes into the memory keeps this order.

    Before a block is written into: `reused`. After it is completely written: `written`. Only then
    may the coordinator be told.

    Args:
        identity: what the cached bytes depend on; must describe the memory.
        incarnation: this life of the process.
        memory: the KV tensors.
        group_id: the group whose blocks the memory holds.

    Raises:
        ConfigError: the memory's sizes or dtype are not the identity's.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        incarnation: Incarnation,
        memory: KvMemory,
        group_id: GroupId = ONLY_GROUP,
    ) -> None:
        _require_matching_memory(identity, memory)
        self.identity = identity
        self.incarnation = incarnation
        self.memory = memory
        self.group_id = group_id
        self.residency = Residency()
        self.reserver: Reserver | None = None
        self._identity_digest = identity.digest()
        self._stats = StatsCounter()
        self._client = TransferClient()
        self._server: TransferServer | None = None

    def written(self, pairs: Iterable[tuple[BlockHash, BlockId]]) -> None:
        """Say that each block is completely written and holds its hash's content.

        Raises:
            InvariantError: a block that still holds another hash, or the null block.
        """
        self.residency.mark_written(
            (pack_group(block_hash, self.group_id), block_id) for block_hash, block_id in pairs
        )

    def reused(self, block_ids: Iterable[BlockId]) -> None:
        """Say that the blocks are about to be written into; call before the first byte."""
        self.residency.mark_reused(block_ids)

    def serve(self, *, bind: str = "127.0.0.1", port: int = 0, insecure: bool = False) -> str:
        """Start the transfer server and return its address, "host:port" with the host of `bind`.

        Peers connect to that address, so across machines bind this machine's own address.

        Raises:
            InsecureBindError, PortTakenError, ConfigError: as `TransferServer`, or it serves
                already.
        """
        if self._server is not None:
            raise ConfigError("this worker serves already", given=self._server.address)
        self._server = TransferServer(self, bind=bind, port=port, insecure=insecure)
        return self._server.address

    def pull(
        self,
        *,
        source_address: str,
        source_incarnation: Incarnation,
        lease_id: LeaseId,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[BlockId],
        timeout_s: float,
        cancel: threading.Event,
    ) -> PullOutcome:
        """Fetch blocks from a peer into `block_ids`, one per hash; blocks until it has ended.

        When it returns, nothing writes into the blocks any more and the verified prefix is
        resident. Never raises for a peer's failure: the outcome says what arrived and why no more.

        Raises:
            BadInputError: destinations that do not fit the hashes or the memory.
        """
        ask = make_fetch_ask(
            self.identity,
            hashes,
            group_id=self.group_id,
            lease_id=lease_id,
            incarnation=source_incarnation,
        )
        self.reused(block_ids)
        outcome = self._client.pull(
            source_address,
            ask,
            memory=self.memory,
            block_ids=block_ids,
            timeout_s=timeout_s,
            cancel=cancel,
        )
        arrived = outcome.num_blocks
        self.written(zip(hashes[:arrived], block_ids[:arrived], strict=True))
        self._stats.add(
            num_pulls=1,
            num_blocks_pulled=arrived,
            num_bytes_pulled=outcome.num_bytes,
            num_checksum_failures=outcome.num_checksum_failures,
        )
        if outcome.error_type is not None:
            self._stats.add_error(outcome.error_type)
        return outcome

    def describe(self) -> WorkerDescription:
        """Say who this worker is."""
        return WorkerDescription(
            incarnation=self.incarnation,
            identity=self.identity,
            group_id=self.group_id,
            geometry=self.memory.geometry,
            num_resident_blocks=self.residency.num_blocks(),
            pid=os.getpid(),
        )

    def open_fetch(self, ask: FetchAsk) -> Iterator[Header | Frame]:
        """Yield a header with the length of the resident prefix, then its frames.

        Raises:
            IdentityMismatchError: another identity.
            StaleError: meant for another life of this worker.
            NotFoundError: a block left its place while it was read.
            BadInputError: an unknown group, or a frame size out of range.
        """
        try:
            self._require_same(ask)
            if ask.incarnation not in (0, self.incarnation):
                raise StaleError(
                    "the worker at this address is in another life",
                    given=ask.incarnation,
                    allowed=self.incarnation,
                )
            residents = find_prefix(self.residency, ask.hashes, self.group_id)
            plan = plan_frames(
                len(residents), self.memory.geometry, ask.max_frame_bytes or DEFAULT_FRAME_BYTES
            )
            frames = read_frames(
                plan,
                read=partial(gather, self.memory),
                residency=self.residency,
                hashes=ask.hashes,
                residents=residents,
            )
            self._stats.add(num_fetches=1)
            yield Header(
                incarnation=self.incarnation,
                num_found=len(residents),
                geometry=self.memory.geometry,
            )
            for frame in frames:
                self._stats.add(num_bytes_served=len(frame.payload))
                yield frame
        except KvferryError as error:
            self._stats.add_error(type(error).__name__)
            raise

    def accept_store(self, parts: Iterator[StoreAsk | Frame]) -> int:
        """Take a client's blocks; return the length of the prefix of its hashes that is here now.

        Raises:
            MismatchError: this worker takes no stores.
            IdentityMismatchError: another identity.
            BadInputError: the first part is no header, or an unknown group.
            TransferError: a frame that is corrupt, out of place or missing.
            KvferryError: the owner of the blocks refused.
        """
        session = PullSession(0, self.memory.geometry)
        try:
            if self.reserver is None:
                raise MismatchError("this worker takes no stores", allowed="a store instance")
            ask = next(parts, None)
            if not isinstance(ask, StoreAsk):
                raise BadInputError("a store must begin with a header", given=type(ask).__name__)
            self._require_same(ask)
            session = PullSession(len(ask.hashes), self.memory.geometry)
            return accept_blocks(
                ask,
                parts,
                session,
                write=partial(scatter, self.memory),
                residency=self.residency,
                reserver=self.reserver,
            )
        except KvferryError as error:
            self._stats.add_error(type(error).__name__)
            raise
        finally:
            self._stats.add(
                num_stores=1,
                num_bytes_stored=session.num_bytes,
                num_checksum_failures=session.num_checksum_failures,
            )

    def stats(self) -> WorkerStats:
        """Return what was moved and refused so far."""
        return self._stats.read()

    def stop(self) -> None:
        """Stop serving and pulling; running calls get a short grace. Repeating is fine."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        self._client.close()

    def _require_same(self, ask: FetchAsk | StoreAsk) -> None:
        if ask.identity_digest != self._identity_digest:
            if ask.identity_cbor:
                theirs = identity_from_cbor(ask.identity_cbor)
                require_equal_identities(self.identity, theirs, who="the caller")
            raise IdentityMismatchError(
                "the caller has another identity",
                given=ask.identity_digest.hex(),
                allowed=self._identity_digest.hex(),
            )
        if ask.group_id != self.group_id:
            raise BadInputError(
                "this worker holds no blocks of the group",
                given=ask.group_id,
                allowed=self.group_id,
            )


def _require_matching_memory(identity: Identity, memory: KvMemory) -> None:
    described = (
        identity.num_layers,
        identity.num_kv_heads,
        identity.head_size,
        identity.kv_dtype,
    )
    built = (memory.num_layers, memory.num_kv_heads, memory.head_size, memory.dtype)
    if described != built:
        raise ConfigError(
            "the KV memory is not the identity's (layers, KV heads, head size, KV dtype)",
            given=built,
            allowed=described,
        )
