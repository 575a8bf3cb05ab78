"""Measuring what a model takes of its device beside the KV cache."""

from kvferry.proto.layout import Layout
from kvferry.worker.device import Device
from kvferry.worker.kv_memory import KvMemory
from kvferry.worker.model.loading import LoadedModel
from kvferry.worker.model.runner import ModelRunner, SequenceSlice


def non_kv_peak_bytes(
    loaded: LoadedModel, device: Device, *, block_tokens: int, token_budget: int, max_running: int
) -> int:
    """Return the most bytes in use while one forward pass runs, its own KV blocks taken off.

    The pass is as full as a step of the engine can be: `token_budget` tokens, of as many sequences
    as may run, of which one has all tokens that the others leave. What a longer context takes, and
    transfers, is not in it.

    Raises:
        ConfigError: as `KvMemory` and `ModelRunner`.
    """
    num_tokens = min(token_budget, loaded.max_model_len)
    num_sequences = min(max_running, num_tokens)
    lengths = [num_tokens - num_sequences + 1] + [1] * (num_sequences - 1)
    num_blocks = -(-lengths[0] // block_tokens)
    memory = KvMemory(
        device, loaded.identity, num_blocks=num_blocks, layout=Layout(block_tokens=block_tokens)
    )
    runner = ModelRunner(loaded, memory.layers, block_tokens)
    # All write to the same blocks: only the size of the work matters, not what comes out.
    tables = [range(num_blocks)] * len(memory.groups)
    batch = [
        SequenceSlice(token_ids=(0,) * length, start_position=0, block_tables=tables)
        for length in lengths
    ]
    peak = device.peak_bytes(lambda: runner.forward(batch))
    return peak - num_blocks * loaded.identity.block_bytes(block_tokens)
