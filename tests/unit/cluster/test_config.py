import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import CertificateFolder

from kvferry.cluster.config import KvEventsConfig, ServiceConfig, require_reachable_bind
from kvferry.proto.errors import ConfigError, InsecureBindError
from kvferry.proto.layout import Layout

CONFIG = ServiceConfig(model="some/model")


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("num_prefill", 1),
        ("num_decode", 1),
        ("token_budget", 1),
        ("max_running", 1),
        ("max_model_len", 1),
    ],
)
@pytest.mark.parametrize("as_given", [lambda n: n - 1, float, str, lambda _: True])
def test_a_size_is_an_integer_from_its_smallest_on(name: str, smallest: int, as_given: Any) -> None:
    changes: dict[str, Any] = {name: smallest}
    assert getattr(replace(CONFIG, **changes), name) == smallest
    changes[name] = given = as_given(smallest)
    with pytest.raises(ConfigError, match=f"^{name} must be an integer") as caught:
        replace(CONFIG, **changes)
    assert (caught.value.given, caught.value.allowed) == (given, f">= {smallest}")


@pytest.mark.parametrize("unbounded", ["auto", None])
def test_a_length_may_be_left_to_the_pool_or_to_the_model(unbounded: Any) -> None:
    assert replace(CONFIG, max_model_len=unbounded).max_model_len == unbounded


@pytest.mark.parametrize("name", ["port", "metrics_port"])
@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(name: str, port: int) -> None:
    changes: dict[str, Any] = {name: port}
    with pytest.raises(ConfigError, match=f"^{name} out of range") as caught:
        replace(CONFIG, **changes)
    assert (caught.value.given, caught.value.allowed) == (port, "0 to 65535")


@pytest.mark.parametrize("port", [0, 65535])
def test_the_ports_at_the_ends_are_accepted(port: int) -> None:
    assert replace(CONFIG, port=port).port == port


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_start_timeout_that_never_or_always_ends_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="start_timeout_s must be positive and finite") as caught:
        replace(CONFIG, start_timeout_s=timeout_s)
    assert caught.value.given is timeout_s


@pytest.mark.parametrize("seed", ["", "-1", "1.5", "0x1", "random", "4294967296", "1 ", "\u0663"])
def test_a_hash_seed_that_python_or_a_second_process_would_not_take_is_refused(seed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(CONFIG, hash_seed=seed)
    assert (caught.value.given, caught.value.allowed) == (seed, "0 to 4294967295")


@pytest.mark.parametrize("seed", ["0", "42", "4294967295"])
def test_a_hash_seed_that_python_takes_is_accepted(seed: str) -> None:
    assert replace(CONFIG, hash_seed=seed).hash_seed == seed


def test_a_bind_beyond_loopback_needs_to_be_asked_for() -> None:
    with pytest.raises(InsecureBindError) as caught:
        replace(CONFIG, bind="0.0.0.0")
    assert caught.value.given == "0.0.0.0"
    assert replace(CONFIG, bind="0.0.0.0", insecure=True).bind == "0.0.0.0"


def test_credentials_that_tell_clients_apart_allow_a_bind_beyond_loopback(tmp_path: Path) -> None:
    files = CertificateFolder(tmp_path)
    secured = replace(CONFIG, bind="0.0.0.0", credentials=files.mutual())
    assert not secured.insecure


@pytest.mark.parametrize(
    "change", [{"decode_layout": Layout(block_tokens=16, dcp=2)}, {"metrics_port": 0}]
)
def test_what_travels_in_plaintext_beyond_loopback_needs_insecure_beside_credentials(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    secured = replace(CONFIG, bind="0.0.0.0", credentials=CertificateFolder(tmp_path).mutual())
    with pytest.raises(InsecureBindError, match="travels in plaintext"):
        replace(secured, **change)
    assert replace(secured, insecure=True, **change).bind == "0.0.0.0"


def test_a_service_needs_a_certificate_to_speak_tls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a server that speaks TLS needs a certificate"):
        replace(CONFIG, credentials=CertificateFolder(tmp_path).trusting())


def test_instances_are_those_of_all_roles() -> None:
    assert replace(CONFIG, num_prefill=2, num_decode=3).num_instances == 5


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "::1", "127.0.0.5"])
def test_loopback_is_refused_when_nodes_have_several_addresses(bind: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("given: bind=" + bind)) as caught:
        require_reachable_bind(bind, frozenset({"10.0.0.2", "10.0.0.1"}))
    assert caught.value.given == {"bind": bind, "nodes": ["10.0.0.1", "10.0.0.2"]}


@pytest.mark.parametrize(
    ("bind", "hosts"),
    [
        ("127.0.0.1", {"10.0.0.1"}),
        ("127.0.0.1", set()),
        ("0.0.0.0", {"10.0.0.1", "10.0.0.2"}),
        ("::", {"10.0.0.1", "10.0.0.2"}),
        ("10.0.0.1", {"10.0.0.1", "10.0.0.2"}),
    ],
)
def test_one_address_or_a_bind_beyond_loopback_is_reachable(bind: str, hosts: set[str]) -> None:
    require_reachable_bind(bind, frozenset(hosts))


def test_kv_events_and_block_samples_are_off_unless_asked_for() -> None:
    assert (CONFIG.kv_events, CONFIG.sample_block_every) == (None, None)
    assert replace(CONFIG, kv_events=KvEventsConfig(), sample_block_every=100).num_instances == 3
    with pytest.raises(ConfigError, match="sample_block_every must be an integer"):
        replace(CONFIG, sample_block_every=0)


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"hash_form": "int"}, ["uint64", "bytes"]),
        ({"encoding": "msgpack"}, ["array", "map"]),
        ({"buffer_batches": 0}, ">= 1"),
    ],
    ids=str,
)
def test_kv_events_of_an_unknown_form_are_refused(change: Any, allowed: object) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))) as caught:
        KvEventsConfig(**change)
    assert caught.value.allowed == allowed


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"endpoint": "tcp://*:5557"}, InsecureBindError),
        ({"replay_endpoint": "tcp://0.0.0.0:*"}, InsecureBindError),
        ({"endpoint": "ipc:///tmp/events"}, ConfigError),
        ({"replay_endpoint": "tcp://127.0.0.1:65534"}, ConfigError),
        ({"endpoint": "127.0.0.1:5557", "bind": True}, ConfigError),
    ],
    ids=str,
)
def test_kv_events_that_not_every_instance_could_publish_are_refused(
    change: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        replace(CONFIG, kv_events=KvEventsConfig(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "tcp://192.0.2.1:5557", "replay_endpoint": None},
        {"endpoint": "tcp://127.0.0.1:5557", "bind": True, "replay_endpoint": "tcp://[::1]:65533"},
    ],
    ids=str,
)
def test_kv_events_may_be_sent_to_a_reader_or_published_at_ports_that_count_up(change: Any) -> None:
    events = KvEventsConfig(**change)
    assert replace(CONFIG, kv_events=events).kv_events == events


def test_the_hash_block_is_the_most_of_which_all_blocks_are_multiples() -> None:
    config = replace(
        CONFIG,
        num_prefill=2,
        prefill_layout=Layout(block_tokens=16, pcp=3),
        num_decode=3,
        decode_layout=Layout(block_tokens=8, dcp=4),
    )
    assert (config.hash_block_tokens, config.num_ranks) == (16, 2 * 3 + 3 * 4)


@pytest.mark.parametrize("name", ["prefill_layout", "decode_layout"])
@pytest.mark.parametrize(
    ("change", "given", "allowed"),
    [
        ({"tp": 2}, {"tp": 2}, {"tp": 1}),
        ({"pp": 2}, {"pp": 2}, {"pp": 1}),
        ({"kind": "vllm"}, {"kind": "vllm"}, {"kind": "grid"}),
    ],
)
def test_a_layout_that_cannot_be_computed_with_is_refused_naming_the_axis(
    name: str, change: dict[str, Any], given: Any, allowed: Any
) -> None:
    role = name.removesuffix("_layout")
    changes: dict[str, Any] = {name: Layout(block_tokens=16, **change)}
    with pytest.raises(ConfigError, match=f"^{role}: the reference engine deals") as caught:
        replace(CONFIG, **changes)
    assert (caught.value.given, caught.value.allowed) == (given, allowed)


def test_several_ranks_are_refused_beyond_the_cpu() -> None:
    assert replace(CONFIG, device="cuda").num_ranks == 3
    with pytest.raises(ConfigError, match="compute on the CPU only; given: cuda"):
        replace(CONFIG, device="cuda", decode_layout=Layout(block_tokens=16, dcp=2))
