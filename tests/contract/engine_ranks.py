"""A service with one node, and engines whose paged tensors lie as vLLM has them, without vLLM."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from tests.builders import make_identity

from kvferry.cluster.connectors.engine_store import EngineStore
from kvferry.cluster.connectors.facts import EngineFacts, travelling_layout
from kvferry.cluster.connectors.orders import (
    EngineBlocks,
    HeldPrefix,
    LoadOrder,
    SaveOrder,
    StepOrders,
)
from kvferry.cluster.connectors.paged_tensors import (
    PagedLayer,
    PagedTensors,
    of_accelerator,
    of_cpu,
)
from kvferry.cluster.connectors.rank_link import RankLink
from kvferry.cluster.connectors.worker_half import WorkerHalf
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_config import NodeConfig
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import BlockHash, Incarnation
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Locate, Located
from kvferry.proto.step_messages import Source

HASH_BLOCK_TOKENS = 16
NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 3, 4, 8
NUM_BLOCKS = 20
IDENTITY = make_identity(num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE)
TIMEOUT_S = 20.0

ORDERS = ("blocks of heads", "keys and values first", "keys and values in each block", "cpu")


@dataclass
class Service:
    """One coordinator, one node."""

    coordinator: CoordinatorActor
    node: StoreNode
    address: str

    def holders(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        command = Locate(identity_digest=IDENTITY.digest(), hashes=tuple(hashes))
        located = self.coordinator.call(command)
        assert isinstance(located, Located)
        return {one.source.instance_id: one.num_hashes for one in located.holders}

    def wait_stored(self, hashes: Sequence[BlockHash]) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while list(self.holders(hashes).values()) != [len(hashes)]:
            assert time.monotonic() < end_s, self.holders(hashes)
            time.sleep(0.005)

    def holder(self, hashes: Sequence[BlockHash]) -> HeldPrefix:
        command = Locate(identity_digest=IDENTITY.digest(), hashes=tuple(hashes))
        located = self.coordinator.call(command)
        assert isinstance(located, Located)
        (one,) = located.holders
        return HeldPrefix(source=one.source, num_blocks=one.num_hashes)


@contextlib.contextmanager
def running_service(*, num_blocks: int = 100) -> Iterator[Service]:
    scheme = make_scheme(hash_block_tokens=HASH_BLOCK_TOKENS)
    coordinator = CoordinatorActor(scheme=scheme, registry=ProcessRegistry(), check_invariants=True)
    coordinator.start(lambda call: ControlServer(call, bind="127.0.0.1", port=0, insecure=False))
    config = NodeConfig(
        host="127.0.0.1",
        coordinator=str(coordinator.front_address()),
        store_bytes=num_blocks * IDENTITY.block_bytes(HASH_BLOCK_TOKENS),
        port=0,
    )
    node = StoreNode(config)
    try:
        yield Service(coordinator, node, node.start())
    finally:
        node.stop()
        coordinator.stop()


@dataclass
class Rank:
    """A rank's half, and its tensors as the engine sees them."""

    half: WorkerHalf
    tensors: list[torch.Tensor]
    layers: list[PagedLayer]


@dataclass
class StandIn:
    """An engine of several ranks, with a memory that holds a prompt, or nothing."""

    facts: EngineFacts
    engine: Layout
    store: EngineStore
    order: str
    ranks: list[Rank] = field(default_factory=list)

    @property
    def source(self) -> Source:
        return Source(
            instance_id=self.facts.instance_id,
            incarnation=self.facts.incarnation,
            layout=self.facts.layout,
            rank_addresses=tuple(rank.half.link.address for rank in self.ranks),
        )

    def blocks(self, num_tokens: int, *, first_id: int = 3) -> EngineBlocks:
        """Blocks for a prompt, not in order."""
        count = -(-num_tokens // self.facts.engine_block_tokens)
        return EngineBlocks(first=0, ids=tuple(first_id + count - 1 - i for i in range(count)))

    def fill(self, dense: torch.Tensor, blocks: EngineBlocks) -> None:
        """Write a prompt's KV [layers, 2, tokens, heads, head_size], on each rank its part."""
        for number, rank in enumerate(self.ranks):
            for (layer, heads, positions), sides in zip(
                self.parts(number, dense.shape[2]), rank.layers, strict=True
            ):
                for local, position in enumerate(positions):
                    block, offset = divmod(local, self.engine.block_tokens)
                    for side, given in zip(sides, dense[layer, :, position], strict=True):
                        side[blocks.ids[block], offset] = given[heads]

    def holds(self, dense: torch.Tensor, blocks: EngineBlocks, num_tokens: int) -> bool:
        """Return whether every rank has its part of the first tokens."""
        for number, rank in enumerate(self.ranks):
            for (layer, heads, positions), sides in zip(
                self.parts(number, num_tokens), rank.layers, strict=True
            ):
                for local, position in enumerate(positions):
                    block, offset = divmod(local, self.engine.block_tokens)
                    for side, given in zip(sides, dense[layer, :, position], strict=True):
                        if not torch.equal(side[blocks.ids[block], offset], given[heads]):
                            return False
        return True

    def parts(self, rank: int, num_tokens: int) -> list[tuple[int, slice, list[int]]]:
        """Return, per layer of a rank, its heads and the positions it has, in order."""
        place = self.engine.place(rank)
        heads = self.engine.heads(NUM_HEADS)[place.head_shard]
        shards, step = self.engine.token_shards, self.engine.interleave
        positions = [p for p in range(num_tokens) if p // step % shards == place.token_shard]
        return [
            (layer, slice(heads.start, heads.stop), positions)
            for layer in self.engine.stages(NUM_LAYERS)[place.stage]
        ]

    def save(
        self, hashes: Sequence[BlockHash], blocks: EngineBlocks, *, first_block: int = 0
    ) -> None:
        """Have all ranks save, and wait until they have."""
        orders = StepOrders(
            saves=(
                SaveOrder(
                    request_id="r",
                    first_block=first_block,
                    hashes=tuple(hashes),
                    blocks=blocks,
                ),
            ),
            held=frozenset({"r"}),
            engine=self.source,
            store_address=self.store.store_address,
            is_idle=True,
        )
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            list(threads.map(lambda rank: _run(rank.half, orders, "r", saved=True), self.ranks))

    def load(
        self,
        chain: Sequence[BlockHash],
        num_tokens: int,
        blocks: EngineBlocks,
        *holders: HeldPrefix,
        first_block: int = 0,
    ) -> set[int]:
        """Have all ranks load, and return the blocks that have not got their content."""
        orders = StepOrders(
            loads=(
                LoadOrder(
                    request_id="r",
                    first_block=first_block,
                    end_block=num_tokens // HASH_BLOCK_TOKENS,
                    chain=tuple(chain),
                    blocks=blocks,
                    holders=holders,
                ),
            ),
            is_idle=True,
        )
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            failed = threads.map(lambda rank: _run(rank.half, orders, "r", saved=False), self.ranks)
            return set().union(*failed)

    def close(self) -> None:
        for rank in self.ranks:
            rank.half.stop()
        self.store.close()


def _run(half: WorkerHalf, orders: StepOrders, request_id: str, *, saved: bool) -> set[int]:
    """Run steps until the request is reported, once, and return the failed blocks."""
    half.begin(orders)
    half.start_loads(orders)
    half.end(orders)
    idle = StepOrders(is_idle=True)
    for _ in range(int(TIMEOUT_S / 0.02)):
        sent, received = half.finished(idle)
        if request_id in (sent if saved else received):
            return half.failed_blocks()
    raise AssertionError("the request was never reported")


@contextlib.contextmanager
def running_engine(
    service: Service,
    engine: Layout,
    *,
    name: str,
    order: str = ORDERS[0],
    staging_bytes: int = 1 << 20,
) -> Iterator[StandIn]:
    """An engine of such a layout; its blocks hold noise."""
    store = EngineStore(service.address, timeout_s=TIMEOUT_S, credentials=None)
    facts = EngineFacts(
        engine_id=name,
        incarnation=Incarnation(7),
        identity=IDENTITY,
        scheme=store.scheme,
        layout=travelling_layout(engine, HASH_BLOCK_TOKENS),
        engine_block_tokens=engine.virtual_block_tokens,
        version="a stand-in",
    )
    store.attach(IDENTITY, facts.info)
    stand_in = StandIn(facts, engine, store, order)
    try:
        for rank in range(engine.num_ranks):
            stand_in.ranks.append(_rank(stand_in, rank, staging_bytes))
        yield stand_in
    finally:
        stand_in.close()


def _rank(engine: StandIn, rank: int, staging_bytes: int) -> Rank:
    place = engine.engine.place(rank)
    num_heads = len(engine.engine.heads(NUM_HEADS)[place.head_shard])
    num_layers = len(engine.engine.stages(NUM_LAYERS)[place.stage])
    shape = {
        ORDERS[0]: (NUM_BLOCKS, num_heads, engine.engine.block_tokens, 2 * HEAD_SIZE),
        ORDERS[1]: (2, NUM_BLOCKS, engine.engine.block_tokens, num_heads, HEAD_SIZE),
        ORDERS[3]: (NUM_BLOCKS, num_heads, engine.engine.block_tokens, 2 * HEAD_SIZE),
        ORDERS[2]: (NUM_BLOCKS, 2, engine.engine.block_tokens, num_heads, HEAD_SIZE),
    }[engine.order]
    tensors = [torch.randn(shape) for _ in range(num_layers)]
    layers = [
        (of_cpu if engine.order == "cpu" else of_accelerator)(
            tensor,
            block_tokens=engine.engine.block_tokens,
            num_heads=num_heads,
            head_size=HEAD_SIZE,
        )
        for tensor in tensors
    ]
    link = RankLink(
        engine.facts,
        rank,
        PagedTensors(layers),
        staging_bytes=staging_bytes,
        bind="127.0.0.1",
        insecure=False,
        credentials=None,
    )
    return Rank(
        WorkerHalf(link, engine.store, load_timeout_s=TIMEOUT_S),
        tensors,
        layers,
    )


def prompt(num_tokens: int, seed: int = 0) -> tuple[tuple[BlockHash, ...], torch.Tensor]:
    """Return a prompt's hashes and its KV [layers, 2, tokens, heads, head_size]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1000, (num_tokens,), generator=generator)
    dense = torch.randn(NUM_LAYERS, 2, num_tokens, NUM_HEADS, HEAD_SIZE, generator=generator)
    return hash_tokens(make_scheme(hash_block_tokens=HASH_BLOCK_TOKENS), tokens), dense
