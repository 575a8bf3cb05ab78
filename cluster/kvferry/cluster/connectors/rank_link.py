"""One rank of an engine as kvferry's other processes see it: a little memory, filled and emptied.

Blocks pass through this memory both ways, because the engine's own lies in another order and in
blocks of another size, may be on a GPU, and is nobody's to hand out. Half of it is for saving;
the other half, for loading, is two trays: one is filled while the other is emptied.
"""

import threading
from collections.abc import Callable, Sequence

from kvferry.cluster.connectors.facts import EngineFacts
from kvferry.cluster.connectors.orders import EngineBlocks
from kvferry.cluster.connectors.paged_tensors import PagedTensors
from kvferry.proto.credentials import Credentials
from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import FIRST_GROUP, BlockHash, BlockId, LeaseId
from kvferry.proto.step_messages import Source
from kvferry.worker.device import open_device
from kvferry.worker.group_load import group_load
from kvferry.worker.group_memory import HostLayer
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.pull import PullOutcome
from kvferry.worker.service import WorkerService
from kvferry.worker.shared_blocks import SharedBlocks

NO_LEASE = LeaseId("")


class RankLink:
    """Thread-safe as far as one thread saves and one loads.

    Args:
        facts: the engine.
        rank: which of its ranks this is.
        tensors: the rank's own memory.
        staging_bytes: of both halves together.
        bind: host to listen on; peers connect to it.
        insecure: allow a host beyond loopback without credentials.
        credentials: what it shows to its peers, and asks of them; None speaks plaintext.

    Raises:
        ConfigError: tensors that are not those of the rank, or too little memory for a block.
        InsecureBindError: as `WorkerService.serve`.
    """

    def __init__(
        self,
        facts: EngineFacts,
        rank: int,
        tensors: PagedTensors,
        *,
        staging_bytes: int,
        bind: str,
        insecure: bool,
        credentials: Credentials | None,
    ) -> None:
        self.facts = facts
        self.rank = rank
        self._tensors = tensors
        unit = facts.hashes_per_block
        # All of a rank's blocks are as large as its share of heads and layers makes them.
        whole_bytes = facts.identity.block_bytes(facts.hash_block_tokens)
        share_bytes = max(1, whole_bytes // facts.layout.num_ranks)
        self.num_slots = max(staging_bytes // 2 // share_bytes // unit, 1) * unit
        self.num_tray_slots = max(self.num_slots // 2 // unit, 1) * unit
        memory = KvMemory(
            open_device("cpu"),
            facts.identity,
            num_blocks=1 + self.num_slots + 2 * self.num_tray_slots,
            layout=facts.layout,
            rank=rank,
        )
        _require_fit(memory, tensors, facts)
        self._memory = memory
        self._layers = memory.groups[FIRST_GROUP].host_layers()
        self._service = WorkerService(
            incarnation=facts.incarnation, memory=memory, credentials=credentials
        )
        self.address = self._service.serve(bind=bind, insecure=insecure)

    def queued(self) -> Callable[[], None]:
        """Return what waits until the engine's work up to now is done: its thread calls this."""
        return self._tensors.queued()

    def put(self, hashes: Sequence[BlockHash], first_block: int, blocks: EngineBlocks) -> None:
        """Copy hash blocks of a request out of the engine, to be fetched here by their hashes.

        Args:
            hashes: of at most `num_slots` blocks.
            first_block: which hash block of the request the first of them is.
            blocks: of the engine, which hold all of their tokens.
        """
        slots = range(1, 1 + len(hashes))
        self._service.reused(BlockId(slot) for slot in slots)
        first_token = self._local(first_block * self.facts.hash_block_tokens)
        skipped = first_token // self._tensors.block_tokens - blocks.first
        begin_token = (blocks.first + skipped) * self._tensors.block_tokens
        end_token = first_token + len(hashes) * self._memory.layout.block_tokens
        num_blocks = -(-(end_token - begin_token) // self._tensors.block_tokens)
        self._tensors.read(
            [layer[:, slots.start : slots.stop] for layer in self._memory.layers],
            blocks.ids[skipped : skipped + num_blocks],
            first_token - begin_token,
        )
        self._service.written(FIRST_GROUP, zip(hashes, map(BlockId, slots), strict=True))

    def forget(self) -> None:
        """Let nobody fetch what was put here so far."""
        self._service.reused(BlockId(slot) for slot in range(1, 1 + self.num_slots))

    def pull(
        self,
        chain: Sequence[BlockHash],
        first_block: int,
        num_blocks: int,
        source: Source,
        *,
        tray: int,
        timeout_s: float,
        cancel: threading.Event,
    ) -> PullOutcome:
        """Fetch at most `num_tray_slots` hash blocks, this rank's part, into tray 0 or 1.

        They are verified when they are here.
        """
        first_slot = self._first_slot(tray)
        load = group_load(
            chain,
            FIRST_GROUP,
            [BlockId(first_slot + index) for index in range(num_blocks)],
            first_block=first_block,
            block_tokens=self.facts.hash_block_tokens,
            source_block_tokens=source.layout.virtual_block_tokens,
            hash_block_tokens=self.facts.hash_block_tokens,
        )
        return self._service.pull(
            source=source, lease_id=NO_LEASE, loads=[load], timeout_s=timeout_s, cancel=cancel
        )

    def read(
        self,
        hashes: Sequence[BlockHash],
        first_block: int,
        source: Source,
        blocks: EngineBlocks,
        *,
        unused: Callable[[], None],
        timeout_s: float,
        cancel: threading.Event,
    ) -> int:
        """Copy hash blocks, whole blocks of the engine, straight out of a source's memory.

        `unused` is called before the first byte is written.

        Returns:
            how many of the first are verified and in their places; the places of the others may
            hold anything. Less than all where the memory is not mapped here yet, or is shared out
            otherwise, or something failed: `pull` says what.

        Raises:
            DeadlineError: the source is silent, or the time is over.
        """
        unit = self.facts.hashes_per_block

        def copy(shared: SharedBlocks) -> None:
            unused()
            layers = shared.memory.host_layers()
            whole = len(shared.block_ids) // unit * unit
            for first in range(0, whole, self.num_tray_slots):
                shared.terms.require_s()
                ids = shared.block_ids[first : min(first + self.num_tray_slots, whole)]
                self._write(layers, ids, first_block + first, blocks)

        num_read = self._service.read_shared(
            source=source,
            lease_id=NO_LEASE,
            group_id=FIRST_GROUP,
            hashes=hashes,
            read=copy,
            timeout_s=timeout_s,
            cancel=cancel,
        )
        return num_read // unit * unit

    def take_out(
        self, num_blocks: int, first_block: int, blocks: EngineBlocks, *, tray: int
    ) -> None:
        """Copy the first hash blocks of a tray, whole blocks of the engine, to their places."""
        first_slot = self._first_slot(tray)
        slots = range(first_slot, first_slot + num_blocks)
        self._write(self._layers, slots, first_block, blocks)

    def stop(self) -> None:
        """Stop serving and pulling. Repeating is fine."""
        self._service.stop()

    def _write(
        self,
        layers: Sequence[HostLayer],
        ids: Sequence[int],
        first_block: int,
        blocks: EngineBlocks,
    ) -> None:
        """Copy hash blocks that lie at `ids`, whole blocks of the engine, to their places."""
        begin = self._local(first_block * self.facts.hash_block_tokens)
        count = len(ids) * self._memory.layout.block_tokens // self._tensors.block_tokens
        skipped = begin // self._tensors.block_tokens - blocks.first
        self._tensors.write(layers, ids, blocks.ids[skipped : skipped + count])

    def _first_slot(self, tray: int) -> int:
        return 1 + self.num_slots + tray * self.num_tray_slots

    def _local(self, position: int) -> int:
        """Return how many tokens before a block's begin this rank has."""
        return position // self.facts.layout.token_shards


def _require_fit(memory: KvMemory, tensors: PagedTensors, facts: EngineFacts) -> None:
    wanted = [tuple(layer.shape[3:]) for layer in memory.layers]
    given = [tuple(keys.shape[2:]) for keys, _ in tensors.layers]
    per_rank = facts.engine_block_tokens // facts.layout.token_shards
    if given != wanted or tensors.block_tokens != per_rank:
        raise ConfigError(
            "the engine's KV tensors are not those of this rank",
            given={"layers": len(given), "heads, head_size": sorted(set(given))},
            allowed={"layers": len(wanted), "heads, head_size": sorted(set(wanted))},
        )
    dtype = memory.layers[0].dtype
    if tensors.dtype != dtype:
        raise ConfigError(
            "KV tensors of another dtype", given=str(tensors.dtype), allowed=str(dtype)
        )
