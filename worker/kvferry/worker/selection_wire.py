"""A selection to and from protobuf."""

from kvferry.proto.errors import BadInputError
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.selection import Selection, StridedRuns

MAX_RUNS = 1 << 16


def selection_to_proto(selection: Selection) -> transfer_pb2.Selection:
    """Return the message of a selection."""
    message = transfer_pb2.Selection(
        layer_start=selection.layers.start,
        layer_end=selection.layers.stop,
        head_start=selection.heads.start,
        head_end=selection.heads.stop,
    )
    for runs in selection.runs:
        added = message.runs.add(first=runs.first, run_tokens=runs.run_tokens)
        for count, step in runs.loops:
            added.loops.add(count=count, step=step)
    return message


def selection_from_proto(message: transfer_pb2.Selection) -> Selection:
    """Return the message's values, as far as they go; whoever serves them checks what they mean.

    Raises:
        BadInputError: more runs than any plan has; found before anything is made of them.
    """
    if len(message.runs) > MAX_RUNS:
        raise BadInputError(
            "a selection of too many runs", given=len(message.runs), allowed=f"at most {MAX_RUNS}"
        )
    return Selection(
        layers=range(message.layer_start, message.layer_end),
        heads=range(message.head_start, message.head_end),
        runs=tuple(
            StridedRuns(
                first=runs.first,
                run_tokens=runs.run_tokens,
                loops=tuple((loop.count, loop.step) for loop in runs.loops),
            )
            for runs in message.runs
        ),
    )
