"""Packing commands and replies for Ray."""

from dataclasses import dataclass
from typing import Any, cast, get_args

import pytest

from kvferry.proto import packed_messages
from kvferry.proto.errors import InvariantError
from kvferry.proto.extra_keys import RequestKeys
from kvferry.proto.ids import BlockHash, BlockId, Epoch, Incarnation, InstanceId, LeaseId, RequestId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import Command, Reply, Tick
from kvferry.proto.packed_messages import pack_command, pack_reply, unpack_command, unpack_reply
from kvferry.proto.step_messages import (
    AdmitAsk,
    Load,
    Progress,
    Release,
    RequestContent,
    RunningAsk,
    Scheduled,
    Source,
    Step,
    StepReply,
)

STEP = Step(
    call_id="c",
    epoch=Epoch(1),
    instance_id=InstanceId("a"),
    incarnation=Incarnation(1 << 60),
    progress=(
        Progress(
            request_id=RequestId("r"),
            num_tokens=9,
            num_computed_tokens=8,
            new_hashes=(BlockHash(b"x" * 32), BlockHash(b"y" * 32)),
        ),
    ),
    releases=(Release(request_id=RequestId("r"), handoff=True),),
    running=(RunningAsk(request_id=RequestId("s"), target_tokens=3),),
    waiting=(
        AdmitAsk(
            request_id=RequestId("t"),
            num_tokens=2,
            target_tokens=2,
            hashes=(),
            resumed=True,
            content=RequestContent(tokens=(1, 2), keys=RequestKeys(salt="s")),
        ),
    ),
    token_budget=7,
)
REPLY = StepReply(
    scheduled=(
        Scheduled(
            request_id=RequestId("s"),
            num_computed_tokens=0,
            granted_tokens=3,
            new_block_ids=((BlockId(1), BlockId(70_000)), (BlockId(0), BlockId(2))),
        ),
    ),
    loads=(
        Load(
            request_id=RequestId("t"),
            block_ids=((BlockId(4),), ()),
            num_hit_blocks=0,
            source=Source(
                instance_id=InstanceId("b"),
                incarnation=Incarnation(2),
                layout=Layout(block_tokens=16, pp=2, stage_layers=(1, 3)),
                rank_addresses=("127.0.0.1:1", "127.0.0.1:2"),
            ),
            lease_id=LeaseId("l"),
            ttl_s=0.1,
        ),
    ),
)


def test_a_step_and_its_reply_come_back_as_they_were() -> None:
    assert unpack_command(pack_command(STEP)) == STEP
    assert unpack_reply(pack_reply(REPLY)) == REPLY
    assert unpack_command(pack_command(Tick())) == Tick()


@pytest.mark.parametrize("kind", [*get_args(Command), *get_args(Reply)])
def test_every_message_has_only_fields_that_can_be_packed(kind: type) -> None:
    assert packed_messages._converter(kind) is packed_messages._record(kind)


def test_only_commands_are_packed_as_commands() -> None:
    with pytest.raises(InvariantError, match="not a message; given: StepReply"):
        pack_command(cast("Command", REPLY))
    with pytest.raises(InvariantError, match="not a message; given: Step;"):
        pack_reply(cast("Reply", STEP))


@pytest.mark.parametrize("kind", [set[int], object, tuple[Step, int], Step | Tick], ids=str)
def test_a_type_that_no_message_has_had_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(InvariantError, match="messages cannot hold this type"):
        packed_messages._converter(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithOptional:
    source: Source | None
    number: int | str | None


@pytest.mark.parametrize("source", [None, REPLY.loads[0].source])
def test_a_message_that_may_be_absent_comes_back_as_it_was(source: Source | None) -> None:
    pack, unpack = packed_messages._record(_WithOptional)
    message = _WithOptional(source=source, number="n")
    assert unpack(pack(message)) == message
