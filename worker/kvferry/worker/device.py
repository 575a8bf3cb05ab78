"""Where KV bytes live and how they get to the host and back: the only file that says torch.cuda.

The CUDA half has not run on a GPU yet; `tests/gpu/test_device.py` exercises it where there is one.
The CPU twin is what every other test runs on.

Pieces are contiguous runs of bytes, taken from what `as_bytes` returned by plain indexing. A call
moves a whole list of them with one wait at the end, because a wait per piece would dominate.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvferry.proto.errors import ConfigError
from kvferry.worker import host_memory
from kvferry.worker.arena import Arena, HostBytes, cut, open_arena, page_aligned

Rows = npt.NDArray[np.int64]

DeviceBytes = torch.Tensor | HostBytes
"""Bytes on a device: an array on the CPU (indexing it is ten times cheaper), a tensor on a GPU."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Zeroed uint8 storages; `arena` is what other processes of this host map them by, if any."""

    storages: list[torch.Tensor]
    arena: Arena | None = None


class Device(Protocol):
    """One place that holds KV memory."""

    @property
    def name(self) -> str:
        """The torch name, e.g. "cpu" or "cuda:0"."""

    def allocate(self, sizes: Sequence[int]) -> Allocation:
        """Return zeroed storages of these sizes in bytes."""

    def total_bytes(self) -> int:
        """Return the device's memory in bytes, as far as this process may use it."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work` and return the most bytes of the device that were in use meanwhile.

        What was in use before (the weights) counts; what `work` lets go of as well.
        """

    def as_bytes(self, raw: torch.Tensor) -> DeviceBytes:
        """Return the same memory as a uint8 tensor of the device, in the form pieces have."""

    def to_host(self, pieces: Sequence[DeviceBytes]) -> list[HostBytes]:
        """Return the bytes of each piece on the host, complete when the call returns.

        The arrays stay valid until the same thread's next `to_host` or `from_host`, and on the CPU
        they are the memory itself: copy before anything else happens.
        """

    def from_host(self, pieces: Sequence[DeviceBytes], sources: Sequence[HostBytes]) -> None:
        """Overwrite each piece with the source of its length, complete when the call returns."""

    def read_rows(self, pieces: Sequence[DeviceBytes], rows: Rows, out: HostBytes) -> None:
        """Copy the same rows of each piece to `out` [pieces, rows, row_bytes], in host memory.

        Each piece counts as rows of `row_bytes` bytes, of which it has a whole number. `rows` int64
        [rows] are numbers of rows that each piece has. Complete when the call returns.
        """

    def write_rows(self, pieces: Sequence[DeviceBytes], rows: Rows, source: HostBytes) -> None:
        """Overwrite the rows of each piece with `source`, the reverse of `read_rows`."""

    def copies(self) -> AbstractContextManager[None]:
        """Let torch's copies in the body come after the model's queued work; done when it ends."""

    def queued(self) -> Callable[[], None]:
        """Return what waits until the work that the calling thread has queued so far is done.

        For engines that compute on a stream of their own, which `copies` knows nothing of.
        """


def gpus_per_process(name: str) -> int:
    """Return how many GPUs a process on the device of this name asks its cluster for."""
    return 0 if name == CpuDevice.name else 1


def open_device(name: str) -> Device:
    """Return the device called "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: another name, or no such GPU on this machine.
    """
    if name == "cpu":
        return CpuDevice()
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError("unknown device", given=name, allowed='"cpu", "cuda" or "cuda:N"')
    index, count = int(match.group(1) or 0), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            "no such GPU on this machine", given=name, allowed=f"{count} GPUs, counted from 0"
        )
    return CudaDevice(index)


class CpuDevice:
    """Host memory. Pieces are their own host bytes, so a read costs nothing."""

    name = "cpu"

    def allocate(self, sizes: Sequence[int]) -> Allocation:
        """Return zeroed storages of these sizes, in one arena where the system has them."""
        arena = open_arena(sum(page_aligned(size) for size in sizes))
        if arena is None:
            return Allocation([torch.zeros(size, dtype=torch.uint8) for size in sizes])
        return Allocation([torch.from_numpy(part) for part in cut(arena.bytes(), sizes)], arena)

    def total_bytes(self) -> int:
        """Return the memory of the machine or of this process's control group, the lesser."""
        return host_memory.total_bytes()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work` and return the most that this process had in memory meanwhile."""
        return host_memory.peak_resident_bytes(work)

    def as_bytes(self, raw: torch.Tensor) -> HostBytes:
        """Return the tensor's memory as an array."""
        array: HostBytes = raw.numpy()
        return array

    def to_host(self, pieces: Sequence[DeviceBytes]) -> list[HostBytes]:
        """Return the pieces themselves, without a copy."""
        return [np.asarray(piece) for piece in pieces]

    def from_host(self, pieces: Sequence[DeviceBytes], sources: Sequence[HostBytes]) -> None:
        """Copy each source into its piece."""
        # numpy copies in the calling thread; torch would wake the threads the model computes with.
        for piece, source in zip(pieces, sources, strict=True):
            np.copyto(np.asarray(piece), source)

    def read_rows(self, pieces: Sequence[DeviceBytes], rows: Rows, out: HostBytes) -> None:
        """Copy the same rows of each piece to `out` [pieces, rows, row_bytes]."""
        for piece, taken in zip(pieces, _as_items(out), strict=True):
            # Without a mode numpy would copy everything once more, through a buffer.
            np.take(_items(piece, out.shape[2]), rows, out=taken, mode="clip")

    def write_rows(self, pieces: Sequence[DeviceBytes], rows: Rows, source: HostBytes) -> None:
        """Overwrite the rows of each piece with `source` [pieces, rows, row_bytes]."""
        for piece, given in zip(pieces, _as_items(source), strict=True):
            _items(piece, source.shape[2])[rows] = given

    def copies(self) -> AbstractContextManager[None]:
        """Do nothing: what was called before is done."""
        return nullcontext()

    def queued(self) -> Callable[[], None]:
        """Return what does nothing: what was called before is done."""
        return lambda: None


def _items(piece: DeviceBytes, row_bytes: int) -> npt.NDArray[np.void]:
    """Return contiguous host memory as items of a row each, which numpy copies as one."""
    return np.asarray(piece).reshape(-1).view(f"V{row_bytes}")


def _as_items(array: HostBytes) -> npt.NDArray[np.void]:
    """Return contiguous [pieces, rows, row_bytes] as [pieces, rows] items."""
    return array.view(f"V{array.shape[2]}")[..., 0]


class CudaDevice:
    """One GPU. Copies go through pinned memory on a stream of their own (not run on a GPU yet)."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._copy_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Pinned staging per thread: several transfers run at once and must not share a buffer.
        self._of_thread = threading.local()

    def allocate(self, sizes: Sequence[int]) -> Allocation:
        """Return zeroed storages of these sizes on the GPU."""
        storages = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
        torch.cuda.synchronize(self._device)
        return Allocation(storages)

    def total_bytes(self) -> int:
        """Return the memory of the GPU."""
        _, total = torch.cuda.mem_get_info(self._device)
        return total

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work` and return the most that was in use of the GPU, by other processes too."""
        # What torch holds in reserve counts, because nobody else can have it.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        beside_torch = total - free - torch.cuda.memory_reserved(self._device)
        return torch.cuda.max_memory_reserved(self._device) + max(beside_torch, 0)

    def as_bytes(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return raw

    def to_host(self, pieces: Sequence[DeviceBytes]) -> list[HostBytes]:
        """Copy the pieces into this thread's pinned buffer, after the work queued so far."""
        tensors = [torch.as_tensor(piece) for piece in pieces]
        staged = self._staging([tensor.numel() for tensor in tensors])
        self._copy(zip(staged, tensors, strict=True))
        return [tensor.numpy() for tensor in staged]

    def from_host(self, pieces: Sequence[DeviceBytes], sources: Sequence[HostBytes]) -> None:
        """Copy the sources over this thread's pinned buffer into the pieces."""
        tensors = [torch.as_tensor(piece) for piece in pieces]
        staged = self._staging([tensor.numel() for tensor in tensors])
        for tensor, source in zip(staged, sources, strict=True):
            tensor.numpy()[:] = source
        self._copy(zip(tensors, staged, strict=True))

    def read_rows(self, pieces: Sequence[DeviceBytes], rows: Rows, out: HostBytes) -> None:
        """Collect the rows on the GPU and copy them over this thread's pinned buffer to `out`."""
        staged = self._staging([out.shape[1] * out.shape[2]] * len(pieces))
        with self.copies():
            chosen = torch.from_numpy(rows).to(self._device)
            for piece, target in zip(pieces, staged, strict=True):
                taken = torch.as_tensor(piece).view(-1, out.shape[2]).index_select(0, chosen)
                target.copy_(taken.view(-1), non_blocking=True)
        for target, taken_bytes in zip(staged, out, strict=True):
            taken_bytes[:] = target.numpy().reshape(taken_bytes.shape)

    def write_rows(self, pieces: Sequence[DeviceBytes], rows: Rows, source: HostBytes) -> None:
        """Copy the source over this thread's pinned buffer and spread the rows on the GPU."""
        staged = self._staging([source.shape[1] * source.shape[2]] * len(pieces))
        for target, given in zip(staged, source, strict=True):
            target.numpy()[:] = given.reshape(-1)
        with self.copies():
            chosen = torch.from_numpy(rows).to(self._device)
            for piece, ready in zip(pieces, staged, strict=True):
                moved = ready.to(self._device, non_blocking=True).view(-1, source.shape[2])
                torch.as_tensor(piece).view(-1, source.shape[2]).index_copy_(0, chosen, moved)

    def _copy(self, pairs: "zip[tuple[torch.Tensor, torch.Tensor]]") -> None:
        with self.copies():
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Queue what the body does on the stream for copies, and wait for it at the end."""
        # The model computes on the default stream: what it has queued on these blocks comes first.
        self._copy_stream.wait_stream(torch.cuda.default_stream(self._device))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copy_stream):
            yield
            done.record(self._copy_stream)
        done.synchronize()

    def queued(self) -> Callable[[], None]:
        """Return what waits for the calling thread's current stream, as far as it is filled now."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        return done.synchronize

    def _staging(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return pinned slices of these lengths, next to each other in this thread's buffer."""
        needed = sum(lengths)
        buffer: torch.Tensor | None = getattr(self._of_thread, "buffer", None)
        if buffer is None or buffer.numel() < needed:
            buffer = torch.empty(needed, dtype=torch.uint8, pin_memory=True)
            self._of_thread.buffer = buffer
        return list(torch.split(buffer[:needed], list(lengths)))
