"""What `kvferry plan` prints, and what of a model it plans for."""

import json
from pathlib import Path

import pytest

from kvferry.cluster import cli
from kvferry.cluster.planning.model_shapes import groups_of_model
from kvferry.cluster.planning.picture import picture
from kvferry.proto.layout import Layout, grid, vllm
from kvferry.proto.placement import KvShape

SIZES = ("--layers", "2", "--kv-heads", "1", "--head-size", "8")
SHAPE = KvShape(num_layers=2, num_kv_heads=2, head_size=8, dtype="bfloat16")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_json_object_tells_each_transfer_its_slices_and_the_sums(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--from", "dcp=2", "--to", "tp=2,block_tokens=32", "--tokens", "64", *SIZES, "--json")
    code, out, _ = run(capsys, *words)
    assert code == 0
    found = json.loads(out)
    assert found.pop("plan_ms") > 0
    token_bytes = 2 * 2 * 8 * 2
    assert found["bytes"] == 2 * 64 * token_bytes
    assert found["waste_bytes"] == 64 * token_bytes
    assert [(one["dst_rank"], one["src_rank"], one["bytes"]) for one in found["transfers"]] == [
        (dst, src, 32 * token_bytes) for dst in range(2) for src in range(2)
    ]
    assert set(found) == {"transfers", "bytes", "waste_bytes"}
    assert found["transfers"][1]["slices"] == [
        {
            "group": 0,
            "layers": [0, 1],
            "heads": [0, 1],
            "first_token": 1,
            "src_first": 0,
            "dst_first": 1,
            "run_tokens": 1,
            "num_tokens": 32,
            "loops": [{"count": 32, "token_step": 2, "src_step": 1, "dst_step": 2}],
        }
    ]


def test_the_table_shows_both_layouts_every_transfer_and_the_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--from", "dcp=2", "--to", "tp=1", "--tokens", "64", *SIZES)
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert "from: grid block_tokens=16,dcp=2\n" in out
    assert "to: grid block_tokens=16\n" in out
    assert "4,096 bytes move, 0 of them beyond one copy" in out
    assert [line.split() for line in out.splitlines() if line.endswith("2,048  ")] == [
        ["0", str(src), "0", "2", "0-0", "32", "1", "32", "2,048"] for src in range(2)
    ]


def test_a_layout_that_vllm_would_not_start_is_planned_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--from", "kind=vllm,tp=4,dcp=2", "--to", "kind=vllm,tp=2,pcp=2", "--tokens", "8")
    sizes = ("--layers", "2", "--kv-heads", "8", "--head-size", "8")
    code, out, err = run(capsys, *words, *sizes, "--json")
    assert code == 0
    assert len(json.loads(out)["transfers"]) == 8
    assert "note: vLLM would not start block_tokens=16,kind=vllm,tp=4,dcp=2: with dcp, tp" in err


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (("--from", "dcp=2,interleave=3", *SIZES), "ConfigError", "interleave must divide"),
        (("--from", "kind=vllm,tp=2,dcp=4", *SIZES), "ConfigError", "dcp must divide tp"),
        (("--from", "ring=2", *SIZES), "ConfigError", "a layout is name=value"),
        (("--from", "tp=3", *SIZES[:2], "--kv-heads", "2", *SIZES[4:]), "ConfigError", "the head"),
        (("--from", "pp=3", *SIZES), "ConfigError", "the stages must share the model's layers"),
        (("--from", "tp=1", *SIZES, "--dtype", "int3"), "ConfigError", "unknown dtype"),
        (("--from", "tp=1", *SIZES[:4]), "ConfigError", "a plan needs the sizes of the model"),
        (("--from", "tp=1", *SIZES, "--model", "x"), "ConfigError", "--model says these already"),
        (("--from", "tp=1", "--model", "no-such"), "ModelError", "no such model"),
        (("--from", "tp=1", *SIZES, "--tokens", "0"), "ConfigError", "--tokens out of range"),
        (
            ("--from", "tp=1", *SIZES, "--tokens", str(10**23)),
            "ConfigError",
            "--tokens out of range",
        ),
        (
            ("--from", "dcp=5000", *SIZES, "--tokens", "8"),
            "ConfigError",
            "ranks of a layout out of range",
        ),
        (SIZES, "BadInputError", "--from"),
    ],
)
def test_a_bad_option_ends_with_2_and_one_json_object(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], kind: str, message: str
) -> None:
    code, out, _ = run(capsys, "--to", "tp=1", "--tokens", "8", *words, "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert error["type"] == kind
    assert message in error["message"]


def test_a_picture_marks_the_tokens_of_each_rank_and_where_blocks_end() -> None:
    layout = grid(block_tokens=4, dcp=2, interleave=2)
    assert picture(layout, SHAPE, layout, Layout(block_tokens=4), 16).splitlines() == [
        "  rank  layers  heads  tokens 0-15, 2 a column",
        "     0     0-1    0-1  #.#.|#.#.|",
        "     1     0-1    0-1  .#.#|.#.#|",
    ]


def test_ranks_that_hold_the_same_share_a_line() -> None:
    layout = vllm(block_tokens=4, tp=2, pcp=2)
    assert picture(layout, SHAPE, layout, layout, 8).splitlines()[1:] == [
        "   0,2     0-1    0-0  #|#|",
        "   1,3     0-1    1-1  #|#|",
    ]
    many = grid(block_tokens=4, tp=1, dcp=64)
    assert picture(many, SHAPE, many, many, 8).splitlines()[-1] == "  ... and 33 lines more"


def test_a_model_folder_gives_its_groups_and_a_window_only_needs_its_end(
    tiny_hybrid_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = groups_of_model(str(tiny_hybrid_model), "float32")
    assert {group.shape.group_kind for group in groups} == {"full", "sliding_window"}
    for group in groups:
        window = group.spec.window_tokens
        expected = 0 if window is None else (64 - window + 1) // 4 * 4
        assert group.first_position(64, 4) == expected
        assert group.first_position(3, 4) == 0
    words = ("--from", "tp=1,block_tokens=4", "--to", "tp=1,block_tokens=4", "--tokens", "64")
    code, out, _ = run(capsys, *words, "--model", str(tiny_hybrid_model), "--json")
    assert code == 0
    slices = json.loads(out)["transfers"][0]["slices"]
    assert [one["first_token"] for one in slices] == [g.first_position(64, 4) for g in groups]
    assert [tuple(one["layers"]) for one in slices] == [g.shape.layers for g in groups]


def test_layers_with_a_window_are_not_dealt_by_a_vllm_layout(
    tiny_hybrid_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--from", "kind=vllm,tp=2,dcp=2", "--to", "tp=1", "--tokens", "64")
    code, out, _ = run(capsys, *words, "--model", str(tiny_hybrid_model), "--json")
    assert code == 2
    assert "vLLM deals no tokens of layers of kind sliding_window" in out
