"""Replays what vLLM 0.32 recorded, step by step, through our cache manager."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvferry.coordinator.cache_manager import CacheManager
from kvferry.coordinator.pool_events import Cleared, PoolEvent, Stored
from kvferry.coordinator.request_state import RequestState
from kvferry.proto.errors import BadInputError
from kvferry.proto.ids import BlockHash, BlockId, RequestId, unpack_group

Json = dict[str, Any]

FOLDER = Path(os.environ.get("KVFERRY_GOLDEN", Path(__file__).parent / "data"))
SCENARIOS: list[Json] = [
    json.loads(line) for line in (FOLDER / "scenarios_032.jsonl").read_text().splitlines()
]
NOT_BUILT = {"admission", "partial_hits", "retention", "mamba_align"}


def skip_reason(scenario: Json) -> str | None:
    config = scenario["config"]
    kinds = [group["kind"] for group in config["groups"]]
    not_built = NOT_BUILT & set(scenario["features"])
    reasons = {
        "a refusal by the constructor": "refusal" in scenario,
        f"needs {', '.join(sorted(not_built))}": bool(not_built),
        f"{len(kinds)} groups": len(kinds) != 1,
        f"kind {kinds[0]}": kinds[0] not in ("full", "mla"),
        "eagle": config["use_eagle"],
        "context parallel": (config["dcp"], config["pcp"]) != (1, 1),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


REPLAYED = [scenario for scenario in SCENARIOS if skip_reason(scenario) is None]


class Replay:
    """Drives one manager through one scenario and compares everything after every step."""

    def __init__(self, config: Json) -> None:
        self.manager = CacheManager(
            config["num_blocks"],
            config["groups"][0]["block_tokens"],
            config["max_model_len"],
            config["enable_caching"],
        )
        self.record_events = config["events"]
        self.requests: dict[str, RequestState] = {}
        self.hits: dict[str, tuple[Any, int]] = {}

    def run(self, step: Json) -> None:
        expect = step["expect"]
        if "refused" in expect:
            with pytest.raises(BadInputError):
                getattr(self, step["op"])(step, expect)
        else:
            getattr(self, step["op"])(step, expect)
        assert self.state() == self.expected_state(expect["state"])

    def state(self) -> Json:
        pool = self.manager.pool
        return {
            "free": pool.num_free_blocks,
            "queue": list(pool.free_order()),
            "usage": pool.usage,
            "keys": pool.num_keys,
            "events": [_plain(event) for event in pool.take_events()] if self.record_events else [],
        }

    @staticmethod
    def expected_state(state: Json) -> Json:
        events = [
            {"type": event["type"], "hashes": event.get("hashes", [])} for event in state["events"]
        ]
        return {**state, "events": events}

    def open(self, step: Json, expect: Json) -> None:
        self.requests[step["request"]] = RequestState(
            request_id=RequestId(step["request"]),
            num_tokens=len(step["tokens"]),
            hashes=_hashes(expect["hashes"]),
            skip_reading_prefix_cache=step.get("skip_lookup", False),
        )

    def append(self, step: Json, expect: Json) -> None:
        request = self.requests[step["request"]]
        request.num_tokens += len(step["tokens"])
        request.hashes.extend(_hashes(expect["hashes"]))

    def lookup(self, step: Json, expect: Json) -> None:
        blocks, num_computed = self.manager.get_computed_blocks(self.requests[step["request"]])
        self.hits[step["request"]] = blocks, num_computed
        assert num_computed == expect["num_computed"]
        assert [list(group) for group in blocks] == expect["blocks"]

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
        assert expect["copies"] == []

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


def _hashes(texts: list[str]) -> list[BlockHash]:
    return [BlockHash(bytes.fromhex(text)) for text in texts]


def _plain(event: PoolEvent) -> Json:
    if isinstance(event, Cleared):
        return {"type": "cleared", "hashes": []}
    if isinstance(event, Stored):
        return {"type": "stored", "hashes": [unpack_group(key)[0].hex() for key in event.keys]}
    return {"type": "removed", "hashes": [unpack_group(event.key)[0].hex()]}


@pytest.mark.parametrize("scenario", REPLAYED, ids=lambda scenario: scenario["name"])
def test_every_step_of_a_recorded_scenario_gives_the_recorded_state(scenario: Json) -> None:
    replay = Replay(scenario["config"])
    for step in scenario["steps"]:
        replay.run(step)
    assert replay.final() == scenario["final"]


def test_scenarios_are_replayed_and_the_skipped_ones_are_told_by_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    skipped = Counter(reason for reason in map(skip_reason, SCENARIOS) if reason is not None)
    with capsys.disabled():
        print(f"\nreplayed {len(REPLAYED)} scenarios of vLLM 0.32; skipped {dict(skipped)}")
    assert len(REPLAYED) > 0
    assert len(REPLAYED) + skipped.total() == len(SCENARIOS)
