"""KV events of a service: what a reader rebuilds from them is what the coordinator's pools hold."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
from tests.integration.conftest import BLOCK_TOKENS, Service
from tests.integration.test_serving import ask, prompt, wait_until_idle, with_router

from kvferry.cluster.client import connect
from kvferry.cluster.kv_events_held import HeldKey
from kvferry.cluster.kv_events_outlet import KvEventsOutlet
from kvferry.cluster.kv_events_publisher import PublisherSettings
from kvferry.cluster.kv_events_sequence import Lost, Received, Update
from kvferry.cluster.kv_events_subscriber import KvEventsSubscriber, SubscriberSettings
from kvferry.cluster.record import ProcessRecord
from kvferry.cluster.serving.router import Router, Served
from kvferry.coordinator.actor import CoordinatorActor
from kvferry.coordinator.control_server import ControlServer
from kvferry.coordinator.registry import ProcessRegistry
from kvferry.proto.errors import NotFoundError
from kvferry.proto.hashing import hash_tokens, make_scheme
from kvferry.proto.ids import InstanceId, unpack_group
from kvferry.proto.kv_events import AllBlocksCleared, BlockStored, HashForm, KvEvent, external_hash
from kvferry.proto.kv_events_codec import EventEncoding
from kvferry.proto.messages import Describe, Description, KvEventsPlace

LIMIT_S = 30.0
SCHEME = make_scheme(seed="0", hash_block_tokens=BLOCK_TOKENS)
Start = Callable[..., Service]


@pytest.fixture
def start(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a service that publishes, with no instance yet."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    started: list[Service] = []

    def start(hash_form: HashForm = "uint64", **settings: object) -> Service:
        registry, record = ProcessRegistry(), ProcessRecord()
        made = PublisherSettings(**settings)  # type: ignore[arg-type]

        def start_coordinator() -> CoordinatorActor:
            coordinator = CoordinatorActor(
                scheme=SCHEME, registry=registry, check_invariants=True, tick_interval_s=0.05
            )
            coordinator.start(
                outlet=lambda: KvEventsOutlet(made, hash_form, lambda: "10.0.0.9", record)
            )
            return coordinator

        service = Service(tiny_model, start_coordinator)
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()


def place_of(service: Service, name: str) -> KvEventsPlace:
    described = service.coordinator.call(Describe())
    assert isinstance(described, Description)
    (place,) = [i.kv_events for i in described.instances if i.info.instance_id == name]
    assert place is not None
    return place


def reader_of(place: KvEventsPlace) -> KvEventsSubscriber:
    settings = SubscriberSettings(
        endpoint=place.endpoint,
        replay_endpoint=place.replay_endpoint,
        topic=place.topic,
        check_every_s=0.2,
    )
    return KvEventsSubscriber(settings)


def pool_content(service: Service, name: str, form: HashForm) -> dict[HeldKey, int]:
    """Every key of an instance's pool as events name it, with its copies."""
    core = service.coordinator._service
    assert core is not None
    content: dict[HeldKey, int] = {}
    for key, blocks in core.state.instance(InstanceId(name)).manager.pool.index_items():
        block_hash, group_id = unpack_group(key)
        content[HeldKey(external_hash(block_hash, form), group_id, "GPU")] = len(blocks)
    return content


def follow_until(reader: KvEventsSubscriber, content: dict[HeldKey, int]) -> list[Update]:
    """Return the updates up to when the reader knows exactly this."""
    deadline = time.monotonic() + LIMIT_S
    updates: list[Update] = []
    while not (reader.held.complete and dict(reader.held._copies) == content):
        assert time.monotonic() < deadline, (updates[-3:], len(reader.held), len(content))
        updates += reader.poll(0.1)
    return updates


def told(updates: list[Update]) -> list[KvEvent]:
    return [event for u in updates if isinstance(u, Received) for event in u.batch.events]


def serve(service: Service, *prompts: tuple[int, ...], max_tokens: int = 6) -> list[Served]:
    async def all_at_once(router: Router) -> list[Served]:
        requests = [ask(f"r{i}", tokens, max_tokens) for i, tokens in enumerate(prompts)]
        return list(await asyncio.gather(*(router.serve(request) for request in requests)))

    served = with_router(service.router(), all_at_once)
    wait_until_idle(service)
    return served


@pytest.mark.parametrize("form", get_args(HashForm))
@pytest.mark.parametrize("encoding", get_args(EventEncoding))
def test_a_reader_knows_exactly_what_every_pool_holds(
    start: Start, form: HashForm, encoding: EventEncoding
) -> None:
    service = start(form, encoding=encoding)
    service.add("p0", "prefill", num_blocks=40)
    service.add("d0", "decode", num_blocks=21, token_budget=24)
    shared = prompt(4, 80)
    with (
        closing(reader_of(place_of(service, "p0"))) as prefill,
        closing(reader_of(place_of(service, "d0"))) as decode,
    ):
        # More than fits: blocks are evicted, requests preempted, loads cancelled.
        prompts = [shared + prompt(10 + i, 5 * i + 1) for i in range(6)]
        served = serve(service, *prompts, max_tokens=24)
        assert sum(one.preemptions for one in served) >= 1
        follow_until(prefill, pool_content(service, "p0", form))
        updates = follow_until(decode, pool_content(service, "d0", form))
        assert {"BlockStored", "BlockRemoved"} <= {type(event).__name__ for event in told(updates)}


def test_stored_blocks_tell_the_tokens_that_hash_to_them(start: Start) -> None:
    service = start("bytes")
    service.add("p0", "prefill")
    service.add("d0", "decode")
    with closing(reader_of(place_of(service, "d0"))) as reader:
        (served,) = serve(service, prompt(1, 100), max_tokens=30)
        updates = follow_until(reader, pool_content(service, "d0", "bytes"))
    events = told(updates)
    assert isinstance(events[0], AllBlocksCleared)
    stored = [event for event in events if isinstance(event, BlockStored)]
    tokens = [token for event in stored for token in event.token_ids]
    # The last generated token is never written: 100 + 29 tokens are 16 full blocks.
    written = [*served.request.prompt_token_ids, *served.output_token_ids][:128]
    assert tokens == written
    hashes = [block_hash for event in stored for block_hash in event.block_hashes]
    assert hashes == [bytes(each) for each in hash_tokens(SCHEME, written)]
    parents = [None, *(event.block_hashes[-1] for event in stored[:-1])]
    assert [event.parent_block_hash for event in stored] == parents
    first = stored[0]
    assert (first.block_size, first.group_idx, first.kv_cache_spec_kind, first.medium) == (
        BLOCK_TOKENS,
        0,
        "full_attention",
        "GPU",
    )


def test_b49_a_reader_that_comes_late_sees_the_gap_and_has_it_replayed(start: Start) -> None:
    service = start()
    service.add("d0", "decode")
    serve(service, prompt(1, 40))
    with closing(reader_of(place_of(service, "d0"))) as reader:
        serve(service, prompt(2, 40))
        updates = follow_until(reader, pool_content(service, "d0", "uint64"))
    assert [update.seq for update in updates if isinstance(update, Received)] == list(
        range(len(updates))
    )


def test_b49_what_no_replay_brings_back_is_told_anew(start: Start) -> None:
    service = start(buffer_batches=2)
    service.add("d0", "decode")
    serve(service, prompt(1, 40), prompt(2, 70), max_tokens=30)
    with closing(reader_of(place_of(service, "d0"))) as reader:
        updates = follow_until(reader, pool_content(service, "d0", "uint64"))
    assert any(isinstance(update, Lost) for update in updates)


def test_the_next_life_of_an_instance_goes_on_in_the_same_stream(start: Start) -> None:
    service = start()
    service.add("d0", "decode")
    serve(service, prompt(1, 40))
    place = place_of(service, "d0")
    with closing(reader_of(place)) as reader:
        before = follow_until(reader, pool_content(service, "d0", "uint64"))
        assert len(reader.held) == 5
        service.engines["d0"].die()
        service.add("d0", "decode")
        assert place_of(service, "d0") == place
        after = follow_until(reader, {})
        serve(service, prompt(2, 16))
        after += follow_until(reader, pool_content(service, "d0", "uint64"))
    taken = [update.seq for update in before + after if isinstance(update, Received)]
    assert taken == list(range(len(before + after)))


def test_the_client_reads_the_events_of_an_instance(start: Start) -> None:
    service = start()
    service.add("d0", "decode")
    front = ControlServer(service.coordinator.call, bind="127.0.0.1", port=0, insecure=False)
    with connect(front.address) as ferry:
        with pytest.raises(NotFoundError, match=r"given: d9; allowed: \['d0'\]"):
            ferry.events(InstanceId("d9"))
        serve(service, prompt(1, 40))
        with closing(ferry.events(InstanceId("d0"))) as reader:
            follow_until(reader, pool_content(service, "d0", "uint64"))
        assert ferry.describe().instances[0].stats.first.requested == 40
    front.stop()


def test_a_reader_is_told_an_address_that_it_can_reach_or_none_when_it_listens() -> None:
    everywhere = PublisherSettings(
        endpoint="tcp://*:*", replay_endpoint="tcp://0.0.0.0:*", insecure=True
    )
    outlet = KvEventsOutlet(everywhere, "uint64", lambda: "10.0.0.9", ProcessRecord())
    outlet.open(InstanceId("d0"))
    place = outlet.place(InstanceId("d0"))
    assert place is not None
    assert place.topic == "kv@d0"
    for told in (place.endpoint, place.replay_endpoint):
        assert told is not None
        assert told.startswith("tcp://10.0.0.9:")
    outlet.close()
    to_a_reader = PublisherSettings(endpoint="tcp://127.0.0.1:9", bind=False)
    outlet = KvEventsOutlet(to_a_reader, "uint64", lambda: "10.0.0.9", ProcessRecord())
    for name in ("d0", "d1"):
        outlet.open(InstanceId(name))
        assert outlet.place(InstanceId(name)) is None
    outlet.close()
