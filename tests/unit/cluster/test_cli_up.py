"""`kvferry up`, `down` and `status` where nothing needs to be started."""

import json
from pathlib import Path

import pytest

from kvferry.cluster import cli


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("up",), "BadInputError"),
        (("up", "--store-gib", "0"), "ConfigError"),
        (("up", "--store-gib", "nan"), "ConfigError"),
        (("up", "--store-gib", "inf"), "ConfigError"),
        (("up", "--store-gib", "1", "--name", "a b"), "ConfigError"),
        (("up", "--store-gib", "1", "--port", "0"), "ConfigError"),
        (("up", "--store-gib", "1", "--max-models", "0"), "ConfigError"),
        (("up", "--store-gib", "1", "--hash-block-tokens", "0"), "ConfigError"),
        (("up", "--store-gib", "1", "--hash-seed", "random"), "ConfigError"),
        (("up", "--store-gib", "1", "--ray-address", "nowhere"), "ConfigError"),
        (("up", "--store-gib", "1", "--bind", "0.0.0.0"), "InsecureBindError"),
        (("up", "--store-gib", "1", "--tls-name", "elsewhere"), "ConfigError"),
        (("down", "--name", "a:b"), "ConfigError"),
        (("down", "--ray-address", "nowhere"), "ConfigError"),
        (("status", "--name", ""), "ConfigError"),
        (("status", "--ray-address", "nowhere"), "ConfigError"),
    ],
)
def test_a_bad_option_ends_with_2_and_one_json_object(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], kind: str
) -> None:
    code, out, err = run(capsys, *words, "--json")
    assert code == 2
    error = json.loads(out, parse_constant=pytest.fail)["error"]
    assert error["type"] == kind
    assert "error: " in err


def test_a_local_service_that_is_not_there_is_removed_with_a_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = ("down", "--name", "nobody", "--ray-address", "local")
    assert run(capsys, *words) == (0, "no service nobody runs there\n", "")
    code, out, _ = run(capsys, *words, "--json")
    assert code == 0
    assert json.loads(out) == {"name": "nobody", "coordinator": False, "hosts": []}


def test_the_status_of_a_local_service_that_is_not_there_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, out, _ = run(capsys, "status", "--ray-address", "local", "--json")
    assert code == 1
    assert json.loads(out)["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("up", "kvferry up --store-gib 16"),
        ("down", "kvferry down --name experiments"),
        ("status", "kvferry status --address 10.0.0.7:7400 --json"),
    ],
)
def test_examples_are_shown(capsys: pytest.CaptureFixture[str], command: str, example: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert example in out
