"""A client fetches what instances of several ranks have computed."""

from typing import Any

import pytest
import torch
from tests.integration.test_serving import ask, prompt, with_router

from kvferry.cluster import client_staging
from kvferry.cluster.client import connect
from kvferry.cluster.serving.routing import Route
from kvferry.coordinator.control_server import ControlServer
from kvferry.proto.ids import InstanceId
from kvferry.proto.layout_text import parse_layout
from kvferry.proto.messages import RemoveInstance

NUM_TOKENS = 100


def fetched(service: Any, tokens: tuple[int, ...]) -> tuple[int, list[torch.Tensor]]:
    identity = service.infos["d0"].identity
    size = (2, len(tokens), identity.num_kv_heads, identity.head_size)
    into = [torch.full(size, -7.0) for _ in range(identity.num_layers)]
    front = ControlServer(service.coordinator.call, bind="127.0.0.1", port=0, insecure=False)
    try:
        with connect(front.address, timeout_s=10.0) as ferry:
            return ferry.model(identity).fetch(tokens, into), into
    finally:
        front.stop()


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ("block_tokens=8", 96),
        ("dcp=2,block_tokens=8,interleave=2", 96),
        ("pcp=2,dcp=2,block_tokens=4", 96),
        ("dcp=3,block_tokens=8", 96),
        ("block_tokens=32,memory=LBHNS", 96),
        ("dcp=2,block_tokens=20", 80),
    ],
)
def test_a_prefix_is_fetched_whatever_the_layout_that_holds_it(
    service: Any, monkeypatch: Any, layout: str, held: int
) -> None:
    tokens = prompt(1, NUM_TOKENS)
    service.add("d0", "decode", layout=parse_layout(layout), hash_block_tokens=8)
    service.add("d1", "decode")
    block_bytes = service.infos["d0"].identity.block_bytes(8)
    monkeypatch.setattr(client_staging, "MAX_STAGING_BYTES", 3 * block_bytes)

    def serve_on(place: str) -> None:
        route = Route(decode=InstanceId(place), prefill=None)
        with_router(service.router(), lambda r: r.serve(ask(place, tokens), route=route))

    serve_on("d0")
    num_tokens, found = fetched(service, tokens)
    assert num_tokens == held
    # What one rank computes for itself is what the client should have got.
    own = service.actors[1]._own.worker
    service.actors[0].stop()
    service.coordinator.call(remove("d0", service))
    serve_on("d1")
    assert own.stats().of("pulled").num_started == 0
    _, wanted = fetched(service, tokens)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got[:, :held], right[:, :held], atol=1e-5, rtol=1e-5)
        assert bool((got[:, held:] == -7.0).all())


def remove(name: str, service: Any) -> Any:
    return RemoveInstance(
        call_id=f"remove/{name}",
        instance_id=InstanceId(name),
        incarnation=service.infos[name].incarnation,
        reason="the test has seen enough",
    )
