"""Every recorded sizing vector of vLLM 0.17.1 and 0.32.0 (see FORMAT.md, section 3).

Refusals are compared by situation and by the numbers in vLLM's message, not by its wording. The
folder is taken from KVFERRY_GOLDEN when set.
"""

import json
import re
from typing import Any

import pytest
from tests.golden.folder import lines_of
from tests.golden.replay import KINDS, settings_of

from kvferry.coordinator.cache_groups import CacheGroup
from kvferry.coordinator.cache_tensors import CacheTensor
from kvferry.coordinator.sizing import CacheOptions, CachePlan, WorkerMemory, plan_cache
from kvferry.proto.errors import ConfigError
from kvferry.proto.specs import FullSpec, LayerSpec, RequestLimits

Json = dict[str, Any]

GIB = 1 << 30

# What vLLM raises, and the beginning of its message, for each of our refusals.
SITUATIONS = {
    "there is no memory for the KV cache": ("ValueError", "No available memory"),
    "one request of the greatest length does not fit into the KV cache": (
        "ValueError",
        "To serve at least one request",
    ),
    "not even a request of one token fits into the KV cache": (
        "ValueError",
        "Cannot auto-fit max_model_len",
    ),
    "without the hybrid cache all layers must be of one type": (
        "ValueError",
        "Hybrid KV cache manager is disabled|Failed to promote local KV cache specs",
    ),
    "layers of different windows cannot share one group": ("ValueError", "All attention layers"),
    "the page sizes of the layers cannot be made equal": (
        "NotImplementedError",
        ".*page size.* not divisible",
    ),
    "a page that is a state, or padded, does not grow with its block": ("AssertionError", "$"),
    "a sliding window cannot be dealt over context-parallel ranks": (
        "AssertionError",
        "DCP not support sliding window",
    ),
}


def vectors() -> list[Any]:
    found = []
    for name in ("sizing_017.jsonl", "sizing_032.jsonl"):
        for number, line in enumerate(lines_of(name), start=1):
            vector = json.loads(line)
            found.append(pytest.param(vector, id=f"{name}:{number}:{vector['name']}"))
    return found


def spec_of(plain: Json) -> LayerSpec:
    fields = settings_of(plain)
    if "shapes" in fields:
        fields["shapes"] = tuple(map(tuple, fields["shapes"]))
        fields["dtypes"] = tuple(fields["dtypes"])
    return KINDS[plain["kind"]](**fields)


def limits_of(vector: Json) -> RequestLimits:
    return RequestLimits(
        max_model_len=vector["max_model_len"],
        max_in_flight_tokens=vector["max_batched_tokens"],
        max_encoder_tokens=vector["max_encoder_tokens"],
        dcp=vector["dcp"],
        pcp=vector["pcp"],
        profile=vector["profile"],
    )


def plan(vector: Json, specs: list[LayerSpec]) -> CachePlan:
    options = CacheOptions(
        limits=limits_of(vector),
        order=vector.get("layout", "LBHNC"),
        hybrid=not vector.get("hybrid_disabled", False),
        num_blocks=vector.get("num_blocks_override"),
        fit_length=vector.get("asked_max_model_len") == -1,
    )
    pairs = zip(vector["workers"], vector["available"], strict=True)
    workers = [
        WorkerMemory(
            name=f"worker {rank}",
            layers={layer: specs[index] for layer, index in layers},
            available_bytes=available,
        )
        for rank, (layers, available) in enumerate(pairs)
    ]
    return plan_cache(workers, options)


def plain_group(group: CacheGroup) -> Json:
    plain: Json = {
        "kind": group.kind,
        "block_tokens": group.block_tokens,
        "page_bytes": group.page_bytes,
        "layers": list(group.layers),
    }
    spec = group.specs[0]
    if not group.uniform and isinstance(spec, FullSpec) and spec.kind == "full":
        plain |= {"sliding_window": spec.window_tokens, "chunk_tokens": spec.chunk_tokens}
    return plain


def plain_tensor(tensor: CacheTensor, profile: str) -> Json:
    plain: Json = {"bytes": tensor.num_bytes, "layers": list(tensor.layers)}
    if profile == "0.32":
        names = ("layer_stride", "block_stride", "offset")
        plain |= {name: getattr(tensor, name) for name in names}
    return plain


def plain_plan(found: CachePlan, vector: Json) -> Json:
    plain: Json = {
        "workers": [
            {
                "num_blocks": found.num_blocks,
                "groups": [plain_group(group) for group in worker.groups],
                "tensors": [plain_tensor(each, vector["profile"]) for each in worker.tensors],
            }
            for worker in found.workers
        ]
    }
    if found.concurrency is not None:
        plain["concurrency"] = found.concurrency
        plain["scheduler_kinds"] = [spec.kind for spec in found.group_specs]
    if found.max_model_len != vector["max_model_len"]:
        plain["max_model_len"] = found.max_model_len
    return plain


def require_same_refusal(refusal: ConfigError, error: Json) -> None:
    """Compare which refusal it is, and every number that vLLM's message holds."""
    kind, beginning = SITUATIONS[refusal.message]
    assert error["type"] == kind
    assert re.match(beginning, error["message"]), error["message"]
    numbers = re.search(r"seq len \((\d+)\), \(([\d.]+) GiB.* \(([\d.]+) GiB\)", error["message"])
    assert bool(numbers) == (beginning == "To serve at least one request")
    if numbers:
        estimate = re.search(r"maximum model length is (\d+)", error["message"])
        given = refusal.given
        assert int(numbers[1]) == given["max_model_len"]
        assert float(numbers[2]) == round(given["needed_bytes"] / GIB, 2)
        assert float(numbers[3]) == round(given["usable_bytes"] / GIB, 2)
        assert refusal.allowed["max_model_len"] == (int(estimate[1]) if estimate else 0)


@pytest.mark.parametrize("vector", vectors())
def test_pages_groups_blocks_and_tensors_are_those_of_vllm(vector: Json) -> None:
    expect = vector["expect"]
    specs = [spec_of(plain) for plain in vector["specs"]]
    assert [spec.page_bytes for spec in specs] == expect["page_bytes"]
    limits = limits_of(vector)
    if isinstance(expect["request_bytes"], dict):
        with pytest.raises(ConfigError) as refused:
            [spec.request_bytes(limits) for spec in specs]
        assert SITUATIONS[refused.value.message][0] == expect["request_bytes"]["error"]
    else:
        assert [spec.request_bytes(limits) for spec in specs] == expect["request_bytes"]
    if "error" in expect:
        with pytest.raises(ConfigError) as refused:
            plan(vector, specs)
        require_same_refusal(refused.value, expect["error"])
    else:
        outcome = {
            name: value
            for name, value in expect.items()
            if name not in ("page_bytes", "request_bytes")
        }
        assert plain_plan(plan(vector, specs), vector) == outcome
