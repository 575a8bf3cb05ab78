"""A scheduler half before a made-up service, and made-up requests."""

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from tests.builders import make_identity

from kvferry.cluster.connectors.facts import EngineFacts
from kvferry.cluster.connectors.orders import HeldPrefix, SaveOrder
from kvferry.cluster.connectors.prefixes import Prefix
from kvferry.cluster.connectors.scheduler_half import (
    Scheduled,
    SchedulerHalf,
)
from kvferry.proto.extra_keys import NO_KEYS
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import BlockHash, Incarnation, InstanceId
from kvferry.proto.layout import Layout
from kvferry.proto.step_messages import Source

SCHEME = make_scheme(hash_block_tokens=4)
# Blocks of the engine have 8 tokens, hashes 4.
FACTS = EngineFacts(
    engine_id="e",
    incarnation=Incarnation(1),
    identity=make_identity(),
    scheme=SCHEME,
    layout=Layout(block_tokens=4),
    engine_block_tokens=8,
    version="a stand-in",
)
PEER = Source(
    instance_id=InstanceId("store"),
    incarnation=Incarnation(1),
    layout=Layout(block_tokens=4),
    rank_addresses=("127.0.0.1:1",),
)


class Answers:
    """The service: answers when it is told to."""

    def __init__(self) -> None:
        self.is_away = False
        self.num_failed = 0
        self.asked: list[tuple[BlockHash, ...]] = []
        self.open: list[Future[Prefix]] = []
        self.kept: list[int] = []
        self.resets = True
        self.store_address: str | None = "127.0.0.1:2"

    def look_up(self, hashes: Sequence[BlockHash]) -> "Future[Prefix]":
        self.asked.append(tuple(hashes))
        self.open.append(Future())
        return self.open[-1]

    def answer(self, num_blocks: int, *, num_stored: int = 0) -> None:
        holders = (HeldPrefix(source=PEER, num_blocks=num_blocks),) if num_blocks else ()
        self.open[-1].set_result(Prefix(holders=holders, num_stored=num_stored))

    def keep_when_stored(self, hashes: Sequence[BlockHash], ttl_s: float) -> None:
        self.kept.append(len(hashes))

    def wait_answered(self, timeout_s: float) -> None:
        pass

    def reset(self) -> bool:
        return self.resets

    def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_request(num_tokens: int, **changes: Any) -> Any:
    tokens = list(range(num_tokens))
    values = {
        "request_id": "r",
        "all_token_ids": tokens,
        "num_tokens": num_tokens,
        "num_preemptions": 0,
        "skip_reading_prefix_cache": False,
        "kv_transfer_params": None,
        "keys": NO_KEYS,
    }
    return SimpleNamespace(**(values | changes))


def scheduled(block_ids: Sequence[int], computed: int, tokens: int, *, starts: bool) -> Scheduled:
    return Scheduled(
        request_id="r",
        block_ids=block_ids,
        starts=starts,
        num_computed=computed,
        num_tokens=tokens,
    )


def hashes(request: Any) -> tuple[BlockHash, ...]:
    return hash_tokens(SCHEME, request.all_token_ids)


def saves(half: SchedulerHalf, *one: Scheduled) -> tuple[SaveOrder, ...]:
    return half.step(one, is_idle=False).saves


def make_half(answers: Answers, clock: Clock) -> SchedulerHalf:
    return SchedulerHalf(
        FACTS,
        answers,
        keys_of=lambda request: request.keys,
        store_address=lambda: answers.store_address,
        clock=clock,
    )
