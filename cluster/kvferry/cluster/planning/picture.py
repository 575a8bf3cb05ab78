"""A picture of a layout in characters: which rank holds which tokens."""

import math

from kvferry.proto.layout import Layout
from kvferry.proto.placement import KvShape, holdings

MAX_COLUMNS = 64
MAX_LINES = 32
HELD, ELSEWHERE, BLOCK_EDGE = "#", ".", "|"


def picture(
    layout: Layout, shape: KvShape, source: Layout, destination: Layout, num_tokens: int
) -> str:
    """Return one line per set of ranks that hold the same, one column per few tokens.

    A column is as many tokens as neither `source` nor `destination` cuts, so that their pictures
    stand one above the other; a bar stands where a (virtual) block of `layout` ends.
    """
    column_tokens = math.gcd(_uncut_tokens(source), _uncut_tokens(destination))
    num_columns = min(MAX_COLUMNS, -(-num_tokens // column_tokens))
    alike: dict[tuple[range, range, int], list[int]] = {}
    for one in holdings(layout, shape):
        alike.setdefault((one.layers, one.heads, one.token_shard), []).append(one.rank)
    names = [_ranks(ranks) for ranks in alike.values()]
    width = max(len("rank"), *map(len, names))
    lines = [
        f"  {'rank':>{width}}  layers  heads  tokens 0-{num_columns * column_tokens - 1},"
        f" {column_tokens} a column"
    ]
    for name, (layers, heads, shard) in zip(names, alike, strict=True):
        marks = "".join(
            _mark(layout, shard, column * column_tokens, column_tokens)
            for column in range(num_columns)
        )
        lines.append(f"  {name:>{width}}  {_span(layers):>6}  {_span(heads):>5}  {marks}")
    if len(lines) > MAX_LINES:
        left_out = len(lines) - MAX_LINES
        lines = [*lines[:MAX_LINES], f"  ... and {left_out} lines more"]
    return "\n".join(lines)


def _uncut_tokens(layout: Layout) -> int:
    """Return how many consecutive tokens always lie on one rank and in one block."""
    return layout.interleave if layout.token_shards > 1 else layout.block_tokens


def _mark(layout: Layout, shard: int, position: int, num_tokens: int) -> str:
    owner = position // layout.interleave % layout.token_shards
    ends = (position + num_tokens) % layout.virtual_block_tokens == 0
    return (HELD if owner == shard else ELSEWHERE) + (BLOCK_EDGE if ends else "")


def _span(numbers: range) -> str:
    return f"{numbers.start}-{numbers.stop - 1}" if numbers else "none"


def _ranks(ranks: list[int]) -> str:
    return ",".join(map(str, ranks))
