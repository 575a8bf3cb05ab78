"""The plan that moves cached tokens from one layout to another: who pulls what from whom.

Pure: a plan knows no tensors, addresses or block ids. A worker turns a transfer into copies with
its own block table; docs/layouts.md shows how.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.layout import Layout
from kvferry.proto.placement import Holding, KvShape, holdings
from kvferry.proto.token_runs import TokenRuns, shared_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one destination rank pulls from one source rank.

    These layers (counted within the group) and these KV heads, both half-open ranges over the whole
    model, of the tokens of all `runs`, keys and values. On each rank layer l is its layer
    `l - holding.layers.start`, and head h its head `h - holding.heads.start`.
    """

    dst_rank: int
    src_rank: int
    layers: range
    heads: range
    runs: tuple[TokenRuns, ...]
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All transfers that fill the positions [start, end) of every destination rank, each byte once.

    Transfers are ordered by destination rank, then by source rank.
    """

    source: Layout
    destination: Layout
    shape: KvShape
    start: int
    end: int
    transfers: tuple[Transfer, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return sum(transfer.num_bytes for transfer in self.transfers)

    @property
    def waste_bytes(self) -> int:
        """Bytes that move beyond one copy of the content, for destination ranks that replicate."""
        heads = len(self.shape.layers) * self.shape.num_sides * self.shape.num_kv_heads
        return self.num_bytes - (self.end - self.start) * heads * self.shape.head_bytes


def plan_reshard(
    source: Layout, destination: Layout, shape: KvShape, *, start: int, end: int
) -> Plan:
    """Return the plan for positions [start, end) of one sequence, in the layers of one group.

    Of several source ranks that hold the same, a destination rank pulls from the one of its own
    number, else from the one that has least to send so far, else from the lowest.

    Raises:
        BadInputError: no range of positions.
        ConfigError: a layout that cannot hold this model, or layers with a recurrent state, of
            which a token has no part.
    """
    if shape.group_kind == "mamba":
        raise ConfigError(
            "a recurrent state is not made of tokens that could be dealt anew",
            given=shape.group_kind,
            allowed="groups with keys and values",
        )
    if not 0 <= start <= end:
        raise BadInputError(
            "no range of positions", given=f"[{start}, {end})", allowed="0 <= start <= end"
        )
    runs = shared_runs(source, destination, start, end)
    token_counts = {pair: sum(box.num_tokens for box in boxes) for pair, boxes in runs.items()}
    senders = _Senders(source, shape)
    cell_bytes = shape.num_sides * shape.head_bytes
    transfers: list[Transfer] = []
    for taker in holdings(destination, shape):
        pairs = [pair for pair in runs if pair[1] == taker.token_shard]
        pulled = []
        for layers, heads, ranks_of_shard in senders.overlapping(taker):
            for pair in pairs:
                num_bytes = token_counts[pair] * len(layers) * len(heads) * cell_bytes
                src_rank = senders.choose(ranks_of_shard[pair[0]], taker.rank, num_bytes)
                pulled.append(
                    Transfer(
                        dst_rank=taker.rank,
                        src_rank=src_rank,
                        layers=layers,
                        heads=heads,
                        runs=runs[pair],
                        num_tokens=token_counts[pair],
                        num_bytes=num_bytes,
                    )
                )
        transfers += sorted(pulled, key=lambda transfer: transfer.src_rank)
    return Plan(
        source=source,
        destination=destination,
        shape=shape,
        start=start,
        end=end,
        transfers=tuple(transfers),
    )


class _Senders:
    """The source ranks by what they hold, and what each has to send so far."""

    def __init__(self, source: Layout, shape: KvShape) -> None:
        # Layers and heads that ranks hold alike -> token shard -> those ranks.
        self._regions: dict[tuple[range, range], dict[int, list[int]]] = {}
        for held in holdings(source, shape):
            region = self._regions.setdefault((held.layers, held.heads), {})
            region.setdefault(held.token_shard, []).append(held.rank)
        self._sent_bytes = [0] * source.num_ranks

    def overlapping(self, taker: Holding) -> Iterator[tuple[range, range, dict[int, list[int]]]]:
        """Yield layers, heads and ranks by token shard of all that the taker needs a part of."""
        for (layers, heads), ranks_of_shard in self._regions.items():
            shared_layers = _common(layers, taker.layers)
            shared_heads = _common(heads, taker.heads)
            if shared_layers and shared_heads:
                yield shared_layers, shared_heads, ranks_of_shard

    def choose(self, replicas: list[int], dst_rank: int, num_bytes: int) -> int:
        """Return the replica that shall send so many bytes."""
        if dst_rank in replicas:
            chosen = dst_rank
        else:
            chosen = min(replicas, key=lambda rank: (self._sent_bytes[rank], rank))
        self._sent_bytes[chosen] += num_bytes
        return chosen


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
