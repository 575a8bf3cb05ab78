"""Habits that no linter holds: small files and functions, walls by file name, no local paths."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE_FOLDERS = ("cluster", "worker", "coordinator", "proto", "tests", "examples")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
VAGUE_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}

# Which files of the four code folders may import what; patterns are relative to the root.
MAY_IMPORT = {
    "ray": ("cluster/kvferry/cluster/ray_*.py",),
    "grpc": ("*_server.py", "*_client.py", "*/grpc_*.py", "proto/kvferry/proto/v1/*"),
    "zmq": (
        "cluster/kvferry/cluster/kv_events_publisher.py",
        "cluster/kvferry/cluster/kv_events_subscriber.py",
    ),
}
TORCH_CUDA_HOME = "worker/kvferry/worker/device.py"
# A path of one machine means nothing on the next one.
MACHINE_PATH = re.compile(
    r"(?<![\w.}~-])/(?:work|root|shared|Users|mnt|opt/pypi|opt/wheels)(?:/|\b)"
)


def own_python_files() -> list[Path]:
    """Return our own Python files; generated ones are not ours."""
    return sorted(
        path
        for folder in CODE_FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not fnmatch(path.name, "*_pb2*.py")
    )


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of all modules that the source imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def says_torch_cuda(tree: ast.AST) -> bool:
    """Return whether the source names torch.cuda, as an attribute or as an import."""
    names = [*imported_names(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            names.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return any(name == "torch.cuda" or name.startswith("torch.cuda.") for name in names)


def product_files() -> list[Path]:
    return [path for path in own_python_files() if relative(path).split("/")[1] == "kvferry"]


@pytest.mark.parametrize("path", own_python_files(), ids=relative)
def test_files_and_functions_are_small_and_named_for_what_they_hold(path: Path) -> None:
    text = path.read_text()
    assert path.name not in VAGUE_NAMES
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", product_files(), ids=relative)
def test_ray_grpc_and_cuda_stay_in_their_files(path: Path) -> None:
    tree = ast.parse(path.read_text())
    roots = {name.split(".")[0] for name in imported_names(tree)}
    for package, homes in MAY_IMPORT.items():
        if package in roots:
            assert any(fnmatch(relative(path), home) for home in homes), f"imports {package}"
    assert not says_torch_cuda(tree) or relative(path) == TORCH_CUDA_HOME


def test_the_check_for_torch_cuda_sees_every_way_to_write_it() -> None:
    for source in (
        "torch.cuda.is_available()",
        "import torch.cuda",
        "import torch.cuda.nvtx as x",
        "from torch import cuda",
        "from torch.cuda import Stream",
    ):
        assert says_torch_cuda(ast.parse(source)), source
    assert not says_torch_cuda(ast.parse("from torch import nn\nx.cuda"))


def published_texts() -> list[Path]:
    """Return every text file that a clone holds."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != "LICENSE"]
    folders = (*CODE_FOLDERS, "docs", "deploy", ".ci")
    below = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    binary = {".pyc", ".jsonl"}
    return sorted(path for path in (*top, *below) if path.suffix not in binary)


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in published_texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_the_check_for_machine_paths_sees_one_and_leaves_addresses_alone() -> None:
    slash = "/"
    assert MACHINE_PATH.search(f"see {slash}root{slash}x")
    assert MACHINE_PATH.search(f'"{slash}shared{slash}notes.md"')
    assert not MACHINE_PATH.search(f"https:{slash}{slash}example.org{slash}work{slash}x")
    assert not MACHINE_PATH.search(f"docs{slash}work.md")
