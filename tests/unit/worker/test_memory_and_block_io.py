from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import make_identity
from tests.unit.worker.reshard_by_loops import blocks_of

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import BlockId, GroupId
from kvferry.proto.layout import Layout
from kvferry.proto.memory_order import AXES, DEFAULT_ORDER
from kvferry.proto.slot_mapping import slots
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.device import gpus_per_process, open_device
from kvferry.worker.frames import Place
from kvferry.worker.kv_memory import KvMemory

IDENTITY = make_identity(num_layers=3, num_kv_heads=2)
# Group 0 has layers 1 and 4; the two windowed groups have the others, group 2 one layer less.
HYBRID = replace(
    IDENTITY,
    num_layers=5,
    groups=(
        GroupSpec(kind="full", layers=(1, 4)),
        GroupSpec(kind="sliding_window", layers=(0, 3), window_tokens=8),
        GroupSpec(kind="chunked_local", layers=(2,), chunk_tokens=8),
    ),
)
ORDERS = st.permutations(AXES).map("".join)


def memory(
    identity: Identity = IDENTITY,
    *,
    num_blocks: int = 5,
    block_tokens: int = 4,
    order: str = DEFAULT_ORDER,
) -> KvMemory:
    return KvMemory(
        open_device("cpu"),
        identity,
        num_blocks=num_blocks,
        layout=Layout(block_tokens=block_tokens, memory=order),
    )


def fill(target: KvMemory, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in target.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))


@pytest.mark.parametrize(
    ("dtype", "page_bytes"), [("float32", 512), ("bfloat16", 256), ("float16", 256)]
)
def test_memory_is_zeroed_and_has_the_shape_and_sizes_of_its_dtype(
    dtype: str, page_bytes: int
) -> None:
    kv = memory(replace(IDENTITY, kv_dtype=dtype))
    assert [tuple(layer.shape) for layer in kv.layers] == [(2, 5, 4, 2, 8)] * 3
    assert all(not layer.any() for layer in kv.layers)
    (group,) = kv.groups
    assert (group.geometry.page_bytes, group.geometry.block_bytes) == (page_bytes, 3 * page_bytes)
    assert kv.layers[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gathered_bytes_are_layers_in_order_with_k_before_v(dtype: str) -> None:
    kv = memory(replace(IDENTITY, kv_dtype=dtype))
    fill(kv, 1)
    wanted = torch.stack([kv.layers[layer][:, 3] for layer in range(3)])
    assert wanted.shape == (3, 2, 4, 2, 8)
    expected = wanted.contiguous().view(torch.uint8).numpy().tobytes()
    assert gather(kv.groups[0], [Place(BlockId(3), 0, 3)]) == expected


def test_scatter_puts_back_what_gather_took_and_touches_nothing_else() -> None:
    source, target = memory(), memory()
    fill(source, 1)
    fill(target, 2)
    untouched = [layer.clone() for layer in target.layers]
    payload = gather(source.groups[0], [Place(BlockId(4), 0, 3), Place(BlockId(1), 1, 2)])
    scatter(
        target.groups[0], [Place(BlockId(2), 0, 3), Place(BlockId(4), 1, 2)], memoryview(payload)
    )
    for layer, before in enumerate(untouched):
        expected = before.clone()
        expected[:, 2] = source.layers[layer][:, 4]
        if layer == 1:
            expected[:, 4] = source.layers[layer][:, 1]
        assert torch.equal(target.layers[layer], expected)


def test_a_slot_is_the_row_of_the_flattened_blocks() -> None:
    kv = memory()
    fill(kv, 3)
    flat = kv.layers[2].view(2, 5 * 4, 2, 8)
    (slot,) = slots([3, 1], 6, 7, 4)
    assert torch.equal(flat[0, slot], kv.layers[2][0, 1, 2])


def test_a_payload_of_another_length_is_refused_before_anything_is_written() -> None:
    kv = memory()
    with pytest.raises(BadInputError, match="given: 511; allowed: 512 bytes"):
        scatter(kv.groups[0], [Place(BlockId(1), 0, 1)], bytes([1]) * 511)
    assert not kv.layers[0].any()


@pytest.mark.parametrize("place", [(5, 0, 3), (-1, 0, 3), (1, 0, 4), (1, 2, 1)])
def test_a_place_outside_the_memory_is_refused(place: tuple[int, int, int]) -> None:
    block_id, start, end = place
    with pytest.raises(BadInputError, match="allowed: blocks below 5, layers below 3"):
        gather(memory().groups[0], [Place(BlockId(block_id), start, end)])


@pytest.mark.parametrize("name", ["num_blocks", "block_tokens"])
def test_a_size_that_is_not_positive_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer; given: 0; allowed: >= 1"):
        memory(IDENTITY, **{name: 0})  # type: ignore[arg-type]


def test_an_unknown_dtype_is_refused_with_those_that_work() -> None:
    with pytest.raises(ConfigError, match=r"given: int8; allowed:.*bfloat16.*float16.*float32"):
        memory(replace(IDENTITY, kv_dtype="int8"))


def test_a_page_too_large_for_one_frame_is_refused_before_allocation() -> None:
    with pytest.raises(ConfigError, match="use smaller blocks"):
        memory(replace(IDENTITY, head_size=1 << 20))


@given(order=ORDERS, dtype=st.sampled_from(["float32", "bfloat16"]))
def test_a_layer_is_one_view_whatever_the_order(order: str, dtype: str) -> None:
    kv = memory(replace(IDENTITY, kv_dtype=dtype), order=order)
    fill(kv, 1)
    for layer, view in enumerate(kv.layers):
        assert tuple(view.shape) == (2, 5, 4, 2, 8)
        for side in (0, 1):
            in_bytes = view[side].contiguous().view(torch.uint8).numpy()
            assert (in_bytes == blocks_of(kv, layer, side)).all()


@settings(max_examples=200)
@given(order=ORDERS, other_order=ORDERS, group_id=st.integers(0, 2), first_layer=st.integers(0, 1))
def test_blocks_pass_between_any_two_orders_of_groups_that_share_memory(
    order: str, other_order: str, group_id: int, first_layer: int
) -> None:
    kv, other = memory(HYBRID, order=order), memory(HYBRID, order=other_order)
    fill(kv, 1)
    fill(other, 2)
    before = [layer.clone() for layer in other.layers]
    layers = HYBRID.groups[group_id].layers[first_layer:]
    places = [
        Place(BlockId(block), first_layer, first_layer + len(layers)) for block in (3, 1, 4, 2)
    ]
    wanted = [kv.layers[layer][:, place.block_id] for place in places[:2] for layer in layers]
    payload = gather(kv.groups[group_id], places[:2])
    assert payload == b"".join(page.contiguous().numpy().tobytes() for page in wanted)
    scatter(other.groups[group_id], places[2:], payload)
    for group in HYBRID.groups:
        for room, layer in enumerate(group.layers):
            expected = before[layer]
            if first_layer <= room < first_layer + len(layers):
                sent = kv.layers[layers[room - first_layer]]
                expected[:, 4], expected[:, 2] = sent[:, 3], sent[:, 1]
            assert torch.equal(other.layers[layer], expected)


@pytest.mark.parametrize(
    ("order", "num_storages"),
    [("LSBNH", 2), ("LBHNS", 2), ("BLSNH", 1), ("SHBLN", 1)],
)
def test_layers_have_storages_of_their_own_or_share_one_and_take_as_much(
    order: str, num_storages: int
) -> None:
    kv = memory(HYBRID, order=order)
    storages = {layer.untyped_storage().data_ptr(): layer for layer in kv.layers}
    assert len(storages) == num_storages
    sizes = [layer.untyped_storage().nbytes() for layer in storages.values()]
    assert sum(sizes) == 5 * kv.groups[0].geometry.block_bytes


def test_the_kth_layers_of_all_groups_share_one_allocation() -> None:
    kv = memory(HYBRID)
    assert len({layer.data_ptr() for layer in kv.layers}) == 2
    assert [kv.layers[i].data_ptr() for i in (1, 0, 2)] == [kv.layers[1].data_ptr()] * 3
    assert [kv.layers[i].data_ptr() for i in (4, 3)] == [kv.layers[4].data_ptr()] * 2
    assert [group.geometry.num_layers for group in kv.groups] == [2, 2, 1]
    assert {group.geometry.page_bytes for group in kv.groups} == {512}


@pytest.mark.parametrize("group_id", [0, 1, 2])
def test_a_groups_blocks_are_its_own_layers_in_order(group_id: int) -> None:
    kv, other = memory(HYBRID), memory(HYBRID)
    fill(kv, 1)
    layers, group = HYBRID.groups[group_id].layers, kv.groups[group_id]
    expected = torch.stack([kv.layers[layer][:, 3] for layer in layers])
    payload = gather(group, [Place(BlockId(3), 0, len(layers))])
    assert payload == expected.contiguous().view(torch.uint8).numpy().tobytes()
    scatter(other.groups[group_id], [Place(BlockId(2), 0, len(layers))], payload)
    for layer in layers:
        assert torch.equal(other.layers[layer][:, 2], kv.layers[layer][:, 3])
        assert not other.layers[layer][:, [0, 1, 3, 4]].any()


@pytest.mark.parametrize("group_id", [-1, 3])
def test_an_unknown_group_is_refused_with_those_there_are(group_id: int) -> None:
    with pytest.raises(BadInputError, match=rf"given: {group_id}; allowed: \[0, 1, 2\]"):
        memory(HYBRID).group(GroupId(group_id))


def test_a_group_with_recurrent_states_is_refused_with_the_kinds_that_fit() -> None:
    recurrent = GroupSpec(kind="mamba", layers=(2,), state_bytes=64)
    identity = replace(IDENTITY, groups=(GroupSpec(kind="full", layers=(0, 1)), recurrent))
    with pytest.raises(ConfigError, match=r"states of group 1; given: mamba; allowed: .* full, "):
        memory(identity)


def test_a_group_without_layers_is_refused() -> None:
    empty = GroupSpec(kind="full", layers=())
    with pytest.raises(ConfigError, match="group 1 has no layers"):
        memory(replace(IDENTITY, groups=(*IDENTITY.groups, empty)))


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown device"):
        open_device(name)


def test_a_gpu_that_is_not_there_is_refused_with_the_count() -> None:
    with pytest.raises(ConfigError, match=r"no such GPU.*given: cuda:99; allowed: \d+ GPUs"):
        open_device("cuda:99")


def test_a_process_asks_for_a_gpu_unless_it_runs_on_the_cpu() -> None:
    assert [gpus_per_process(name) for name in ("cpu", "cuda", "cuda:0")] == [0, 1, 1]
