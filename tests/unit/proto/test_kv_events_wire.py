"""The frames around KV events, and the endpoints they are sent from."""

import pytest

from kvferry.proto.errors import BadInputError, ConfigError, InsecureBindError
from kvferry.proto.kv_events_endpoint import (
    binds_by_vllm_rule,
    endpoint_of_rank,
    require_safe_endpoint,
)
from kvferry.proto.kv_events_frames import (
    Numbered,
    ReplayForm,
    end_frames,
    live_frames,
    read_live,
    read_replay,
    replay_frames,
    seq_from_bytes,
)

SEQ_258 = bytes([0, 0, 0, 0, 0, 0, 1, 2])


def test_a_live_message_is_topic_number_and_payload() -> None:
    assert live_frames(b"t", 258, b"x") == [b"t", SEQ_258, b"x"]
    assert read_live([b"t", SEQ_258, b"x"]) == Numbered(b"t", 258, b"x")


@pytest.mark.parametrize("frames", [[], [b"t", SEQ_258], [b"t", b"12", b"x"], [b"t"] * 4])
def test_other_live_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadInputError):
        read_live(frames)


@pytest.mark.parametrize(
    ("form", "reply", "end", "topic"),
    [
        ("plain", [b"", SEQ_258, b"x"], [b"", b"\xff" * 8, b""], None),
        ("topic", [b"", b"t", SEQ_258, b"x"], [b"", b"", b"\xff" * 8, b""], b"t"),
    ],
)
def test_replies_of_both_forms_are_written_and_read(
    form: ReplayForm, reply: list[bytes], end: list[bytes], topic: bytes | None
) -> None:
    assert replay_frames(form, b"t", 258, b"x") == reply
    assert read_replay(reply) == Numbered(topic, 258, b"x")
    assert end_frames(form) == end
    assert read_replay(end) is None


@pytest.mark.parametrize("frames", [[], [b"", b"x"], [b"t", SEQ_258, b"x"], [b"", b"1", b"x"]])
def test_other_replies_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadInputError):
        read_replay(frames)


def test_a_number_is_eight_bytes() -> None:
    assert seq_from_bytes(SEQ_258) == 258
    with pytest.raises(BadInputError, match="given: 7; allowed: 8 bytes"):
        seq_from_bytes(b"1234567")


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://[::]:5557", True),
        ("ipc://some/path", True),
        ("inproc://events", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://reader:5557", False),
    ],
)
def test_wildcards_and_endpoints_of_one_machine_are_bound(endpoint: str, binds: bool) -> None:
    assert binds_by_vllm_rule(endpoint) is binds


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:*", "tcp://[::]:1"])
def test_beyond_loopback_only_the_insecure_listen(endpoint: str) -> None:
    with pytest.raises(InsecureBindError):
        require_safe_endpoint(endpoint, insecure=False)
    require_safe_endpoint(endpoint, insecure=True)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5557", "tcp://localhost:*", "tcp://[::1]:1", "inproc://x"]
)
def test_loopback_needs_no_permission(endpoint: str) -> None:
    require_safe_endpoint(endpoint, insecure=False)


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:5557", "tcp://host", "tcp://:1", "udp://h:1"])
def test_an_endpoint_of_another_form_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="an endpoint that cannot be used"):
        require_safe_endpoint(endpoint, insecure=True)


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:0", 3, "tcp://127.0.0.1:0"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("ipc://path", 0, "ipc://path"),
    ],
)
def test_every_rank_has_an_endpoint_of_its_own(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["ipc://path", "tcp://*:65535", "tcp://*:port"])
def test_an_endpoint_that_cannot_be_counted_up_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        endpoint_of_rank(endpoint, 1)
