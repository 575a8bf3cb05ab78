"""What a plan must do, by loops over every layer, KV head and token; and random pairs of layouts.

Nothing here uses the arithmetic of a plan: where a token lies is worked out from the rules
as they are written in docs/layouts.md. Layouts must name their stages.
"""

from itertools import product
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.unit.proto.token_positions import destination_tokens, positions, source_tokens

from kvferry.proto.layout import Layout
from kvferry.proto.memory_order import AXES, strides_of
from kvferry.proto.placement import KvShape, holdings
from kvferry.proto.reshard import plan_reshard

Array = npt.NDArray[np.int64]
Parts = list[tuple[range, range, int]]
"""Layers (of the group), heads and token shard of each rank."""

MAX_TOKENS = 40


def parts_of_ranks(layout: Layout, shape: KvShape) -> Parts:
    """Return what each rank holds, by counting the axes up as the rank numbers do."""
    tp, dcp, pcp = layout.tp, layout.dcp, layout.pcp
    is_grid, is_old = layout.kind == "grid", layout.profile == "0.17"
    parts = []
    for stage, pcp_rank, dcp_rank, tp_rank in product(
        range(layout.pp), range(pcp), range(dcp if is_grid else 1), range(tp)
    ):
        if is_grid:
            shard, head_shard, num_head_shards = pcp_rank * dcp + dcp_rank, tp_rank, tp
        elif is_old:
            shard = pcp_rank * dcp + tp_rank % dcp
            head_shard, num_head_shards = tp_rank // dcp, tp // dcp
        elif pcp == 1:
            shard, head_shard, num_head_shards = tp_rank % dcp, tp_rank // dcp, tp // dcp
        elif dcp == 1:
            shard, head_shard, num_head_shards = 0, tp_rank, tp
        elif dcp == pcp:
            shard, head_shard, num_head_shards = pcp_rank, tp_rank, tp
        else:
            shard, head_shard, num_head_shards = pcp_rank * tp + tp_rank, 0, 1
        heads = [
            head
            for head in range(shape.num_kv_heads)
            if head * num_head_shards // shape.num_kv_heads == head_shard
            or head == head_shard * shape.num_kv_heads // num_head_shards
        ]
        layers = [
            index
            for index, layer in enumerate(shape.layers)
            if sum(layout.stage_layers[:stage]) <= layer < sum(layout.stage_layers[: stage + 1])
        ]
        parts.append((_range(layers), _range(heads), shard))
    return parts


def _range(numbers: list[int]) -> range:
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)


class Memories:
    """The memory of each rank as one array, whatever its strides; a value is a number."""

    def __init__(self, layout: Layout, shape: KvShape, table: list[int]) -> None:
        self.layout, self.shape, self.table = layout, shape, np.array(table)
        self.parts = parts_of_ranks(layout, shape)
        self.num_blocks = max(table, default=0) + 1
        self.strides = []
        self.arrays: list[Array] = []
        for layers, heads, _ in self.parts:
            sizes: dict[str, int] = {
                "num_layers": len(layers),
                "num_sides": shape.num_sides,
                "num_blocks": self.num_blocks,
                "block_tokens": layout.block_tokens,
                "num_heads": len(heads),
            }
            self.strides.append(strides_of(layout.memory, head_bytes=1, **sizes))
            self.arrays.append(np.zeros(int(np.prod(list(sizes.values()))), dtype=np.int64))

    def place(self, rank: int, *, layer: Any, side: Any, head: Any, block: Any, token: Any) -> Any:
        """Return the index in the rank's array; layer and head are the rank's own."""
        strides = self.strides[rank]
        if strides.layer_step is None:
            layer_step = len(self.arrays[rank]) // max(1, len(self.parts[rank][0]))
        else:
            layer_step = strides.layer_step
        return (
            layer * layer_step
            + side * strides.side_step
            + block * strides.block_step
            + token * strides.token_step
            + head * strides.head_step
        )

    def fill(self, dense: Array, start: int, end: int) -> None:
        """Write the positions [start, end) of `dense` [layers, sides, heads, tokens]."""
        size, spread = self.layout.block_tokens, self.layout.interleave
        num_shards = 1 + max(shard for _, _, shard in self.parts)
        for rank, (layers, heads, shard) in enumerate(self.parts):
            for position in range(start, end):
                number, within = divmod(position, size * num_shards)
                if within // spread % num_shards != shard:
                    continue
                token = within // (num_shards * spread) * spread + within % spread
                block = int(self.table[number])
                for layer, head in product(layers, heads):
                    for side in range(self.shape.num_sides):
                        at = self.place(
                            rank,
                            layer=layer - layers.start,
                            side=side,
                            head=head - heads.start,
                            block=block,
                            token=token,
                        )
                        self.arrays[rank][at] = dense[layer, side, head, position]

    def places(self, rank: int, layers: range, heads: range, local: Array) -> Array:
        """Return the indices of local tokens, as [layers, sides, heads, tokens]."""
        mine, mine_heads, _ = self.parts[rank]
        found: Array = self.place(
            rank,
            layer=(np.array(layers) - mine.start)[:, None, None, None],
            side=np.arange(self.shape.num_sides)[None, :, None, None],
            head=(np.array(heads) - mine_heads.start)[None, None, :, None],
            block=self.table[local // self.layout.block_tokens],
            token=local % self.layout.block_tokens,
        )
        return found


def check_pair(source: Layout, destination: Layout, shape: KvShape, start: int, end: int) -> None:
    """Move the range by the plan and compare every destination rank with the loops above."""
    tokens = max(end, 1)
    size = (len(shape.layers), shape.num_sides, shape.num_kv_heads, tokens)
    dense = np.arange(1, 1 + int(np.prod(size)), dtype=np.int64).reshape(size)
    tables = [_table(layout, tokens) for layout in (source, destination)]
    sender = Memories(source, shape, tables[0])
    taker, wanted = (Memories(destination, shape, tables[1]) for _ in range(2))
    for memories, layout in ((sender, source), (taker, destination)):
        held = holdings(layout, shape)
        assert [(len(one.layers), one.heads, one.token_shard) for one in held] == [
            (len(layers), heads, shard) for layers, heads, shard in memories.parts
        ]
    sender.fill(dense, start, end)
    wanted.fill(dense, start, end)
    writes = [np.zeros_like(array) for array in taker.arrays]
    plan = plan_reshard(source, destination, shape, start=start, end=end)
    for transfer in plan.transfers:
        num_values = 0
        for runs in transfer.runs:
            where = (transfer.layers, transfer.heads)
            read = sender.places(transfer.src_rank, *where, source_tokens(runs))
            write = taker.places(transfer.dst_rank, *where, destination_tokens(runs))
            taker.arrays[transfer.dst_rank][write] = sender.arrays[transfer.src_rank][read]
            np.add.at(writes[transfer.dst_rank], write, 1)
            num_values += write.size
            assert len(positions(runs)) == runs.num_tokens
        assert transfer.num_bytes == num_values * shape.head_bytes > 0
    for rank, array in enumerate(wanted.arrays):
        assert np.array_equal(taker.arrays[rank], array), f"rank {rank}"
        assert np.array_equal(writes[rank], array > 0), f"rank {rank} not written once"


def _table(layout: Layout, tokens: int) -> list[int]:
    count = -(-tokens // layout.virtual_block_tokens)
    ids = list(range(1, count + 3))
    Random(count).shuffle(ids)
    return ids[:count]


def random_pair(random: Random) -> tuple[Layout, Layout, KvShape, int, int]:
    """Return two layouts of one model and a range of positions."""
    num_layers = random.randint(4, 6)
    mla = random.random() < 0.2
    group = sorted(random.sample(range(num_layers), random.randint(1, num_layers)))
    while True:
        shape = KvShape(
            num_layers=num_layers,
            num_kv_heads=1 if mla else random.choice([1, 2, 3, 4, 8]),
            head_size=random.randint(1, 4),
            dtype=random.choice(["float32", "bfloat16"]),
            mla=mla,
            group_layers=tuple(group) if random.random() < 0.3 else (),
        )
        layouts = [_random_layout(random, num_layers, shape.num_kv_heads) for _ in range(2)]
        if None not in layouts:
            break
    source, destination = (layout for layout in layouts if layout is not None)
    start = random.choice([0, random.randint(0, MAX_TOKENS)])
    end = min(start + random.randint(0, MAX_TOKENS), MAX_TOKENS)
    return source, destination, shape, min(start, end), end


def _random_layout(random: Random, num_layers: int, num_heads: int) -> Layout | None:
    interleave = random.randint(1, 4)
    pp = random.randint(1, 4)
    cuts = sorted(random.sample(range(1, num_layers), pp - 1))
    kind = random.choice(["grid", "vllm"])
    settings: dict[str, Any] = {
        "block_tokens": interleave * random.randint(1, 4),
        "kind": kind,
        "tp": random.randint(1, 8),
        "pp": pp,
        "pcp": random.randint(1, 4),
        "dcp": random.randint(1, 4),
        "interleave": interleave,
        "profile": random.choice(["0.17", "0.32"]) if kind == "vllm" else "0.32",
        "stage_layers": tuple(np.diff([0, *cuts, num_layers]).tolist()),
        "memory": "".join(random.sample(AXES, len(AXES))),
    }
    try:
        layout = Layout(**settings)
        layout.heads(num_heads)
    except ValueError:
        return None
    return layout
