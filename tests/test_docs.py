"""What the documentation says exists, exists."""

import re
from pathlib import Path

import pytest
import typer
import typer.core
import typer.main

from kvferry.cluster import cli

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAKE_COMMAND = re.compile(r"\bmake ([a-z][a-z-]*)")
DEMO_OPTIONS = re.compile(r"\b(?:kvferry|make) demo\b([^#\n]*)")
MAKE_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
NOT_DOCUMENTS = {".venv", ".git", "node_modules", "build", "dist"}


def documents() -> list[Path]:
    return sorted(
        path
        for path in ROOT.rglob("*.md")
        if not NOT_DOCUMENTS & set(path.relative_to(ROOT).parts)
        and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    )


def code_spans(text: str) -> str:
    """Return what stands in backticks or in indented or fenced blocks, joined by newlines."""
    fenced = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*fenced, *inline])


def identity(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", documents(), ids=identity)
def test_relative_links_lead_to_files(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file = target.split("#")[0]
        assert (path.parent / file).exists(), target


@pytest.mark.parametrize("path", documents(), ids=identity)
def test_make_commands_are_targets_of_the_makefile(path: Path) -> None:
    targets = set(MAKE_TARGET.findall((ROOT / "Makefile").read_text()))
    assert set(MAKE_COMMAND.findall(code_spans(path.read_text()))) <= targets


def test_the_readme_shows_the_two_commands() -> None:
    commands = MAKE_COMMAND.findall(code_spans((ROOT / "README.md").read_text()))
    assert commands[:2] == ["demo", "test"]


def demo_options() -> set[str]:
    """Return all options of `kvferry demo` as they are typed."""
    commands = typer.main.get_command(cli.app)
    assert isinstance(commands, typer.core.TyperGroup)
    demo = commands.commands["demo"]
    return {option for parameter in demo.params for option in parameter.opts} | {"--help"}


@pytest.mark.parametrize("path", documents(), ids=identity)
def test_options_shown_for_the_demo_exist(path: Path) -> None:
    for arguments in DEMO_OPTIONS.findall(code_spans(path.read_text())):
        assert set(re.findall(r"--[a-z][a-z-]*", arguments)) <= demo_options()


def test_the_documentation_shows_options_of_the_demo() -> None:
    shown = [
        option
        for path in documents()
        for arguments in DEMO_OPTIONS.findall(code_spans(path.read_text()))
        for option in re.findall(r"--[a-z][a-z-]*", arguments)
    ]
    assert {"--json", "--address", "--num-blocks"} <= set(shown)


@pytest.mark.parametrize("folder", ["proto", "coordinator", "worker", "cluster", "examples"])
def test_each_code_folder_says_what_belongs_there(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    assert text.startswith("# ")
    assert len(text.splitlines()) >= 5


def test_the_support_matrix_names_the_pinned_versions() -> None:
    readme = (ROOT / "README.md").read_text()
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    for package in ("ray", "torch", "transformers"):
        assert f"| {package.capitalize() if package == 'ray' else package} | {pins[package]}" in (
            readme
        )
