from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import make_identity, make_info

from kvferry.proto import control_codec as codec
from kvferry.proto import description_codec
from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.ids import BlockHash, Epoch, Incarnation, InstanceId, LeaseId
from kvferry.proto.instance_stats import Held, Histogram, InstanceStats, Residency, TokenCounts
from kvferry.proto.layout import Layout
from kvferry.proto.messages import (
    AcquireLease,
    Description,
    Done,
    Forgotten,
    Holder,
    InstanceStatus,
    KvEventsPlace,
    Leased,
    Locate,
    Located,
    ReleaseLease,
    RenewLease,
    ResetIdentity,
)
from kvferry.proto.scheme import HashScheme
from kvferry.proto.step_messages import Source
from kvferry.proto.v1 import control_pb2 as pb

SCHEME = HashScheme(
    algorithm="sha256_cbor", key_format="0.32", hash_block_tokens=16, none_hash=b"\x01" * 32
)
IDENTITY = make_identity(num_layers=2, num_kv_heads=3, head_size=4)
SOURCE = Source(
    instance_id=InstanceId("store-0"),
    incarnation=Incarnation(2**53),
    layout=Layout(block_tokens=16, dcp=2),
    rank_addresses=("127.0.0.1:7", "127.0.0.1:8"),
)

counts = st.integers(0, 2**40)
texts = st.text(min_size=1, max_size=8)
digests = st.binary(min_size=32, max_size=32)
sources = st.builds(
    Source,
    instance_id=texts.map(InstanceId),
    incarnation=counts.map(Incarnation),
    layout=st.builds(Layout, block_tokens=st.integers(1, 64), tp=st.integers(1, 8)),
    rank_addresses=st.lists(texts, max_size=3).map(tuple),
)


def chains(size: int) -> st.SearchStrategy[tuple[BlockHash, ...]]:
    one = st.binary(min_size=size, max_size=size).map(BlockHash)
    return st.lists(one, max_size=5).map(tuple)


any_chain = st.sampled_from([16, 32]).flatmap(chains)


@settings(deadline=None, max_examples=50)
@given(any_chain)
def test_hashes_of_either_size_come_back_in_order(hashes: tuple[BlockHash, ...]) -> None:
    message = codec.hashes_to_pb(hashes)

    assert codec.hashes_from_pb(pb.Hashes.FromString(message.SerializeToString())) == hashes


@settings(deadline=None, max_examples=50)
@given(digest=digests, hashes=any_chain, call_id=texts, ttl_s=st.floats(0, 1e6), name=texts)
def test_commands_survive_the_wire(
    digest: bytes, hashes: tuple[BlockHash, ...], call_id: str, ttl_s: float, name: str
) -> None:
    locate = Locate(identity_digest=digest, hashes=hashes)
    anywhere = AcquireLease(call_id=call_id, identity_digest=digest, hashes=hashes, ttl_s=ttl_s)
    somewhere = AcquireLease(
        call_id=call_id,
        identity_digest=digest,
        hashes=hashes,
        ttl_s=ttl_s,
        instance_id=InstanceId(name),
    )
    renew = RenewLease(call_id=call_id, lease_id=LeaseId(name), ttl_s=ttl_s)
    release = ReleaseLease(call_id=call_id, lease_id=LeaseId(name))
    reset = ResetIdentity(call_id=call_id, identity_digest=digest)

    assert codec.locate_from_pb(codec.locate_to_pb(locate)) == locate
    assert codec.acquire_lease_from_pb(codec.acquire_lease_to_pb(anywhere)) == anywhere
    assert codec.acquire_lease_from_pb(codec.acquire_lease_to_pb(somewhere)) == somewhere
    assert codec.renew_lease_from_pb(codec.renew_lease_to_pb(renew)) == renew
    assert codec.release_lease_from_pb(codec.release_lease_to_pb(release)) == release
    assert codec.reset_from_pb(codec.reset_to_pb(reset)) == reset


@settings(deadline=None, max_examples=50)
@given(source=sources, num_hashes=counts, num_requests=counts, changed=st.booleans())
def test_replies_survive_the_wire(
    source: Source, num_hashes: int, num_requests: int, changed: bool
) -> None:
    located = Located(
        epoch=Epoch(num_requests),
        holders=(
            Holder(
                source=source,
                role="prefill",
                num_hashes=num_hashes,
                num_requests=num_requests,
                num_free_blocks=5,
            ),
            Holder(
                source=SOURCE,
                role="store",
                num_hashes=0,
                num_requests=0,
                num_free_blocks=num_hashes,
            ),
        ),
    )
    leased = Leased(lease_id=LeaseId("l"), source=source, num_hashes=num_hashes, ttl_s=1.5)
    nothing = Leased(lease_id=None, source=None, num_hashes=0, ttl_s=0.0)

    assert codec.located_from_pb(codec.located_to_pb(located)) == located
    assert codec.leased_from_pb(codec.leased_to_pb(leased)) == leased
    assert codec.leased_from_pb(codec.leased_to_pb(nothing)) == nothing
    assert codec.done_from_pb(codec.done_to_pb(Done(changed=changed))) == Done(changed=changed)
    forgotten = Forgotten(num_blocks=num_hashes)
    assert codec.forgotten_from_pb(codec.forgotten_to_pb(forgotten)) == forgotten


def test_a_description_keeps_every_field() -> None:
    info = make_info(
        SOURCE.instance_id,
        incarnation=SOURCE.incarnation,
        identity=IDENTITY,
        scheme=SCHEME,
        layout=Layout(block_tokens=16, tp=2, pcp=2, interleave=4, memory="LBHNS"),
        num_blocks=101,
        max_model_len=4096,
        max_in_flight_tokens=256,
        rank_pids=(12, 34),
        rank_metrics=("h:9100", "h:9101"),
    )
    histogram = Histogram(upper_ends_s=(0.5, 2.0), counts=(1, 0, 4), sum_s=12.25)
    stats = InstanceStats(
        first=TokenCounts(
            requests=3, requested=90, local_hit=16, remote_hit=32, computed=7, abandoned=5
        ),
        preempted=TokenCounts(requests=1, requested=20, local_hit=16),
        residency=Residency(
            lifetime=histogram,
            idle=Histogram(upper_ends_s=(0.5,), counts=(5, 0), sum_s=0.125),
            reuse_gap=Histogram(upper_ends_s=(0.5,), counts=(0, 0), sum_s=0.0),
        ),
    )
    status = InstanceStatus(
        info=info,
        num_used_blocks=1,
        num_free_blocks=99,
        num_cached_blocks=42,
        num_requests=3,
        stats=stats,
        held=Held(
            leases=1,
            leased_blocks=2,
            reservations=3,
            reserved_blocks=4,
            loads=5,
            loading_blocks=6,
            quarantined_blocks=7,
        ),
        state="suspect",
        kv_events=KvEventsPlace(endpoint="tcp://h:1", replay_endpoint="tcp://h:2", topic="kv@d0"),
    )
    bare = replace(status, stats=InstanceStats(), kv_events=None)
    without_replays = KvEventsPlace(endpoint="tcp://h:1", replay_endpoint=None, topic="")
    description = Description(
        epoch=Epoch(9),
        scheme=SCHEME,
        instances=(status, bare, replace(bare, kv_events=without_replays)),
        num_leases=4,
        num_handoffs=5,
        counters={"preemptions": 7, "steps": 0},
    )

    message = description_codec.description_to_pb(description)

    travelled = pb.DescribeReply.FromString(message.SerializeToString())
    assert description_codec.description_from_pb(travelled) == description


def test_hashes_of_mixed_or_unknown_size_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"one size in bytes; given: \[16, 32\]"):
        codec.hashes_to_pb([BlockHash(b"a" * 16), BlockHash(b"b" * 32)])
    with pytest.raises(BadInputError, match=r"given: \[20\]; allowed: \[16, 32\]"):
        codec.hashes_to_pb([BlockHash(b"a" * 20)])
    with pytest.raises(BadInputError, match="given: hash_bytes=0, hashes_bytes=32"):
        codec.hashes_from_pb(pb.Hashes(data=b"a" * 32, hash_bytes=0))


def test_a_truncated_hash_is_refused() -> None:
    with pytest.raises(
        BadInputError, match="given: hash_bytes=16, hashes_bytes=47; allowed: whole hashes"
    ):
        codec.hashes_from_pb(pb.Hashes(data=b"a" * 47, hash_bytes=16))


def test_a_request_without_its_names_is_refused() -> None:
    with pytest.raises(BadInputError, match="call_id is missing"):
        codec.release_lease_from_pb(pb.ReleaseLeaseRequest(lease_id="l"))
    with pytest.raises(BadInputError, match="lease_id is missing"):
        codec.renew_lease_from_pb(pb.RenewLeaseRequest(call_id="c", ttl_s=1.0))
    with pytest.raises(BadInputError, match="wrong size; given: 31; allowed: 32"):
        codec.locate_from_pb(pb.LocateRequest(identity_digest=b"d" * 31))
    with pytest.raises(BadInputError, match="identity_digest has the wrong size"):
        codec.reset_from_pb(pb.ResetRequest(call_id="c"))


def test_an_unknown_role_or_algorithm_is_refused_by_name() -> None:
    holder = pb.Holder(source=codec.source_to_pb(SOURCE), role="router")
    with pytest.raises(BadInputError, match="unknown role; given: router"):
        codec.located_from_pb(pb.LocateReply(holders=[holder]))
    with pytest.raises(ConfigError, match="unknown hash algorithm; given: md5"):
        codec.scheme_from_pb(pb.Scheme(algorithm="md5", key_format="0.32", hash_block_tokens=1))
