"""How long it takes to plan a move between two layouts."""

from collections.abc import Iterator

from kvferry.cluster.bench.rows import Row, elapsed_ns, measure_alone
from kvferry.proto.errors import InvariantError
from kvferry.proto.layout import vllm
from kvferry.proto.placement import KvShape
from kvferry.proto.reshard import Plan, plan_reshard

NUM_TOKENS = 131_072
SOURCE = vllm(tp=4, dcp=2, block_tokens=16)
DESTINATION = vllm(tp=2, pcp=2, block_tokens=32)
SHAPE = KvShape(num_layers=24, num_kv_heads=8, head_size=128, dtype="bfloat16")


def plan_rows(seconds: float) -> Iterator[Row]:
    """Yield `plan_131072`, in ms per plan of so many tokens.

    Raises:
        InvariantError: the plan does not fill both replicas of the destination.
    """

    def make() -> Plan:
        return plan_reshard(SOURCE, DESTINATION, SHAPE, start=0, end=NUM_TOKENS)

    one_copy = NUM_TOKENS * SHAPE.num_layers * SHAPE.num_kv_heads * 2 * SHAPE.head_bytes
    if make().num_bytes != 2 * one_copy:
        raise InvariantError("the plan moves other bytes", given=make().num_bytes, allowed=one_copy)
    yield measure_alone(
        f"plan_{NUM_TOKENS}",
        lambda: elapsed_ns(make) / 1e6,
        unit="ms",
        better="lower",
        seconds=seconds,
    )
