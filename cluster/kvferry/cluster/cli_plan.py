"""`kvferry plan`: options, and what is printed where."""

import json
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from kvferry.cluster.planning.model_shapes import (
    DEFAULT_DTYPE,
    GroupToMove,
    groups_of_model,
    one_full_group,
)
from kvferry.cluster.planning.report import print_plans, to_json
from kvferry.cluster.progress import stderr_progress
from kvferry.proto.errors import ConfigError
from kvferry.proto.layout import Layout
from kvferry.proto.layout_text import layout_text, parse_layout
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import plan_reshard
from kvferry.proto.vllm_rules import require_copies_for_dcp, require_dealable_kinds

TABLE_COLUMNS = 100
MAX_TOKENS = 1 << 40
MAX_RANKS = 1 << 12
MAX_LAYERS = 1 << 16
EXAMPLES = """
Examples:

kvferry plan --from pcp=2 --to dcp=2,interleave=4 --tokens 4096 --layers 24 --kv-heads 8 --head-size 128

kvferry plan --from kind=vllm,tp=4 --to kind=vllm,tp=2,block_tokens=32 --tokens 4096 --model FOLDER

kvferry plan --from tp=1 --to tp=2 --tokens 100000 --model FOLDER --json > plan.json
"""  # noqa: E501  (an example is one command)

From = Annotated[
    str,
    typer.Option("--from", help="Layout that holds the tokens, e.g. pcp=2,dcp=2,interleave=4."),
]
To = Annotated[str, typer.Option("--to", help="Layout that shall hold them.")]
Tokens = Annotated[int, typer.Option(help="Tokens of the prefix to move.")]
Layers = Annotated[int | None, typer.Option(help="Layers of the model.")]
KvHeads = Annotated[int | None, typer.Option(help="KV heads of the model.")]
HeadSize = Annotated[int | None, typer.Option(help="Values of one head.")]
Dtype = Annotated[
    str | None, typer.Option(help="Of the KV cache; by default the model's own, or bfloat16.")
]
Model = Annotated[
    str | None,
    typer.Option(help="Model folder or hub id to read layers, heads and windows from."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def plan(
    *,
    source: From,
    destination: To,
    tokens: Tokens,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_size: HeadSize = None,
    dtype: Dtype = None,
    model: Model = None,
    as_json: AsJson = False,
) -> int:
    """Show what moves when cached tokens go from one layout to another. Nothing is moved.

    A layout is name=value, separated by commas: kind (grid, vllm), tp, pp, pcp, dcp, interleave,
    block_tokens, profile, stage_layers, memory; what is left out has its default.
    """
    layouts = (parse_layout(source), parse_layout(destination))
    _require_bounded("--tokens", tokens, MAX_TOKENS)
    for layout in layouts:
        _require_bounded("ranks of a layout", layout.num_ranks, MAX_RANKS)
    if layers is not None:
        _require_bounded("--layers", layers, MAX_LAYERS)
    numbers = {"--layers": layers, "--kv-heads": kv_heads, "--head-size": head_size}
    groups = _groups(numbers, dtype, model)
    _check_vllm(layouts, groups)
    started = time.perf_counter()
    plans = [
        plan_reshard(
            *layouts,
            group.shape,
            start=group.first_position(tokens, layouts[1].virtual_block_tokens),
            end=tokens,
        )
        for group in groups
    ]
    plan_ms = (time.perf_counter() - started) * 1e3
    if as_json:
        print(json.dumps(to_json(plans, plan_ms)))
    else:
        out = Console(file=sys.stdout, highlight=False)
        out.width = max(out.width, TABLE_COLUMNS)
        print_plans(plans, plan_ms, out)
    return 0


def _require_bounded(name: str, value: int, at_most: int) -> None:
    if not 1 <= value <= at_most:
        raise ConfigError(f"{name} out of range", given=value, allowed=f"1 to {at_most}")


def _groups(
    numbers: dict[str, int | None], dtype: str | None, model: str | None
) -> list[GroupToMove]:
    given = {name: number for name, number in numbers.items() if number is not None}
    if model is not None:
        if given:
            raise ConfigError(
                "--model says these already", given=list(given), allowed="--model or the numbers"
            )
        return groups_of_model(model, dtype)
    if len(given) < len(numbers):
        raise ConfigError(
            "a plan needs the sizes of the model",
            given=list(given),
            allowed=f"--model, or all of {', '.join(numbers)}",
        )
    return one_full_group(
        KvShape(
            num_layers=given["--layers"],
            num_kv_heads=given["--kv-heads"],
            head_size=given["--head-size"],
            dtype=dtype or DEFAULT_DTYPE,
        )
    )


def _check_vllm(layouts: tuple[Layout, Layout], groups: list[GroupToMove]) -> None:
    shapes = [group.shape for group in groups]
    for layout in layouts:
        require_dealable_kinds(layout, shapes)
        try:
            require_copies_for_dcp(layout, shapes)
        except ConfigError as error:
            # Where its tokens would lie is clear all the same, so it can be planned.
            stderr_progress()(f"note: vLLM would not start {layout_text(layout)}: {error}")
