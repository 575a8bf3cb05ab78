"""Every event recorded from vLLM's pools travels in both encodings (FORMAT.md, "Event").

The folder is taken from KVFERRY_GOLDEN when set.
"""

import json
from collections.abc import Iterator
from typing import Any, get_args

import msgpack
import pytest
from tests.golden.folder import IS_OWN, lines_of
from tests.golden.replay import Replay

from kvferry.cluster.kv_events_translation import kv_events
from kvferry.proto.ids import BlockHash
from kvferry.proto.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    ExtraKey,
    HashForm,
    KvEvent,
    KvEventBatch,
    external_hash,
)
from kvferry.proto.kv_events_codec import EventEncoding, decode_batch, encode_batch


def recorded(profile: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of every step that has some."""
    for line in lines_of(f"scenarios_{profile}.jsonl"):
        for step in json.loads(line)["steps"]:
            if events := step.get("expect", {}).get("state", {}).get("events"):
                yield events


def extra_key(recorded_key: Any) -> ExtraKey:
    if isinstance(recorded_key, dict):
        return bytes.fromhex(recorded_key["hex"])
    made: ExtraKey = tuple(recorded_key) if isinstance(recorded_key, list) else recorded_key
    return made


def event_of(told: dict[str, Any], form: HashForm) -> KvEvent:
    def hash_of(text: str) -> ExternalHash:
        return external_hash(BlockHash(bytes.fromhex(text)), form)

    if told["type"] == "cleared":
        return AllBlocksCleared()
    hashes = tuple(map(hash_of, told["hashes"]))
    if told["type"] == "removed":
        return BlockRemoved(block_hashes=hashes, medium=told["medium"], group_idx=told.get("group"))
    extra = told["extra"]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if told["parent"] is None else hash_of(told["parent"]),
        token_ids=tuple(told["tokens"]),
        block_size=told["block_size"],
        lora_id=told["lora_id"],
        medium=told["medium"],
        lora_name=told["lora_name"],
        extra_keys=None
        if extra is None
        else tuple(None if one is None else tuple(map(extra_key, one)) for one in extra),
        group_idx=told.get("group"),
        kv_cache_spec_kind=told.get("spec_kind"),
        kv_cache_spec_sliding_window=told.get("spec_window"),
    )


@pytest.mark.parametrize("form", get_args(HashForm))
@pytest.mark.parametrize("encoding", get_args(EventEncoding))
@pytest.mark.parametrize("profile", ["017", "032"])
def test_recorded_events_are_read_back_equal(
    profile: str, encoding: EventEncoding, form: HashForm
) -> None:
    steps = list(recorded(profile))
    assert steps or not IS_OWN
    for told in steps:
        batch = KvEventBatch(ts=1.5, events=tuple(event_of(event, form) for event in told))
        assert decode_batch(encode_batch(batch, encoding)) == batch


def test_events_of_017_have_exactly_the_places_of_017() -> None:
    lengths = set()
    for told in recorded("017"):
        batch = KvEventBatch(ts=1.5, events=tuple(event_of(event, "uint64") for event in told))
        _, events, _ = msgpack.unpackb(encode_batch(batch, "array"))
        lengths |= {(event[0], len(event)) for event in events}
    expected = {("BlockStored", 9), ("BlockRemoved", 3), ("AllBlocksCleared", 1)}
    assert lengths == expected if IS_OWN else lengths <= expected


def test_the_short_form_of_a_hash_is_the_recorded_one() -> None:
    chains = [
        vector["expect"]
        for name in ("hashing_017.jsonl", "hashing_032.jsonl")
        for vector in map(json.loads, lines_of(name))
        if "low64" in vector["expect"]
    ]
    assert chains or not IS_OWN
    for chain in chains:
        hashes = [BlockHash(bytes.fromhex(text)) for text in chain["hashes"]]
        assert [str(external_hash(each, "uint64")) for each in hashes] == chain["low64"]


def test_what_a_pool_of_032_tells_is_published_as_vllm_published_it() -> None:
    for line in lines_of("scenarios_032.jsonl"):
        scenario = json.loads(line)
        if "refusal" in scenario:
            continue
        replay = Replay(scenario)
        for step in scenario["steps"]:
            replay.run(step)
            for form in get_args(HashForm):
                published = list(kv_events(replay.events, form))
                recorded_events = step["expect"]["state"]["events"]
                assert published == [event_of(event, form) for event in recorded_events]
