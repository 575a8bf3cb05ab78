"""Layouts that cannot be served are refused by the rule that failed, before anything is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster import cli, cli_demo, ray_environment
from kvferry.cluster.demo import run as demo_run

FIELDS = ["block_tokens", "kind", "tp", "pp", "pcp", "dcp", "interleave", "profile", "stage_layers",
          "memory"]  # fmt: skip
NO_NAME = "a layout is name=value, separated by commas"
COMPUTES = "the reference engine deals tokens over ranks (dcp, pcp) and nothing else"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run a demo that must end with 2; return its error object."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--json", *words])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    error: dict[str, Any] = json.loads(out)["error"]
    assert set(error) == {"type", "message", "given", "allowed"}
    assert f"error: {error['message']}" in err
    return error


@pytest.mark.parametrize("option", ["--prefill-layout", "--decode-layout"])
@pytest.mark.parametrize(
    ("layout", "message", "given", "allowed"),
    [
        ("interleave=3", "interleave must divide block_tokens",
         {"interleave": 3}, {"block_tokens": 16}),
        ("dcp=2,interleave=8,block_tokens=4", "interleave must divide block_tokens",
         {"interleave": 8}, {"block_tokens": 4}),
        ("kind=vllm,tp=2,dcp=3", "dcp must divide tp", {"dcp": 3}, {"tp": 2}),
        ("kind=vllm,tp=2,dcp=4,profile=0.17", "dcp must divide tp", {"dcp": 4}, {"tp": 2}),
        ("kind=vllm,tp=2,pcp=2,dcp=3", "with pcp, dcp must be 1, pcp or tp * pcp",
         {"dcp": 3}, {"tp": 2, "pcp": 2}),
        ("kind=ring", "unknown kind", "ring", ["grid", "vllm"]),
        ("profile=0.17", "only a layout of kind vllm has a profile", "0.17", "kind=vllm"),
        ("ring=2", NO_NAME, "ring=2", FIELDS),
        ("dcp", NO_NAME, "dcp", FIELDS),
        ("dcp=2,dcp=4", "a layout names a field twice", "dcp=4", "once"),
        ("dcp=two", "dcp must be an integer", "two", ">= 1"),
        ("dcp=0", "dcp must be an integer", "0", ">= 1"),
        ("memory=LSB", "a memory order names each axis once", "LSB",
         "L layers, S sides, B blocks, N tokens, H heads, e.g. LSBNH"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused_by_its_rule(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    option: str,
    layout: str,
    message: str,
    given: object,
    allowed: object,
) -> None:
    monkeypatch.setattr(cli_demo, "_run", _start_nothing)
    assert refused(capsys, option, layout) == {
        "type": "ConfigError",
        "message": f"{option}: {message}",
        "given": given,
        "allowed": allowed,
    }


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("layout", "given", "allowed"),
    [
        ("kind=vllm", {"kind": "vllm"}, {"kind": "grid"}),
        ("kind=vllm,tp=2,dcp=2", {"kind": "vllm"}, {"kind": "grid"}),
        ("tp=2", {"tp": 2}, {"tp": 1}),
        ("pp=2,dcp=2", {"pp": 2}, {"pp": 1}),
    ],
)
def test_a_layout_that_the_reference_engine_cannot_compute_with_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    role: str,
    layout: str,
    given: object,
    allowed: object,
) -> None:
    monkeypatch.setattr(cli_demo, "_run", _start_nothing)
    assert refused(capsys, f"--{role}-layout", layout) == {
        "type": "ConfigError",
        "message": f"{role}: {COMPUTES}",
        "given": given,
        "allowed": allowed,
    }


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("axis", "dcp", "pcp"), [("dcp", 2, 1), ("pcp", 1, 2)])
def test_a_model_with_windows_is_not_dealt_over_ranks(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_hybrid_model: Path,
    *,
    role: str,
    axis: str,
    dcp: int,
    pcp: int,
) -> None:
    monkeypatch.setattr(ray_environment, "prepare", lambda _: None)
    monkeypatch.setattr(demo_run, "running_service", _start_nothing)
    words = ("--model", str(tiny_hybrid_model), "--requests", "1", "--block-tokens", "4")
    assert refused(capsys, *words, f"--{role}-layout", f"{axis}=2") == {
        "type": "ConfigError",
        "message": f"{role}: tokens of layers of kind sliding_window are not dealt over ranks",
        "given": {"dcp": dcp, "pcp": pcp},
        "allowed": {"kind": "full", "otherwise": "dcp 1 and pcp 1"},
    }


def _start_nothing(*_: object, **__: object) -> None:
    raise AssertionError("something was started")
