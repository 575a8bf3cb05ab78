"""Known failures between prefill and decode instances, each as a test; the number names the case.

Coordinator, engines, workers and gRPC are real; the model checks every byte it reads
(`token_engines.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
from tests.integration.token_engines import (
    TokenInstance,
    TokenService,
    request,
    token_service,
)
from tests.integration.token_model import answer, prompt
from tests.integration.token_peer import TokenPeer
from tests.waiting import wait_until

from kvferry.proto.ids import RequestId
from kvferry.proto.step_messages import LoadResult, StepReply
from kvferry.worker import bulk_server
from kvferry.worker.paths import Path

SOON_S = 4.0
"""Sooner than a pull is ended because its sender says nothing."""


@pytest.fixture(params=[(), ("bulk",)], ids=["grpc", "bulk"])
def paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ...]:
    """Ways in which a sender sends by itself, so that it may hold back."""
    monkeypatch.setattr(bulk_server, "MIN_BULK_BYTES", 1)
    found: tuple[Path, ...] = request.param
    return found


@pytest.fixture
def service(paths: tuple[Path, ...]) -> Iterator[TokenService]:
    with token_service(paths=paths) as running:
        yield running


# -- B31: a destination whose writer is still open ------------------------------------------------


@pytest.mark.parametrize("late", [True, False], ids=["late writer", "cancelled writer"])
def test_b31_no_byte_of_an_aborted_load_reaches_the_next_owner_of_its_blocks(
    service: TokenService, late: bool
) -> None:
    """The writer of a load is the pull itself: blocks come back when it has returned.

    A pull that hears of the abort returns at once, and what its sender goes on to send finds
    nobody to write it. One that does not keeps the blocks, and the next request waits.
    """
    sender = service.add("p", "prefill")
    taker = service.add("d", late=late, num_blocks=4)
    first, second = prompt(1, 9), prompt(2, 8)
    sender.engine.submit(request("seed", first, prefill_only=True))
    sender.result("seed")
    sender.worker.hold_at = 1
    taker.engine.submit(request("a", first))
    assert sender.worker.held.acquire(timeout=20.0)
    assert service.num_free("d") == 1

    taker.engine.abort(RequestId("a"))
    taker.engine.submit(request("b", second))
    if late:
        taker.ask_again()
        assert service.num_free("d") == 1
        taker.listen(0.0)
        assert (taker.finished("a"), taker.finished("b")) == (None, None)
        sender.worker.gate.set()
    tokens, finished = taker.result("b", within_s=SOON_S)
    assert (tokens, finished.reason) == (answer(second), "length")
    assert taker.result("a")[1].reason == "aborted"
    sender.worker.gate.set()
    assert sender.worker.ended.acquire(timeout=20.0)
    # Of three blocks, one at least was the other's.
    assert {1, 2} & set(taker.model.tables["b"])
    taker.model.memory.require(taker.model.tables["b"], second)
    service.require_nothing_held()


# -- B32: aborted loads of a peer that answers late or never --------------------------------------


# Each its own prompt: requests for the same blocks would share one load.
THREE = {name: prompt(seed, 9) for seed, name in enumerate("abc", start=3)}


def abort_loads(
    service: TokenService, taker: TokenInstance, prompts: Mapping[str, Sequence[int]]
) -> None:
    """Requests of two promised blocks each, aborted: all these blocks have an open writer."""
    num_free = 6 - 2 * len(prompts)
    for name, tokens in prompts.items():
        taker.engine.submit(request(name, tokens))
    wait_until(lambda: service.num_free("d") == num_free)
    for name in prompts:
        taker.engine.abort(RequestId(name))
    taker.engine.submit(request("fourth", prompt(2, 24)))
    taker.ask_again()
    assert service.num_free("d") == num_free


def require_all_free_and_served(
    service: TokenService, taker: TokenInstance, aborted: Iterable[str]
) -> None:
    """The fourth request, which needs all six blocks, is answered; all are free after it."""
    assert taker.result("fourth", within_s=SOON_S)[0] == answer(prompt(2, 24))
    assert {taker.result(name)[1].reason for name in aborted} == {"aborted"}
    service.require_nothing_held()
    assert service.num_free("d") == 6


def test_b32a_blocks_of_aborted_loads_come_back_when_the_peer_is_killed() -> None:
    with (
        TokenPeer(prompt(1, 9), num_blocks=4, hold_at=0) as peer,
        token_service(paths=()) as service,
    ):
        service.register("p", peer.read_line(), 4)
        service.holds("p", prompt(1, 9))
        taker = service.add("d", late=True, num_blocks=7)
        abort_loads(service, taker, {"a": prompt(1, 9)})
        assert peer.read_line() == "held"
        peer.kill()
        require_all_free_and_served(service, taker, "a")


def test_b32b_blocks_of_aborted_loads_come_back_with_the_answer(service: TokenService) -> None:
    taker, sender = taker_and_sender_that_holds(service)
    abort_loads(service, taker, THREE)
    sender.worker.gate.set()
    require_all_free_and_served(service, taker, THREE)


def test_b32ac_without_an_answer_they_come_back_with_the_lease_and_a_later_one_is_counted(
    paths: tuple[Path, ...],
) -> None:
    with token_service(paths=paths, step_lease_s=1.0) as service:
        taker, sender = taker_and_sender_that_holds(service)
        abort_loads(service, taker, THREE)
        require_all_free_and_served(service, taker, THREE)
        sender.worker.gate.set()
        for _ in "abc":
            assert sender.worker.ended.acquire(timeout=20.0)
        ignored = service.counter("ignored_messages")
        late = LoadResult(request_id=RequestId("a"), num_computed_tokens=8)
        assert service.step("d", load_results=(late,)) == StepReply()
        assert service.counter("ignored_messages") == ignored + 1
        taker.model.memory.require(taker.model.tables["fourth"], prompt(2, 24))
        service.require_nothing_held()


def test_b32_an_abort_that_is_heard_needs_no_answer_at_all(service: TokenService) -> None:
    sender = service.add("p", "prefill")
    compute_all(sender)
    sender.worker.hold_at = 0
    taker = service.add("d", num_blocks=7)
    for name, tokens in THREE.items():
        taker.engine.submit(request(name, tokens))
    wait_until(lambda: service.num_free("d") == 0)
    for name in "abc":
        taker.engine.abort(RequestId(name))
        assert taker.result(name, within_s=SOON_S)[1].reason == "aborted"
    assert not sender.worker.gate.is_set()
    service.require_nothing_held()


def compute_all(sender: TokenInstance) -> None:
    """Let an instance have the three prompts."""
    for name, tokens in THREE.items():
        sender.engine.submit(request(name, tokens, prefill_only=True))
        sender.result(name)


def taker_and_sender_that_holds(service: TokenService) -> tuple[TokenInstance, TokenInstance]:
    """A decode instance of six blocks whose pulls hear no cancel, and who has what it wants."""
    sender = service.add("p", "prefill")
    compute_all(sender)
    sender.worker.hold_at = 0
    return service.add("d", late=True, num_blocks=7), sender
