"""Drives a cache manager through a recorded scenario and compares everything after every step."""

from typing import Any

import pytest
from tests.unit.coordinator.caches import spec_of
from tests.unit.coordinator.pool_checks import check_pool

from kvferry.coordinator.cache_config import CacheConfig
from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.hit_finders import GroupBlocks
from kvferry.coordinator.pool_events import MEDIUM, Cleared, PoolEvent, Removed
from kvferry.coordinator.request_state import KnownContent, RequestState
from kvferry.proto.errors import BadInputError
from kvferry.proto.extra_keys import LoraKey, MultimodalItem, RequestKeys
from kvferry.proto.hashing import DEFAULT_SEED_032, HashChain, make_scheme
from kvferry.proto.ids import BlockId, GroupId, RequestId, unpack_group
from kvferry.proto.specs import (
    ChunkedLocalSpec,
    CrossSpec,
    FullSpec,
    LayerSpec,
    MambaSpec,
    MlaSpec,
    SinkSpec,
    SlidingWindowSpec,
)

Json = dict[str, Any]

# vLLM 0.17 gives no text with this assertion, so the recording has no name for it.
NAMED_HERE = {"sink_not_multiple_of_block": "unnamed_assertion"}


KINDS: dict[str, type[LayerSpec]] = {
    "full": FullSpec,
    "mla": MlaSpec,
    "sink": SinkSpec,
    "sliding_window": SlidingWindowSpec,
    "chunked_local": ChunkedLocalSpec,
    "mamba": MambaSpec,
    "cross": CrossSpec,
}


def settings_of(group: Json) -> Json:
    """Return what a recorded group or layer is made of, as it is called here."""
    renamed = {"sliding_window": "window_tokens"}
    return {
        renamed.get(name, name): value
        for name, value in group.items()
        if name not in ("kind", "eagle")
    }


def config_of(scenario: Json) -> CacheConfig:
    config = scenario["config"]
    made = CacheConfig(
        num_blocks=config["num_blocks"],
        groups=tuple(
            spec_of(KINDS[group["kind"]], **settings_of(group)) for group in config["groups"]
        ),
        hash_block_tokens=config["hash_block_tokens"],
        max_model_len=config["max_model_len"],
        profile=scenario["profile"],
        enable_caching=config["enable_caching"],
        use_eagle=config["use_eagle"],
        eagle_groups=tuple(
            GroupId(i) for i, group in enumerate(config["groups"]) if group.get("eagle")
        ),
        dcp=config["dcp"],
        pcp=config["pcp"],
        watermark=config.get("watermark", 0.0),
        max_in_flight_tokens=config.get("max_in_flight_tokens"),
        retention_interval=config.get("retention_interval"),
        record_events=config["events"],
    )
    if scenario["profile"] == "0.32":
        assert made.scheduler_block_tokens == config["scheduler_block_tokens"]
    return made


def reason_of(error: BadInputError) -> str:
    reason = str(error.given["reason"])
    return NAMED_HERE.get(reason, reason)


class Replay:
    """One manager in the course of one scenario."""

    def __init__(self, scenario: Json) -> None:
        config = scenario["config"]
        self.profile = scenario["profile"]
        self.manager = CacheManager(config_of(scenario))
        self.scheme = make_scheme(
            seed=DEFAULT_SEED_032 if config["seed"] is None else config["seed"],
            hash_block_tokens=config["hash_block_tokens"],
            algorithm=config["algorithm"],
            key_format=self.profile,
        )
        self.requests: dict[str, RequestState] = {}
        self.chains: dict[str, HashChain] = {}
        self.hits: dict[str, tuple[GroupBlocks, int]] = {}
        self.events: list[PoolEvent] = []

    def run(self, step: Json) -> None:
        expect = step["expect"]
        if "refused" in expect:
            with pytest.raises(BadInputError) as caught:
                getattr(self, step["op"])(step, expect)
            assert reason_of(caught.value) == expect["refused"]["reason"]
        else:
            getattr(self, step["op"])(step, expect)
        assert self.state() == expect["state"]
        check_pool(self.manager.pool)

    def state(self) -> Json:
        pool = self.manager.pool
        self.events = pool.take_events()
        return {
            "free": pool.num_free_blocks,
            "queue": list(pool.free_order()),
            "usage": pool.usage,
            "keys": pool.num_keys,
            "events": [
                plain for event in self.events for plain in plain_events(event, self.profile)
            ],
        }

    def open(self, step: Json, expect: Json) -> None:
        lora = step.get("lora")
        keys = RequestKeys(
            lora=LoraKey(name=lora["name"], path=lora["path"]) if lora else None,
            salt=step.get("salt"),
            multimodal=tuple(
                MultimodalItem(identifier=identifier, offset=offset, length=length)
                for identifier, offset, length in step.get("mm") or []
            ),
        )
        name, tokens = step["request"], list(step["tokens"])
        self.chains[name] = HashChain(self.scheme, keys)
        self.requests[name] = RequestState(
            request_id=RequestId(name),
            num_tokens=len(tokens),
            num_prompt_tokens=len(tokens),
            skip_reading_prefix_cache=step.get("skip_lookup", False),
            content=KnownContent(tokens=tokens, keys=keys, lora_id=lora["id"] if lora else None),
        )
        self.hash(name, tokens, expect)

    def append(self, step: Json, expect: Json) -> None:
        request = self.requests[step["request"]]
        request.num_tokens += len(step["tokens"])
        assert request.content is not None
        request.content.tokens.extend(step["tokens"])
        self.hash(step["request"], step["tokens"], expect)

    def hash(self, name: str, tokens: list[int], expect: Json) -> None:
        if not self.manager.pool.enable_caching:
            # The engine then never set the root of its chains, so what it recorded is no hash.
            return
        new = self.chains[name].extend(tokens)
        self.requests[name].hashes.extend(new)
        assert [block_hash.hex() for block_hash in new] == expect["hashes"]

    def lookup(self, step: Json, expect: Json) -> None:
        request = self.requests[step["request"]]
        blocks, num_computed = self.manager.get_computed_blocks(request)
        self.hits[step["request"]] = blocks, num_computed
        assert num_computed == expect["num_computed"]
        assert [list(group) for group in blocks] == expect["blocks"]
        if self.profile == "0.32":
            assert request.shared_prefix_tokens == expect["shared_boundary"]

    def allocate(self, step: Json, expect: Json) -> None:
        request = self.requests[step["request"]]
        with_lookup = step.get("with_lookup", False)
        blocks, hit_tokens = self.hits[step["request"]] if with_lookup else (None, 0)
        new = self.manager.allocate_slots(
            request,
            step["num_new_tokens"],
            num_new_computed_tokens=step["num_new_computed_tokens"],
            new_computed_blocks=blocks,
            num_lookahead_tokens=step["lookahead"],
            num_external_computed_tokens=step["external"],
            delay_cache_blocks=step["delay_cache"],
            num_encoder_tokens=step["encoder_tokens"],
            full_sequence_must_fit=step.get("must_fit", False),
            reserved_blocks=step.get("reserved", 0),
            has_scheduled=step.get("has_scheduled", False),
        )
        assert (None if new is None else [list(group) for group in new]) == expect["blocks"]
        table = self.manager.block_table(request.request_id)
        assert [list(group) for group in table] == expect["table"]
        if new is not None and with_lookup:
            self.manager.record_admission(request, hit_tokens)

    def advance(self, step: Json, expect: Json) -> None:
        self.requests[step["request"]].num_computed_tokens = step["num_computed"]

    def cache(self, step: Json, expect: Json) -> None:
        self.manager.cache_blocks(self.requests[step["request"]], step["num_tokens"])

    def free(self, step: Json, expect: Json) -> None:
        self.manager.free(self.requests.pop(step["request"]).request_id)

    def preempt(self, step: Json, expect: Json) -> None:
        request = self.requests[step["request"]]
        self.manager.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def evict(self, step: Json, expect: Json) -> None:
        self.manager.evict_blocks([BlockId(block) for block in step["blocks"]])

    def reset(self, step: Json, expect: Json) -> None:
        assert self.manager.reset_prefix_cache() == expect["done"]

    def step(self, step: Json, expect: Json) -> None:
        self.manager.start_step()
        copies = self.manager.take_copies()
        assert [list(copy) for copy in copies] == expect.get("copies", [])
        self.manager.release_copies(copies)

    def final(self) -> Json:
        stats = self.manager.take_stats()
        pool = self.manager.pool
        hashed = []
        for block in range(pool.num_blocks):
            key = pool.key_of(BlockId(block))
            if key is not None:
                block_hash, group_id = unpack_group(key)
                hashed.append([block, block_hash.hex(), group_id])
        names = ("reset", "requests", "queries", "hits")
        preempted = ("preempted_requests", "preempted_queries", "preempted_hits")
        return {
            "stats": {name: getattr(stats, name) for name in (*names, *preempted)},
            "hashed": hashed,
        }


def plain_events(event: PoolEvent, profile: str) -> list[Json]:
    """Return an event in the form of the recording, which has a removal per block."""
    if isinstance(event, Cleared):
        return [{"type": "cleared"}]
    group = {"group": event.group_id} if profile == "0.32" else {}
    if isinstance(event, Removed):
        return [
            {"type": "removed", "hashes": [block_hash.hex()], "medium": MEDIUM, **group}
            for block_hash in event.hashes
        ]
    assert event.content is not None
    assert event.origin is not None
    made: Json = {
        "type": "stored",
        "hashes": [block_hash.hex() for block_hash in event.hashes],
        "parent": None if event.parent is None else event.parent.hex(),
        "tokens": list(event.content.tokens),
        "block_size": event.block_tokens,
        "medium": MEDIUM,
        "lora_id": event.content.lora_id,
        "lora_name": event.content.lora_name,
        "extra": plain_keys(event.content.extra),
    }
    if profile == "0.32":
        made |= group | {
            "spec_kind": event.origin.kind,
            "spec_window": event.origin.window_tokens,
        }
    return [made]


def plain_keys(value: object) -> object:
    if isinstance(value, tuple):
        return [plain_keys(item) for item in value]
    return {"hex": value.hex()} if isinstance(value, bytes) else value
