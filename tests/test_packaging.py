"""The house stands: one namespace package in four folders, and pure cores."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PORTIONS = ("cluster", "worker", "coordinator", "proto")

HEAVY = ("ray", "grpc", "torch", "transformers")
# The modules that may load any of HEAVY. A module that is not named here decides something and
# must run without them, so a new file is pure until somebody writes its name down.
SHELLS = {
    "proto": ("kvferry.proto.grpc_channel", "kvferry.proto.grpc_front", "kvferry.proto.v1.*"),
    "coordinator": ("kvferry.coordinator.control_server",),
    "worker": (
        "kvferry.worker.actor",
        "kvferry.worker.block_*",
        "kvferry.worker.bulk_server",
        "kvferry.worker.chunks",
        "kvferry.worker.device",
        "kvferry.worker.dtypes",
        "kvferry.worker.group_memory",
        "kvferry.worker.grpc_*",
        "kvferry.worker.kv_memory",
        "kvferry.worker.layout_pull",
        "kvferry.worker.memory_door",
        "kvferry.worker.model.*",
        "kvferry.worker.part_pull",
        "kvferry.worker.peer_*",
        "kvferry.worker.reshard_io",
        "kvferry.worker.served",
        "kvferry.worker.service",
        "kvferry.worker.shared_blocks",
        "kvferry.worker.store_moves",
        "kvferry.worker.transfer_client",
        "kvferry.worker.transfer_server",
    ),
    "cluster": (
        "kvferry.cluster.bench.intertoken*",
        "kvferry.cluster.sim.*",
        "kvferry.cluster.bench.move_rows",
        "kvferry.cluster.bench.reshard",
        "kvferry.cluster.bench.transfer*",
        "kvferry.cluster.chaos.run",
        "kvferry.cluster.chaos.service",
        "kvferry.cluster.client*",
        "kvferry.cluster.connectors.engine_store",
        "kvferry.cluster.connectors.loader",
        "kvferry.cluster.connectors.paged_tensors",
        "kvferry.cluster.connectors.rank_link",
        "kvferry.cluster.connectors.saver",
        "kvferry.cluster.connectors.service_link",
        "kvferry.cluster.connectors.vllm*",
        "kvferry.cluster.connectors.worker_half",
        "kvferry.cluster.control_client",
        "kvferry.cluster.coordinator_client",
        "kvferry.cluster.coordinator_process",
        "kvferry.cluster.demo.check",
        "kvferry.cluster.demo.report",
        "kvferry.cluster.demo.run",
        "kvferry.cluster.grpc_*",
        "kvferry.cluster.node",
        "kvferry.cluster.node_client",
        "kvferry.cluster.node_server",
        "kvferry.cluster.ray_*",
        "kvferry.cluster.serving.all_ranks",
        "kvferry.cluster.serving.rank",
        "kvferry.cluster.serving.rank_actor",
    ),
}

IMPORT_EACH = """
import importlib, json, sys
heavy, names = json.loads(sys.argv[1])
for name in names:
    importlib.import_module(name)
    loaded = [module for module in heavy if module in sys.modules]
    if loaded:
        print(f"{name} loads {loaded}")
        break
"""


def run(command: Sequence[str], *, cwd: Path = ROOT) -> str:
    """Return what the command printed; fail with its errors if it fails."""
    done = subprocess.run(
        command, check=False, cwd=cwd, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules_of(portion: str) -> list[str]:
    """Return the dotted names of all modules of one portion, generated ones included."""
    folder = ROOT / portion
    return sorted(
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in (folder / "kvferry").rglob("*.py")
    )


def test_the_folder_proto_does_not_shadow_proto_plus() -> None:
    # ray[default] reaches proto-plus through google-api-core; with `proto/__init__.py` here, every
    # interpreter started in this folder would break there.
    assert run([sys.executable, "-c", "import proto; print(proto.Message.__module__)"]) == (
        "proto.message\n"
    )
    run([sys.executable, "-W", "ignore", "-c", "import google.api_core.rest_streaming"])


@pytest.mark.parametrize("portion", PORTIONS)
def test_no_init_file_closes_the_namespace(portion: str) -> None:
    for folder in (ROOT / portion, ROOT / portion / "kvferry"):
        assert folder.is_dir()
        assert not (folder / "__init__.py").exists()


@pytest.mark.parametrize("portion", PORTIONS)
def test_each_portion_is_imported_from_its_own_folder(portion: str, tmp_path: Path) -> None:
    code = f"import kvferry.{portion} as portion; print(*set(portion.__path__), sep='\\n')"
    folders = run([sys.executable, "-c", code], cwd=tmp_path).splitlines()
    assert [Path(folder) for folder in folders] == [ROOT / portion / "kvferry" / portion]


@pytest.mark.parametrize("portion", PORTIONS)
def test_each_portion_says_that_it_is_typed(portion: str) -> None:
    assert (ROOT / portion / "kvferry" / portion / "py.typed").is_file()


@pytest.mark.parametrize("portion", SHELLS)
def test_what_is_no_shell_loads_without_ray_grpc_and_torch(portion: str) -> None:
    pure = [
        name
        for name in modules_of(portion)
        if not any(fnmatch(name, shell) for shell in SHELLS[portion])
    ]
    assert pure
    assert run([sys.executable, "-c", IMPORT_EACH, json.dumps([HEAVY, pure])]) == ""


@pytest.mark.parametrize("portion", SHELLS)
def test_every_shell_named_here_exists(portion: str) -> None:
    modules = modules_of(portion)
    for shell in SHELLS[portion]:
        assert any(fnmatch(name, shell) for name in modules), shell


def test_the_wheel_made_from_the_sdist_holds_the_four_portions_and_nothing_else(
    tmp_path: Path,
) -> None:
    # Without --wheel, `build` makes the sdist first and the wheel from it.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)])
    (wheel,) = tmp_path.glob("kvferry-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "kvferry = kvferry.cluster.cli:main" in archive.read(entry_points).decode()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kvferry"}
    for portion in PORTIONS:
        expected = {name.replace(".", "/") + ".py" for name in modules_of(portion)}
        expected.add(f"kvferry/{portion}/py.typed")
        assert expected <= set(names)
