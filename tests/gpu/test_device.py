import threading

import numpy as np
import pytest
import torch
from tests.builders import make_identity

from kvferry.proto.ids import BlockId
from kvferry.proto.layout import Layout
from kvferry.proto.memory_order import DEFAULT_ORDER
from kvferry.worker import reshard_io
from kvferry.worker.block_io import gather, scatter
from kvferry.worker.device import open_device
from kvferry.worker.frames import Place
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.reshard_io import Cells

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


IDENTITY = make_identity(
    weight_dtype="bfloat16", kv_dtype="bfloat16", num_layers=3, num_kv_heads=2, head_size=64
)


IN_EVERY_KIND_OF_ORDER = pytest.mark.parametrize("order", ["LSBNH", "LBHNS", "BLSNH", "BLSHN"])


def memory(device: str, order: str = DEFAULT_ORDER) -> KvMemory:
    return KvMemory(
        open_device(device),
        IDENTITY,
        num_blocks=33,
        layout=Layout(block_tokens=16, memory=order),
    )


@IN_EVERY_KIND_OF_ORDER
def test_bytes_from_the_gpu_are_those_of_the_cpu_twin(order: str) -> None:
    gpu, cpu = memory("cuda", order), memory("cpu")
    for on_gpu, on_cpu in zip(gpu.layers, cpu.layers, strict=True):
        on_cpu.copy_(torch.randn(on_cpu.shape))
        on_gpu.copy_(on_cpu)
    places = [Place(BlockId(7), 0, 3), Place(BlockId(1), 1, 2)]
    assert gather(gpu.groups[0], places) == gather(cpu.groups[0], places)


@IN_EVERY_KIND_OF_ORDER
def test_scattered_bytes_are_on_the_gpu_when_the_call_returns(order: str) -> None:
    gpu = memory("cuda", order)
    payload = (
        torch.randint(0, 256, (gpu.groups[0].geometry.block_bytes,), dtype=torch.uint8)
        .numpy()
        .tobytes()
    )
    scatter(gpu.groups[0], [Place(BlockId(5), 0, 3)], payload)
    assert gather(gpu.groups[0], [Place(BlockId(5), 0, 3)]) == payload
    assert not gpu.layers[0][:, 4].any()


@IN_EVERY_KIND_OF_ORDER
def test_cells_gathered_and_scattered_on_the_gpu_are_those_of_the_cpu_twin(order: str) -> None:
    gpu, cpu = memory("cuda", order), memory("cpu")
    table = np.array([9, 2])
    cells = Cells(layers=range(1, 3), heads=range(1, 2), tokens=np.arange(0, 32, 3))
    payload = bytes(range(256)) * (len(cells.tokens) * 2 * 2 * 128 // 256)
    for target in (gpu, cpu):
        reshard_io.scatter(target.groups[0], table, cells, payload)
        assert bytes(reshard_io.gather(target.groups[0], table, cells)) == payload
    for on_gpu, on_cpu in zip(gpu.layers, cpu.layers, strict=True):
        assert torch.equal(on_gpu.cpu().contiguous().view(torch.uint8), on_cpu.view(torch.uint8))


def test_a_copy_sees_what_was_queued_on_the_default_stream_before_it() -> None:
    gpu = memory("cuda")
    big = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        big = big @ big
        big /= big.norm()
    gpu.layers[0][:, 3] = 2.0
    page = torch.frombuffer(
        bytearray(gather(gpu.groups[0], [Place(BlockId(3), 0, 1)])), dtype=torch.bfloat16
    )
    assert (page == 2.0).all()


def test_work_on_a_stream_of_its_own_is_waited_for_by_another_thread() -> None:
    device, page = open_device("cuda"), torch.zeros(1 << 20, device="cuda")
    big = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(20):
            big = big @ big
            big /= big.norm()
        page.fill_(2.0)
        queued = device.queued()
    seen: list[bool] = []

    def read() -> None:
        queued()
        with device.copies():
            seen.append(bool((page.to("cpu") == 2.0).all()))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(60)
    assert seen == [True]


def test_threads_do_not_share_a_staging_buffer() -> None:
    gpu = memory("cuda")
    for block_id in range(1, 33):
        gpu.layers[0][:, block_id] = float(block_id)
    wrong = []

    def read(block_id: int) -> None:
        expected = torch.full(
            (gpu.groups[0].geometry.page_bytes // 2,), float(block_id), dtype=torch.bfloat16
        )
        wanted = expected.view(torch.uint8).numpy().tobytes()
        for _ in range(50):
            if gather(gpu.groups[0], [Place(BlockId(block_id), 0, 1)]) != wanted:
                wrong.append(block_id)

    threads = [threading.Thread(target=read, args=(block_id,)) for block_id in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_peak_of_the_gpu_counts_what_was_there_before_and_what_is_gone_again() -> None:
    mib = 1024 * 1024
    device = open_device("cuda")
    before = device.peak_bytes(lambda: None)
    kept = device.allocate([512 * mib])
    peak = device.peak_bytes(lambda: device.allocate([256 * mib]))
    assert 700 * mib < peak - before < 900 * mib
    assert peak < device.total_bytes()
    assert kept.storages[0].numel() == 512 * mib
