"""What the demo prints: one JSON object, or a table and a summary."""

from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.cluster.demo.conversation import Turn
from kvferry.cluster.demo.overlap import Handover, OverlapTimings
from kvferry.cluster.demo.serve import ExtraTimings
from kvferry.cluster.serving.router import Served
from kvferry.proto.layout_text import layout_text
from kvferry.proto.messages import InstanceInfo
from kvferry.worker.model.reference import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything a demo run has shown."""

    instances: tuple[InstanceInfo, ...]
    metrics_address: str | None
    turns: tuple[Turn, ...]
    served: tuple[Served, ...]
    comparisons: tuple[Comparison, ...]
    extra: ExtraTimings | None
    overlap: OverlapTimings | None
    min_num_blocks: int

    @property
    def num_equal(self) -> int:
        """Requests whose output the reference agrees with."""
        return sum(comparison.equal for comparison in self.comparisons)

    @property
    def ok(self) -> bool:
        """All outputs equal, and every prompt token accounted for."""
        adds_up = all(served.accounting.adds_up for served in self.served)
        return self.num_equal == len(self.served) and adds_up


def to_json(result: DemoResult) -> dict[str, Any]:
    """Return the object that `kvferry demo --json` prints."""
    return {
        "instances": [
            {
                "id": info.instance_id,
                "role": info.role,
                "layout": layout_text(info.layout),
                "num_blocks": info.num_blocks,
                "block_bytes": info.identity.block_bytes(info.layout.block_tokens),
                "max_model_len": info.max_model_len,
                "ranks": [
                    {"rank": rank, "pid": pid, "metrics_address": metrics_address}
                    for rank, (pid, metrics_address) in enumerate(
                        zip_longest(info.rank_pids, info.rank_metrics)
                    )
                ],
            }
            for info in result.instances
        ],
        "metrics_address": result.metrics_address,
        "requests": [
            _request(turn, served, comparison)
            for turn, served, comparison in zip(
                result.turns, result.served, result.comparisons, strict=True
            )
        ],
        "summary": summary(result),
    }


def summary(result: DemoResult) -> dict[str, Any]:
    """Return the run in a few numbers; times in seconds, None where they could not be taken."""
    extra, overlap = result.extra, result.overlap
    return {
        "equal": result.num_equal,
        "total": len(result.served),
        "near_ties": sum(comparison.near_ties for comparison in result.comparisons),
        "remote_hit_tokens": sum(s.accounting.remote_hit_tokens for s in result.served),
        "pulled_bytes": sum(s.pulled_bytes for s in result.served),
        "preemptions": sum(s.preemptions for s in result.served),
        "min_num_blocks": result.min_num_blocks,
        "ttft_pulled_s": round(extra.pulled_s, 4) if extra else None,
        "ttft_recomputed_s": round(extra.recomputed_s, 4) if extra else None,
        "ttft_ratio": round(extra.ratio, 4) if extra else None,
        **_handovers("in_turn", overlap.in_turn if overlap else ()),
        **_handovers("overlapped", overlap.overlapped if overlap else ()),
        "overlap_ahead_tokens": overlap.ahead_tokens if overlap else None,
        "overlap_saved_s": round(overlap.saved_s, 4) if overlap else None,
    }


def _handovers(name: str, handovers: tuple[Handover, ...]) -> dict[str, Any]:
    """Return the medians of prompts that were handed over one way."""
    values = {
        f"ttft_{name}_s": [handover.ttft_s for handover in handovers],
        f"after_prefill_{name}_s": [handover.after_prefill_s for handover in handovers],
    }
    return {key: round(median(of), 4) if of else None for key, of in values.items()}


def _request(turn: Turn, served: Served, comparison: Comparison) -> dict[str, Any]:
    accounting = served.accounting
    return {
        "id": served.request.request_id,
        "session": turn.session,
        "prompt_tokens": accounting.prompt_tokens,
        "local_hit_tokens": accounting.local_hit_tokens,
        "remote_hit_tokens": accounting.remote_hit_tokens,
        "computed_tokens": accounting.computed_tokens,
        "prefill_computed_tokens": served.prefill_computed_tokens,
        "output_tokens": len(served.output_token_ids),
        "prompt_token_ids": list(served.request.prompt_token_ids),
        "output_token_ids": list(served.output_token_ids),
        "finish_reason": served.finish_reason,
        "equal": comparison.equal,
        "near_ties": comparison.near_ties,
        "ttft_s": round(served.ttft_s, 4),
        "prefill_instance": served.prefill_instance,
        "decode_instance": served.decode_instance,
        "pulled_bytes": served.pulled_bytes,
        "preemptions": served.preemptions,
    }


def print_table(result: DemoResult, console: Console) -> None:
    """Print one row per request and the summary."""
    table = Table(title="kvferry demo: where each prompt's KV came from (tokens)", box=SIMPLE_HEAD)
    for name in ("request", "session", "prefill", "decode"):
        table.add_column(name)
    for name in ("prompt", "local", "remote", "computed", "by prefill", "out", "TTFT s", "MB"):
        table.add_column(name, justify="right")
    table.add_column("equal")
    for turn, served, comparison in zip(
        result.turns, result.served, result.comparisons, strict=True
    ):
        accounting = served.accounting
        table.add_row(
            served.request.request_id,
            str(turn.session),
            served.prefill_instance or "-",
            served.decode_instance,
            str(accounting.prompt_tokens),
            str(accounting.local_hit_tokens),
            str(accounting.remote_hit_tokens),
            str(accounting.computed_tokens),
            str(served.prefill_computed_tokens),
            str(len(served.output_token_ids)),
            f"{served.ttft_s:.2f}",
            f"{served.pulled_bytes / 1e6:.1f}",
            "yes" if comparison.equal else f"NO, at {comparison.first_difference}",
        )
    console.print(table)
    for name, value in summary(result).items():
        console.print(f"{name:>26}  {value}")
