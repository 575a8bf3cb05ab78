"""What `kvferry up` may be asked for, and when a running service is another one."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cluster import local_cluster, naming
from kvferry.cluster.local_cluster import LocalCluster
from kvferry.cluster.up_config import UpConfig, require_same
from kvferry.proto.errors import BadInputError, ConfigError, InsecureBindError, MismatchError
from kvferry.proto.hashing import make_scheme

CONFIG = UpConfig(store_bytes=1 << 30)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"store_bytes": 0}, ConfigError),
        ({"name": ""}, ConfigError),
        ({"name": "a:b"}, ConfigError),
        ({"name": "a" * 64}, ConfigError),
        ({"name": "../a"}, ConfigError),
        ({"hash_seed": "random"}, ConfigError),
        ({"hash_block_tokens": 0}, ConfigError),
        ({"max_models": 0}, ConfigError),
        ({"warm_share": 1.5}, ConfigError),
        ({"port": 0}, ConfigError),
        ({"port": 65536}, ConfigError),
        ({"bind": "0.0.0.0"}, InsecureBindError),
        ({"ray_address": "nowhere"}, ConfigError),
        ({"start_timeout_s": 0.0}, ConfigError),
    ],
)
def test_settings_that_cannot_be_are_refused(
    changes: dict[str, Any], error: type[BadInputError]
) -> None:
    with pytest.raises(error):
        replace(CONFIG, **changes)


def test_the_scheme_is_made_of_the_seed_and_the_hash_block() -> None:
    config = replace(CONFIG, hash_seed="7", hash_block_tokens=32)
    assert config.scheme == make_scheme(seed="7", hash_block_tokens=32)


def test_a_running_node_with_other_settings_is_refused_naming_only_those() -> None:
    running = CONFIG.node("10.0.0.1", coordinator="10.0.0.1:1")
    require_same(running, CONFIG.node("10.0.0.1", coordinator="10.0.0.1:1"), service="one")
    other = replace(CONFIG, store_bytes=2 << 30, port=7401)
    with pytest.raises(MismatchError, match="service one runs with other settings") as caught:
        require_same(running, other.node("10.0.0.1", coordinator="10.0.0.1:1"), service="one")
    assert caught.value.given == {"store_bytes": 2 << 30, "port": 7401}
    assert caught.value.allowed == {"store_bytes": 1 << 30, "port": 7400}


@pytest.mark.parametrize(
    ("changes", "given", "allowed"),
    [
        ({"warm_share": 0.25}, {"warm_share": 0.25}, {"warm_share": 0.0}),
        (
            {"bind": "0.0.0.0", "insecure": True},
            {"bind": "0.0.0.0", "insecure": True},
            {"bind": "127.0.0.1", "insecure": False},
        ),
    ],
)
def test_a_running_coordinator_with_other_settings_is_refused_naming_only_those(
    changes: dict[str, Any], given: dict[str, Any], allowed: dict[str, Any]
) -> None:
    require_same(CONFIG.coordinator, replace(CONFIG).coordinator, service="one")
    with pytest.raises(MismatchError, match="service one runs with other settings") as caught:
        require_same(CONFIG.coordinator, replace(CONFIG, **changes).coordinator, service="one")
    assert (caught.value.given, caught.value.allowed) == (given, allowed)


def test_a_nodes_host_is_read_from_its_name_and_from_no_other_services() -> None:
    name = naming.node_name("one", "10.0.0.1")
    assert naming.host_of_node("one", name) == "10.0.0.1"
    assert naming.host_of_node("on", name) is None
    assert naming.host_of_node("one", naming.coordinator_name("one")) is None


def test_a_local_cluster_whose_keeper_is_gone_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert local_cluster.find("one") is None
    # This process lives, but keeps nothing: the number is used again.
    cluster = LocalCluster(pid=os.getpid(), address="127.0.0.1:1", auth_mode="token", token="t")
    local_cluster.write("one", cluster)
    assert local_cluster.record("one").stat().st_mode & 0o777 == 0o600
    assert local_cluster.find("one") is None
    assert local_cluster.stop("one") is False
    local_cluster.record("one").write_text("{}")
    assert local_cluster.find("one") is None


def test_a_keeper_that_has_written_nothing_down_yet_is_ended_and_no_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    others = str(local_cluster.record("one"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", local_cluster.KEEPER]
    with (
        subprocess.Popen([*sleep, "one", str(local_cluster.record("one"))]) as keeper,
        subprocess.Popen([*sleep, "one", others]) as another,
    ):
        assert local_cluster.find("one") is None
        assert local_cluster.stop("one") is True
        assert keeper.wait(10.0) == -signal.SIGTERM
        assert local_cluster.stop("one") is False
        assert another.poll() is None
        another.kill()
