"""What `kvferry bench` measures is what it says, without Ray and without vLLM."""

import dataclasses
import io
import json
import sys
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.cluster.bench.core_adapter import KvferryManager
from kvferry.cluster.bench.hash_rows import hash_rows
from kvferry.cluster.bench.index_rows import ingest_rows, locate_rows
from kvferry.cluster.bench.move_rows import move_rows
from kvferry.cluster.bench.plan_rows import plan_rows
from kvferry.cluster.bench.pool_operations import BLOCK_TOKENS, PoolOperations
from kvferry.cluster.bench.report import describe_machine, print_table, to_json
from kvferry.cluster.bench.restore_rows import restore_rows
from kvferry.cluster.bench.rows import MIN_PAIRS, Row, measure_alone, measure_pairs
from kvferry.cluster.bench.step_cycle import SCHEME, STEP_BLOCKS, StepCycle, registration
from kvferry.cluster.bench.vllm_process import running_vllm
from kvferry.coordinator.service import CoordinatorService
from kvferry.proto.errors import ConfigError
from kvferry.proto.ids import Epoch
from kvferry.proto.step_messages import StepReply

MANY_BLOCKS = 20_000


def test_a_row_holds_the_medians_and_the_median_of_the_ratios() -> None:
    ours, theirs = iter([1.0, 2.0, 9.0] * 5), iter([4.0, 2.0, 3.0] * 5)
    row = measure_pairs("x", lambda: next(ours), "y", lambda: next(theirs), unit="ns", seconds=0.0)
    assert row == Row(
        name="x",
        unit="ns",
        value=2.0,
        baseline="y",
        baseline_value=3.0,
        ratio=1.0,
        better="lower",
    )


def test_at_least_15_pairs_are_measured_in_turn() -> None:
    order: list[str] = []

    def work(name: str) -> float:
        order.append(name)
        return 1.0

    measure_pairs("x", lambda: work("a"), "y", lambda: work("b"), unit="ns", seconds=0.0)
    assert order == ["a", "b"] * MIN_PAIRS


def test_a_row_without_baseline_has_nulls() -> None:
    numbers = count(1)
    row = measure_alone("x", lambda: next(numbers), unit="1/s", better="higher", seconds=0.0)
    assert row.to_json() == {
        "name": "x",
        "unit": "1/s",
        "value": 8,
        "baseline": None,
        "baseline_value": None,
        "ratio": None,
        "better": "higher",
    }


def test_the_json_object_has_machine_and_rows_and_the_table_names_every_row() -> None:
    alone = measure_alone("alone", lambda: 1.5, unit="1/s", better="higher", seconds=0.0)
    pair = measure_pairs("pair", lambda: 1.0, "base", lambda: 4.0, unit="ns", seconds=0.0)
    machine = describe_machine(None)
    assert json.loads(json.dumps(to_json(machine, [alone, pair]))) == {
        "machine": machine,
        "rows": [dataclasses.asdict(alone), dataclasses.asdict(pair)],
    }
    out = Console(file=io.StringIO(), width=110)
    print_table(machine, [alone, pair], out)
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    for text in ("alone", "1.5 1/s", "pair", "1.0 ns", "base 4.0", "0.250"):
        assert text in printed


def test_hashing_and_the_index_have_the_rows_that_others_look_for() -> None:
    rows = [*hash_rows(0.0), *locate_rows(0.0), *ingest_rows(0.0)]
    assert [(row.name, row.unit, row.baseline, row.better) for row in rows] == [
        ("hash_block@list", "ns", "naive", "lower"),
        ("hash_block@array", "ns", "naive", "lower"),
        ("locate_block@1", "ns", "dict", "lower"),
        ("locate_block@64", "ns", "dict", "lower"),
        ("locate_block@1024", "ns", "dict", "lower"),
        ("ingest_event", "1/s", None, "higher"),
    ]
    assert all(row.value > 0 for row in rows)


def test_telling_what_is_held_has_its_row() -> None:
    (row,) = restore_rows(0.0, 2000)
    assert (row.name, row.unit, row.baseline, row.better) == ("restore_2000", "ms", None, "lower")
    assert row.value > 0


def test_the_plan_that_others_look_for_has_its_row() -> None:
    (row,) = plan_rows(0.0)
    assert (row.name, row.unit, row.baseline, row.better) == ("plan_131072", "ms", None, "lower")
    assert row.value > 0


def test_gathering_and_scattering_have_the_rows_that_others_look_for() -> None:
    rows = list(move_rows(0.0))
    assert [(row.name, row.unit, row.baseline, row.better) for row in rows] == [
        ("gather_aligned", "GB/s", "memcpy", "higher"),
        ("scatter_aligned", "GB/s", "memcpy", "higher"),
        ("gather_interleave1", "GB/s", "memcpy", "higher"),
        ("scatter_interleave1", "GB/s", "memcpy", "higher"),
    ]
    assert all(row.value > 0 for row in rows)


def test_requests_of_the_pool_are_granted_freed_and_found_whole() -> None:
    manager = KvferryManager(10)
    request = manager.make_request("r", [bytes([i]) * 32 for i in range(9)])
    assert manager.lookup(request) == 0
    assert manager.allocate(request)
    assert not manager.allocate(manager.make_request("other", [b"x" * 32]))
    manager.free(request)
    assert manager.lookup(request) == 9 * BLOCK_TOKENS


@pytest.mark.parametrize("num_blocks", [1, 256])
def test_the_pool_is_timed_by_three_operations(num_blocks: int) -> None:
    figures = PoolOperations(KvferryManager).time_cycle(num_blocks)
    assert set(figures) == {"allocate", "free", "lookup"}
    assert min(figures.values()) > 0


def test_a_hashed_pool_takes_the_memory_of_its_keys_on_top() -> None:
    figures = PoolOperations(KvferryManager).measure_memory(MANY_BLOCKS)
    assert 0 < figures["empty"] < 64
    # A key has 36 bytes and the head of a Python object.
    assert figures["hashed"] - figures["empty"] > 36


def test_each_timed_step_has_256_blocks_in_it() -> None:
    service = CoordinatorService(scheme=SCHEME, epoch=Epoch(1), check_invariants=True)
    service.handle(registration(), 0.0)
    cycle = StepCycle(Epoch(1))
    for _ in range(2):
        admit, release = cycle.next_steps()
        (reply, _), (after, _) = service.handle(admit, 0.0), service.handle(release, 0.0)
        assert isinstance(reply, StepReply)
        assert isinstance(after, StepReply)
        (blocks,) = reply.scheduled[0].new_block_ids
        assert len(blocks) == STEP_BLOCKS
        (instance,) = service.state.instances.values()
        assert instance.manager.pool.num_used_blocks == 0
    assert service.state.index.num_keys() == 2 * STEP_BLOCKS


def test_an_interpreter_without_vllm_is_refused_with_what_it_said() -> None:
    with (
        pytest.raises(ConfigError, match="in which vLLM does not load") as caught,
        running_vllm(sys.executable),
    ):
        pass
    assert caught.value.given == {
        "python": sys.executable,
        "error": "ModuleNotFoundError: No module named 'vllm'",
    }


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    python = str(tmp_path / "python")
    with pytest.raises(ConfigError, match="cannot be run") as caught, running_vllm(python):
        pass
    assert caught.value.given == python
