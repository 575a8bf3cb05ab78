"""The gRPC front of one worker: where it may listen, and what it asks of every caller."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.integration.transfer_peer import hash_of, new_worker
from tests.pulling import pull_blocks

from kvferry.proto.errors import (
    BadInputError,
    ConfigError,
    InsecureBindError,
    MessageTooLargeError,
    PortTakenError,
)
from kvferry.proto.grpc_channel import open_channel
from kvferry.proto.grpc_options import MAX_MESSAGE_BYTES, SERVER_SLACK_BYTES
from kvferry.proto.ids import FIRST_GROUP, BlockId, Incarnation, InstanceId
from kvferry.proto.v1 import transfer_pb2, transfer_pb2_grpc
from kvferry.worker.actor import StoreConfig, WorkerActor
from kvferry.worker.grpc_errors import error_of_call
from kvferry.worker.pull import BlockRun, PullOutcome
from kvferry.worker.service import WorkerService
from kvferry.worker.transfer_server import SERVICE_NAME

TIMEOUT_S = 5.0


@contextmanager
def here() -> Iterator[WorkerService]:
    worker = new_worker(50, num_blocks=9, num_layers=2, head_size=64)
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture
def listening() -> Iterator[WorkerService]:
    """A worker whose server the test starts."""
    with here() as worker:
        yield worker


def pull_one(
    worker: WorkerService, address: str, incarnation: int, *, lease_id: str = ""
) -> PullOutcome:
    run = BlockRun(group_id=FIRST_GROUP, hashes=[hash_of(0)], block_ids=[BlockId(1)])
    return pull_blocks(
        worker, address, [run], incarnation=incarnation, lease_id=lease_id, timeout_s=5.0
    )


def test_a_taken_port_is_refused_by_number(listening: WorkerService) -> None:
    port = int(listening.serve().rsplit(":", 1)[1])
    with here() as worker, pytest.raises(PortTakenError, match=f"given: 127.0.0.1:{port};"):
        worker.serve(port=port)


def test_a_bind_beyond_loopback_is_refused_without_insecure() -> None:
    with here() as worker:
        with pytest.raises(InsecureBindError, match=r"given: 0\.0\.0\.0"):
            worker.serve(bind="0.0.0.0")
        assert worker.serve(bind="0.0.0.0", insecure=True).startswith("0.0.0.0:")


def test_an_address_of_another_machine_is_refused() -> None:
    with here() as worker, pytest.raises(ConfigError, match=r"given: 192\.0\.2\.1"):
        worker.serve(bind="192.0.2.1", insecure=True)


def test_a_call_without_a_deadline_is_refused(listening: WorkerService) -> None:
    with grpc.insecure_channel(listening.serve()) as channel:
        stub = transfer_pb2_grpc.TransferStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Describe(transfer_pb2.DescribeRequest())
    error = error_of_call(refused.value, "here")
    assert type(error) is BadInputError
    assert error.message == "a call without a deadline"


def test_the_log_says_who_asks_for_how_many_blocks_under_which_lease(
    listening: WorkerService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvferry.worker.transfer_server")
    with here() as worker:
        pull_one(worker, listening.serve(), 50, lease_id="lease-7")
    (line,) = [one.getMessage() for one in caplog.records]
    assert re.fullmatch(r"ipv4:127\.0\.0\.1:\d+ asks for 1 blocks, lease 'lease-7'", line)


def test_the_health_service_says_serving(listening: WorkerService) -> None:
    with grpc.insecure_channel(listening.serve()) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        # The stubs on PyPI do not know the stub's methods.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(request, timeout=10.0)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_store_instance_starts_serves_and_stops() -> None:
    actor = WorkerActor()
    with here() as worker:
        started = actor.start(
            StoreConfig(
                instance_id=InstanceId("store-0"),
                incarnation=Incarnation(4),
                identity=worker.identity,
                num_blocks=9,
                block_tokens=2,
            )
        )
        assert started.pid == os.getpid()
        outcome = pull_one(worker, started.address, 4)
        assert (outcome.num_blocks_of_run, outcome.error_type) == ((0,), "NotFoundError")
        assert actor.stats().of("served").num_started == 1
        actor.stop()
        assert pull_one(worker, started.address, 4).error_type == "UnavailableError"


@pytest.mark.parametrize("num_bytes", [MAX_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES + (8 << 20)])
def test_a_message_that_is_too_large_is_refused_with_both_sizes(
    listening: WorkerService, caplog: pytest.LogCaptureFixture, num_bytes: int
) -> None:
    address = listening.serve()
    with grpc.insecure_channel(address) as channel:
        send: Any = channel.unary_unary(f"/{SERVICE_NAME}/Describe")
        with pytest.raises(grpc.RpcError) as refused:
            send(bytes(num_bytes), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = error_of_call(refused.value, address)
    assert type(error) is MessageTooLargeError
    if num_bytes <= MAX_MESSAGE_BYTES + SERVER_SLACK_BYTES:
        assert (error.given, error.allowed) == (num_bytes, MAX_MESSAGE_BYTES)
        assert "a DescribeRequest of more bytes than this server takes" in caplog.messages[0]
    else:
        # gRPC refuses it, and no handler hears of it.
        assert (error.given, error.allowed) == (num_bytes, MAX_MESSAGE_BYTES + SERVER_SLACK_BYTES)
        assert caplog.messages == []


def test_a_client_does_not_send_what_is_too_large(listening: WorkerService) -> None:
    address = listening.serve()
    with open_channel(address, None) as channel:
        send: Any = channel.unary_unary(f"/{SERVICE_NAME}/Describe")
        with pytest.raises(grpc.RpcError) as refused:
            send(bytes(MAX_MESSAGE_BYTES + 1), timeout=TIMEOUT_S)
    error = error_of_call(refused.value, address)
    assert type(error) is MessageTooLargeError
    assert (error.given, error.allowed) == (MAX_MESSAGE_BYTES + 1, MAX_MESSAGE_BYTES)


@pytest.mark.parametrize("reflection", [True, False])
def test_only_with_reflection_a_server_tells_of_its_services(
    listening: WorkerService, reflection: bool
) -> None:
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
    ]
    with open_channel(listening.serve(reflection=reflection), None) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = stub.ServerReflectionInfo(iter(asked), timeout=TIMEOUT_S)
        if not reflection:
            with pytest.raises(grpc.RpcError) as refused:
                next(answers)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        services = {service.name for service in next(answers).list_services_response.service}
        assert services == {
            SERVICE_NAME,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert b"FetchRequest" in next(answers).file_descriptor_response.file_descriptor_proto[0]
