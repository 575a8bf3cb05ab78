import torch

from kvferry.proto.specs import DTYPE_BYTES


def test_dtype_sizes_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == dict(DTYPE_BYTES)
