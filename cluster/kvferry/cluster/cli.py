"""The command line: parsing, exit codes and where output goes.

stdout carries results only (with `--json` exactly one object); progress and logs go to stderr.
Exit codes: 0 good; 1 the run failed or outputs differ; 2 bad input; 130 interrupted.
"""

import json
import logging
import math
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import Any

import typer

from kvferry.cluster import (
    cli_bench,
    cli_chaos,
    cli_demo,
    cli_drain,
    cli_plan,
    cli_sim,
    cli_status,
    cli_up,
)
from kvferry.proto.errors import BadInputError, KvferryError

EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="kvferry: a Ray-distributed KV-cache service for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo", epilog=cli_demo.EXAMPLES)(cli_demo.demo)
app.command("up", epilog=cli_up.UP_EXAMPLES)(cli_up.up)
app.command("down", epilog=cli_up.DOWN_EXAMPLES)(cli_up.down)
app.command("status", epilog=cli_status.EXAMPLES)(cli_status.status)
app.command("drain", epilog=cli_drain.EXAMPLES)(cli_drain.drain)
app.command("plan", epilog=cli_plan.EXAMPLES)(cli_plan.plan)
app.command("sim", epilog=cli_sim.EXAMPLES)(cli_sim.sim)
app.command("chaos", epilog=cli_chaos.EXAMPLES)(cli_chaos.chaos)
app.add_typer(cli_bench.app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvferry {version('kvferry')}")
        raise typer.Exit()


@app.callback()
def _top(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    # A shell starts background jobs with SIGINT ignored, and SIGTERM goes the same way out here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(_run(words))


def _run(words: list[str]) -> int:
    try:
        code = app(words, standalone_mode=False)
    except KvferryError as error:
        _print_error(error.to_json(), str(error), as_json="--json" in words)
        return error.exit_code
    except typer.TyperException as error:
        named = isinstance(error, typer.BadParameter)
        bad = BadInputError(error.format_message() if named else str(error))
        _print_error(bad.to_json(), str(bad), as_json="--json" in words)
        return bad.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:  # typer turns most interrupts into this code itself
        stopped = KvferryError("interrupted")
        plain = stopped.to_json() | {"type": "Interrupted"}
        _print_error(plain, str(stopped), as_json="--json" in words)
    return code if isinstance(code, int) else 0


def _print_error(plain: dict[str, Any], text: str, *, as_json: bool) -> None:
    if text:  # empty when only the help was asked for
        print(f"error: {text}", file=sys.stderr)
    if as_json:
        print(
            json.dumps({"error": {key: _finite(item) for key, item in plain.items()}}, default=str)
        )


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Python's own way out, which an event loop turns into an orderly cancellation.
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
