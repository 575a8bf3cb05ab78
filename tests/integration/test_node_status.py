"""`kvferry status` of a node before a real coordinator."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from tests.integration.node_service import (
    ENGINE,
    IDENTITIES,
    NUM_BLOCKS,
    OTHER_ENGINE,
    node_config,
    serving,
)

from kvferry.cluster import cli
from kvferry.cluster.node import StoreNode
from kvferry.cluster.node_client import NodeClient


@pytest.fixture
def address() -> Iterator[str]:
    with serving(None) as coordinator:
        node = StoreNode(node_config(coordinator))
        yield node.start()
        node.stop()


@pytest.fixture
def client(address: str) -> Iterator[NodeClient]:
    with closing(NodeClient(address)) as one:
        yield one


def test_its_status_tells_of_its_stores(
    address: str, client: NodeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    store = client.attach(IDENTITIES[0], timeout_s=10.0)
    code, shown = status(capsys, address)
    (instance,) = shown["instances"]
    assert code == 0
    assert (instance["id"], instance["role"]) == (store.instance_id, "store")
    assert (instance["total_blocks"], instance["fill"]) == (NUM_BLOCKS - 1, 0.0)
    assert [one["weight_version"] for one in shown["identities"]] == ["v0"]


@pytest.mark.parametrize(
    ("address", "code", "kind"),
    [("127.0.0.1:1", 1, "UnavailableError"), ("nowhere", 2, "ConfigError")],
)
def test_a_status_that_cannot_be_had_is_an_error(
    capsys: pytest.CaptureFixture[str], address: str, code: int, kind: str
) -> None:
    ended, shown = status(capsys, address)
    assert (ended, shown["error"]["type"]) == (code, kind)


def status(capsys: pytest.CaptureFixture[str], address: str) -> tuple[object, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", "--json", "--address", address])
    return ended.value.code, json.loads(capsys.readouterr().out)


def test_its_status_tells_of_engines_and_why_two_of_one_model_cannot_share(
    address: str, client: NodeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    half = replace(IDENTITIES[0], kv_dtype="bfloat16")
    for engine, identity in ((ENGINE, IDENTITIES[0]), (OTHER_ENGINE, half)):
        client.attach(identity, timeout_s=10.0, engine=engine)
    _, shown = status(capsys, address)
    first, second = shown["engines"]
    assert 0 <= first.pop("seen_s") < 60
    assert first == {
        "id": "a",
        "node": address,
        "identity": IDENTITIES[0].digest().hex(),
        "block_tokens": 32,
        "layout": "block_tokens=32,kind=vllm,tp=2",
        "version": "vllm 0.32.0",
    }
    assert (second["id"], second["identity"]) == ("b", half.digest().hex())
    assert shown["cannot_share"] == [
        {
            "model": "tiny",
            "identities": [IDENTITIES[0].digest().hex(), half.digest().hex()],
            "differing": {"kv_dtype": ["float32", "bfloat16"]},
        }
    ]


def test_identities_of_two_models_are_not_compared(
    address: str, client: NodeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    for identity in (IDENTITIES[0], replace(IDENTITIES[0], model="other")):
        client.attach(identity, timeout_s=10.0)
    _, shown = status(capsys, address)
    assert (len(shown["identities"]), shown["cannot_share"], shown["engines"]) == (2, [], [])


def test_the_tables_of_its_status_name_model_instance_and_engine(
    address: str, client: NodeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    store = client.attach(IDENTITIES[0], timeout_s=10.0, engine=ENGINE)
    client.attach(IDENTITIES[1], timeout_s=10.0)
    with pytest.raises(SystemExit):
        cli.main(["status", "--address", address])
    out = capsys.readouterr().out
    for text in ("tiny", store.instance_id, store.transfer_address, "vllm 0.32.0"):
        assert text in out
    assert "cannot share: weight_version v0 / v1" in out
