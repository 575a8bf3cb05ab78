"""Exit codes, and what goes to stdout and stderr, where nothing needs to be started."""

import json

import pytest
import typer

from kvferry.cluster import cli, cli_demo


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("--num-blocks", "1", "ConfigError"),
        ("--num-blocks", "3.5", "BadInputError"),
        ("--num-blocks", "x", "BadInputError"),
        ("--kv-bytes", "0", "ConfigError"),
        ("--kv-bytes", "2 acres", "ConfigError"),
        ("--memory-fraction", "0", "ConfigError"),
        ("--memory-fraction", "1.5", "ConfigError"),
        ("--memory-fraction", "nan", "ConfigError"),
        ("--max-model-len", "0", "ConfigError"),
        ("--max-model-len", "all", "ConfigError"),
        ("--block-tokens", "0", "ConfigError"),
        ("--prefill", "0", "ConfigError"),
        ("--decode", "-1", "ConfigError"),
        ("--requests", "0", "ConfigError"),
        ("--max-tokens", "0", "ConfigError"),
        ("--temperature", "-1", "ConfigError"),
        ("--hash-seed", "abc", "ConfigError"),
        ("--hash-seed", "random", "ConfigError"),
        ("--hash-seed", "4294967296", "ConfigError"),
        ("--hash-seed", "1" * 5000, "ConfigError"),
        ("--hash-seed", "\u0663", "ConfigError"),  # a digit, but not one of CPython's
        ("--temperature", "nan", "ConfigError"),
        ("--address", "nowhere", "ConfigError"),
        ("--address", "ray://127.0.0.1:10001", "ConfigError"),
        ("--address", "127.0.0.1:70000", "ConfigError"),
        ("--port", "65536", "ConfigError"),
        ("--bind", "0.0.0.0", "InsecureBindError"),
        ("--bind", "example.org", "InsecureBindError"),
        ("--tls-cert", "no-such.crt", "ConfigError"),
        ("--tls-ca", "no-such.crt", "ConfigError"),
        ("--token-file", "no-such-token", "ConfigError"),
        ("--tls-name", "elsewhere", "ConfigError"),
        ("--unknown", "1", "BadInputError"),
    ],
)
def test_a_bad_option_ends_with_2_and_one_json_object(
    capsys: pytest.CaptureFixture[str], option: str, value: str, kind: str
) -> None:
    code, out, err = run(capsys, "demo", "--json", option, value)
    assert code == 2
    error = json.loads(out, parse_constant=pytest.fail)["error"]
    assert error["type"] == kind
    assert set(error) == {"type", "message", "given", "allowed"}
    assert "error: " in err


def test_without_json_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "demo", "--num-blocks", "1")
    assert (code, out) == (2, "")
    assert err == "error: num_blocks must be an integer of at least 2; given: 1; allowed: >= 2\n"


def test_two_sizes_of_a_pool_are_refused_with_both_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "demo", "--json", "--num-blocks", "9", "--kv-bytes", "1.5KiB")
    assert code == 2
    assert json.loads(out)["error"]["given"] == {"num_blocks": 9, "kv_bytes": 1536}


def test_the_version_and_the_examples_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, "kvferry 0.1.0\n")
    code, out, _ = run(capsys, "demo", "--help")
    assert code == 0
    assert "kvferry demo --address auto" in out
    assert "kvferry demo --tls-cert tls.crt --tls-key tls.key" in out
    code, out, _ = run(capsys, "bench", "core", "--help")
    assert code == 0
    assert "kvferry bench core --json" in out


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("core", "--seconds", "0"), "ConfigError"),
        (("core", "--seconds", "nan"), "ConfigError"),
        (("core", "--vllm-python", "no-such-python"), "ConfigError"),
        (("reshard", "--seconds", "0"), "ConfigError"),
        (("nothing",), "BadInputError"),
    ],
)
def test_a_bad_benchmark_ends_with_2_and_one_json_object(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], kind: str
) -> None:
    code, out, _ = run(capsys, "bench", *words, "--json")
    assert code == 2
    assert json.loads(out)["error"]["type"] == kind


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupt_ends_with_130_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(cli_demo, "_run", interrupted)
    code, out, err = run(capsys, "demo", "--json")
    assert code == 130
    assert json.loads(out)["error"]["type"] == "Interrupted"
    assert "interrupted" in err
