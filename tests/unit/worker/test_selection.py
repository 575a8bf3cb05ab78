import pytest

from kvferry.proto.errors import BadInputError
from kvferry.proto.layout import grid
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import plan_reshard
from kvferry.proto.v1 import transfer_pb2
from kvferry.worker.reshard_io import source_cells
from kvferry.worker.selection import Selection, StridedRuns, selection_of
from kvferry.worker.selection_wire import selection_from_proto, selection_to_proto

SHAPE = KvShape(num_layers=4, num_kv_heads=4, head_size=8, dtype="float32")


def selection(*runs: StridedRuns) -> Selection:
    return Selection(layers=range(1, 3), heads=range(2, 4), runs=runs)


def test_tokens_of_runs_that_interleave_come_in_ascending_order() -> None:
    asked = selection(
        StridedRuns(first=0, run_tokens=1, loops=((3, 10), (2, 2))),
        StridedRuns(first=1, run_tokens=1, loops=((3, 10),)),
    )
    assert asked.tokens(23).tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "names each of its tokens once; given: 0 tokens; allowed: 1 to 16"),
        ([StridedRuns(first=0, run_tokens=0)], "no runs of tokens"),
        ([StridedRuns(first=0, run_tokens=1, loops=((0, 1),))], "no runs of tokens"),
        ([StridedRuns(first=0, run_tokens=1, loops=((1, 1),) * 3)], "no runs of tokens"),
        ([StridedRuns(first=14, run_tokens=3)], r"beyond .*; given: 14 to 16; allowed: 0 to 15"),
        ([StridedRuns(first=0, run_tokens=1, loops=((3, 8),))], "given: 0 to 16"),
        ([StridedRuns(first=2**63, run_tokens=2**64 - 1)], "beyond the asked blocks"),
        ([StridedRuns(first=0, run_tokens=1, loops=((2**60, 0),))], "once; given: 11529"),
        ([StridedRuns(first=3, run_tokens=1, loops=((2, 0),))], "once; given: 3"),
        (
            [StridedRuns(first=0, run_tokens=4), StridedRuns(first=3, run_tokens=4)],
            "once; given: 3",
        ),
    ],
)
def test_what_names_no_tokens_of_the_asked_blocks_is_refused(
    runs: list[StridedRuns], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        selection(*runs).tokens(16)


def test_a_step_that_is_never_made_may_be_anything() -> None:
    runs = StridedRuns(first=5, run_tokens=2, loops=((1, 2**64 - 1),))
    assert selection(runs).tokens(16).tolist() == [5, 6]


def test_a_transfer_asks_for_what_its_source_reads_in_a_few_numbers() -> None:
    source, destination = grid(block_tokens=16, dcp=2), grid(block_tokens=16, tp=2, dcp=3)
    plan = plan_reshard(source, destination, SHAPE, start=64, end=60_000)
    for transfer in plan.transfers:
        asked = selection_of(transfer, skipped_tokens=32)
        assert (asked.layers, asked.heads) == (transfer.layers, transfer.heads)
        wanted = source_cells(transfer, skipped_tokens=32).tokens
        assert asked.tokens(30_000).tolist() == wanted.tolist()
        encoded = selection_to_proto(asked).SerializeToString()
        assert len(encoded) < 100
        assert selection_from_proto(transfer_pb2.Selection.FromString(encoded)) == asked


def test_a_transfer_that_begins_before_the_first_asked_block_is_refused() -> None:
    layout = grid(block_tokens=16)
    (transfer,) = plan_reshard(layout, layout, SHAPE, start=20, end=40).transfers
    with pytest.raises(BadInputError, match="given: 20; allowed: at least 32"):
        selection_of(transfer, skipped_tokens=32)
