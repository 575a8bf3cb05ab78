"""Serving by instances of several ranks, whose layouts differ; real transfers and gloo, no Ray."""

from typing import Any

import pytest
from tests.integration.test_serving import ask, prompt, require_equal, wait_until_idle, with_router

from kvferry.proto.layout_text import parse_layout

HASH_BLOCK_TOKENS = 8


def layout(text: str, block_tokens: int = 4) -> dict[str, Any]:
    return {
        "layout": parse_layout(text, block_tokens=block_tokens),
        "hash_block_tokens": HASH_BLOCK_TOKENS,
    }


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("pcp=2", "dcp=2,interleave=4"),
        ("dcp=2", "block_tokens=8"),
        ("block_tokens=8", "dcp=2"),
        ("dcp=2,block_tokens=8", "block_tokens=8"),
        ("block_tokens=8", "dcp=2,pcp=2,interleave=2"),
        ("dcp=3,block_tokens=8", "pcp=2,block_tokens=8"),
    ],
)
def test_a_prompt_is_prefilled_and_decoded_by_instances_of_two_layouts(
    service: Any, prefill: str, decode: str
) -> None:
    places = [
        service.add("p0", "prefill", **layout(prefill)).layout,
        service.add("d0", "decode", **layout(decode)).layout,
    ]
    served = with_router(service.router(), lambda r: r.serve(ask("a", prompt(1, 100))))
    require_equal(service, served)
    assert (served.prefill_instance, served.decode_instance) == ("p0", "d0")
    # Whole blocks of the one are computed, and of those whole blocks of the other pulled.
    pulled = 99
    for one in places:
        pulled -= pulled % one.virtual_block_tokens
    parts = served.accounting
    assert (parts.local_hit_tokens, parts.remote_hit_tokens) == (0, pulled)
    assert parts.computed_tokens == 100 - pulled
    assert served.pulled_bytes == pulled * 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, ...
    wait_until_idle(service)
