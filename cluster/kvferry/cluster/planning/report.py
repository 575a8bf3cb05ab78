"""What `kvferry plan` prints: one JSON object, or a table and pictures of both layouts."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.cluster.planning.picture import picture
from kvferry.proto.layout_text import layout_text
from kvferry.proto.reshard import Plan, Transfer


def to_json(plans: Sequence[Plan], plan_ms: float) -> dict[str, Any]:
    """Return the object that `kvferry plan --json` prints.

    `transfers` has one entry per destination and source rank: `bytes`, and `slices`, each with its
    group, layers (of the model) and heads, and where its tokens lie on both ranks.
    """
    by_ranks: dict[tuple[int, int], dict[str, Any]] = {}
    for group_id, plan in enumerate(plans):
        for transfer in plan.transfers:
            ranks = {"dst_rank": transfer.dst_rank, "src_rank": transfer.src_rank}
            entry = by_ranks.setdefault(
                (transfer.dst_rank, transfer.src_rank), {**ranks, "bytes": 0, "slices": []}
            )
            entry["bytes"] += transfer.num_bytes
            entry["slices"] += _slices(group_id, plan, transfer)
    return {
        "transfers": [by_ranks[ranks] for ranks in sorted(by_ranks)],
        "bytes": sum(plan.num_bytes for plan in plans),
        "waste_bytes": sum(plan.waste_bytes for plan in plans),
        "plan_ms": plan_ms,
    }


def _slices(group_id: int, plan: Plan, transfer: Transfer) -> list[dict[str, Any]]:
    layers = [plan.shape.layers[layer] for layer in transfer.layers]
    return [
        {
            "group": group_id,
            "layers": layers,
            "heads": [transfer.heads.start, transfer.heads.stop],
            "first_token": runs.first,
            "src_first": runs.source_first,
            "dst_first": runs.destination_first,
            "run_tokens": runs.run_tokens,
            "num_tokens": runs.num_tokens,
            "loops": [
                {
                    "count": loop.count,
                    "token_step": loop.step,
                    "src_step": loop.source_step,
                    "dst_step": loop.destination_step,
                }
                for loop in runs.loops
            ],
        }
        for runs in transfer.runs
    ]


def print_plans(plans: Sequence[Plan], plan_ms: float, console: Console) -> None:
    """Print both layouts as pictures, one line per transfer, and the sums."""
    source, destination, shape = plans[0].source, plans[0].destination, plans[0].shape
    for name, layout in (("from", source), ("to", destination)):
        console.print(f"{name}: {layout.kind} {layout_text(layout)}")
        console.print(picture(layout, shape, source, destination, plans[0].end), markup=False)
    table = Table(box=SIMPLE_HEAD)
    for heading in ("to rank", "from rank", "group", "layers", "heads", "tokens", "slices", "runs"):
        table.add_column(heading, justify="right")
    table.add_column("bytes", justify="right")
    for group_id, plan in enumerate(plans):
        for transfer in plan.transfers:
            table.add_row(
                str(transfer.dst_rank),
                str(transfer.src_rank),
                str(group_id),
                f"{len(transfer.layers)}",
                f"{transfer.heads.start}-{transfer.heads.stop - 1}",
                f"{transfer.num_tokens:,}",
                str(len(transfer.runs)),
                f"{sum(runs.num_runs for runs in transfer.runs):,}",
                f"{transfer.num_bytes:,}",
            )
    console.print(table)
    moved, waste = (sum(getattr(plan, n) for plan in plans) for n in ("num_bytes", "waste_bytes"))
    console.print(
        f"{moved:,} bytes move, {waste:,} of them beyond one copy (ranks that hold the same);"
        f" planned in {plan_ms:.1f} ms"
    )
