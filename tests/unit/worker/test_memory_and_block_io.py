import pytest
import torch

from kvferry.proto.errors import BadInputError, ConfigError
from kvferry.proto.ids import BlockId
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.device import gpus_per_process, open_device
from kvferry.worker.frames import Place
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.slot_mapping import slots


def memory(dtype: str = "float32", /, **changed: int) -> KvMemory:
    sizes = {
        "num_blocks": 5,
        "block_tokens": 4,
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_size": 8,
    }
    return KvMemory(open_device("cpu"), dtype=dtype, **{**sizes, **changed})


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
    kv = memory(dtype)
    assert [tuple(layer.shape) for layer in kv.layers] == [(2, 5, 4, 2, 8)] * 3
    assert all(not layer.any() for layer in kv.layers)
    assert (kv.page_bytes, kv.geometry.block_bytes) == (page_bytes, 3 * page_bytes)
    assert kv.layers[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gathered_bytes_are_layers_in_order_with_k_before_v(dtype: str) -> None:
    kv = memory(dtype)
    fill(kv, 1)
    wanted = torch.stack([kv.layers[layer][:, 3] for layer in range(3)])
    assert wanted.shape == (3, 2, 4, 2, 8)
    expected = wanted.contiguous().view(torch.uint8).numpy().tobytes()
    assert gather(kv, [Place(BlockId(3), 0, 3)]) == expected


def test_scatter_puts_back_what_gather_took_and_touches_nothing_else() -> None:
    source, target = memory(), memory()
    fill(source, 1)
    fill(target, 2)
    untouched = [layer.clone() for layer in target.layers]
    payload = gather(source, [Place(BlockId(4), 0, 3), Place(BlockId(1), 1, 2)])
    scatter(target, [Place(BlockId(2), 0, 3), Place(BlockId(4), 1, 2)], memoryview(payload))
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
        scatter(kv, [Place(BlockId(1), 0, 1)], bytes([1]) * 511)
    assert not kv.layers[0].any()


@pytest.mark.parametrize("place", [(5, 0, 3), (-1, 0, 3), (1, 0, 4), (1, 2, 1)])
def test_a_place_outside_the_memory_is_refused(place: tuple[int, int, int]) -> None:
    block_id, start, end = place
    with pytest.raises(BadInputError, match="allowed: blocks below 5, layers below 3"):
        gather(memory(), [Place(BlockId(block_id), start, end)])


@pytest.mark.parametrize("name", ["num_blocks", "block_tokens", "num_layers", "head_size"])
def test_a_size_that_is_not_positive_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a positive integer; given: 0"):
        memory(**{name: 0})


def test_an_unknown_dtype_is_refused_with_those_that_work() -> None:
    with pytest.raises(ConfigError, match=r"given: int8; allowed:.*bfloat16.*float16.*float32"):
        memory("int8")


def test_a_page_too_large_for_one_frame_is_refused_before_allocation() -> None:
    with pytest.raises(ConfigError, match="use smaller blocks"):
        memory(head_size=1 << 20)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown device"):
        open_device(name)


def test_a_gpu_that_is_not_there_is_refused_with_the_count() -> None:
    with pytest.raises(ConfigError, match=r"no such GPU.*given: cuda:99; allowed: \d+ GPUs"):
        open_device("cuda:99")


def test_a_process_asks_for_a_gpu_unless_it_runs_on_the_cpu() -> None:
    assert [gpus_per_process(name) for name in ("cpu", "cuda", "cuda:0")] == [0, 1, 1]
