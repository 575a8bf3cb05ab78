"""Engines' commands over the real front: executed once, refused clearly, typed errors back."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, cast

import grpc
import pytest
from tests.builders import make_identity, make_info

from kvferry.cluster import grpc_control
from kvferry.cluster.coordinator_client import CoordinatorClient
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.errors import BadInputError, NotRegisteredError, UnavailableError
from kvferry.proto.grpc_channel import open_channel
from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import BlockId, Epoch, Incarnation, InstanceId, RequestId
from kvferry.proto.messages import Command, Describe, Registered, RegisterInstance
from kvferry.proto.packed_messages import SCHEMA, pack_command
from kvferry.proto.step_messages import AdmitAsk, Release, Step, StepReply
from kvferry.proto.v1 import control_pb2 as pb
from kvferry.proto.v1 import control_pb2_grpc

SCHEME = make_scheme(hash_block_tokens=16)


@contextmanager
def serving(port: int) -> Iterator[CoordinatorActor]:
    actor = CoordinatorActor(scheme=SCHEME, registry=ProcessRegistry(), check_invariants=True)
    actor.start(lambda call: ControlServer(call, bind="127.0.0.1", port=port, insecure=False))
    yield actor
    actor.stop()


@pytest.fixture
def address() -> Iterator[str]:
    with serving(0) as actor:
        yield str(actor.front_address())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def step(call_id: str, **parts: object) -> Step:
    known = {
        "epoch": Epoch(1),
        "instance_id": InstanceId("w"),
        "incarnation": Incarnation(1),
        "token_budget": 100,
    }
    return Step(call_id=call_id, **(known | parts))  # type: ignore[arg-type]


def register(client: CoordinatorClient) -> None:
    info = make_info(
        instance_id=InstanceId("w"),
        incarnation=Incarnation(1),
        identity=make_identity(),
        block_tokens=16,
        scheme=SCHEME,
    )
    reply = client.call(RegisterInstance(call_id="r", info=info), timeout_s=5)
    assert reply == Registered(epoch=Epoch(1))


def test_an_engine_registers_and_steps_and_a_repeat_has_no_second_effect(address: str) -> None:
    client = CoordinatorClient(address)
    register(client)
    ask = AdmitAsk(request_id=RequestId("q"), num_tokens=20, target_tokens=20, hashes=(b"h" * 32,))  # type: ignore[arg-type]
    replies = [client.call(step("1", waiting=(ask,)), timeout_s=5) for _ in range(2)]
    assert replies[0] == replies[1]
    assert isinstance(replies[0], StepReply)
    assert replies[0].scheduled[0].new_block_ids == ((BlockId(1), BlockId(2)),)
    done = (Release(request_id=ask.request_id),)
    again = client.call(step("2", releases=done, waiting=(ask,)), timeout_s=5)
    assert isinstance(again, StepReply)
    assert set(again.scheduled[0].new_block_ids[0]) == {1, 2}


def test_what_the_coordinator_refuses_comes_back_as_its_own_error(address: str) -> None:
    with pytest.raises(NotRegisteredError, match="unknown instance"):
        CoordinatorClient(address).call(step("1"), timeout_s=5)


def test_commands_of_clients_and_of_the_router_do_not_travel_this_way(address: str) -> None:
    with pytest.raises(BadInputError, match="not a command that travels packed"):
        CoordinatorClient(address).call(Describe(), timeout_s=5)


def test_another_schema_and_malformed_commands_are_refused(address: str) -> None:
    with closing(grpc.insecure_channel(address)) as channel:
        stub = control_pb2_grpc.ControlStub(channel)

        def status(request: pb.ExecuteRequest) -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as refused:
                stub.Execute(request, timeout=5)
            return cast("grpc.Call", refused.value).code()

        packed = pack_command(step("1"))
        assert status(pb.ExecuteRequest(schema=bytes(16), command=packed)) == (
            grpc.StatusCode.FAILED_PRECONDITION
        )
        for bad in (b"", packed[:-1], packed + b"\0", b"\x93\0\0\0"):
            assert status(pb.ExecuteRequest(schema=SCHEMA, command=bad)) == (
                grpc.StatusCode.INVALID_ARGUMENT
            )


def test_nobody_at_the_address_is_an_error_that_may_be_tried_again(address: str) -> None:
    nobody: Command = step("1")
    with pytest.raises(UnavailableError) as refused:
        CoordinatorClient("127.0.0.1:1").call(nobody, timeout_s=5)
    assert refused.value.retryable


def test_a_connection_that_failed_is_closed_and_calls_share_the_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An open one would find the front again by itself, and stay."""
    opened: list[Any] = []
    closed: list[Any] = []

    def open_and_note(*arguments: Any) -> Any:
        channel: Any = open_channel(*arguments)
        close = channel.close

        def note_and_close() -> None:
            closed.append(channel)
            close()

        channel.close = note_and_close
        opened.append(channel)
        return channel

    monkeypatch.setattr(grpc_control, "open_channel", open_and_note)
    port = free_port()
    client = CoordinatorClient(f"127.0.0.1:{port}")

    def fail(_: int) -> None:
        with pytest.raises(UnavailableError):
            client.call(step("1"), timeout_s=2)

    with closing(client), ThreadPoolExecutor(4) as threads:
        list(threads.map(fail, range(20)))
        assert set(closed) == set(opened)
        assert 1 < len(opened) <= 20
        with serving(port):
            list(threads.map(lambda _: register(client), range(8)))
        assert [one for one in opened if one not in closed] == opened[-1:]
    assert len(closed) == len(opened)
