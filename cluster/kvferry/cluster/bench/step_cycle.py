"""The engine steps that are timed, as commands: each has 256 blocks in it."""

import hashlib
from itertools import count

from kvferry.proto.hashing import make_scheme
from kvferry.proto.identity import GroupSpec, Identity
from kvferry.proto.ids import BlockHash, Epoch, Incarnation, InstanceId, RequestId
from kvferry.proto.layout import Layout
from kvferry.proto.messages import InstanceInfo, RegisterInstance
from kvferry.proto.step_messages import AdmitAsk, Progress, Release, Step

STEP_BLOCKS = 256
_BLOCK_TOKENS = 16
_NUM_BLOCKS = 8192
SCHEME = make_scheme(hash_block_tokens=_BLOCK_TOKENS)
_INSTANCE = InstanceId("prefill-0")
_INCARNATION = Incarnation(1)


def registration() -> RegisterInstance:
    """Return the command by which the engine that makes the steps joins."""
    identity = Identity(
        model="bench",
        weight_version="1",
        weight_dtype="float32",
        kv_dtype="float32",
        kv_scales="",
        rope="",
        num_layers=1,
        num_kv_heads=1,
        head_size=1,
        groups=(GroupSpec(kind="full", layers=(0,)),),
    )
    info = InstanceInfo(
        instance_id=_INSTANCE,
        role="prefill",
        incarnation=_INCARNATION,
        identity=identity,
        scheme=SCHEME,
        layout=Layout(block_tokens=_BLOCK_TOKENS),
        num_blocks=_NUM_BLOCKS,
        rank_addresses=("127.0.0.1:1",),
        max_model_len=1 << 20,
        rank_pids=(1,),
        version="bench",
    )
    return RegisterInstance(call_id="register", info=info)


class StepCycle:
    """Two steps over and over: a prompt of 256 blocks is admitted; it is written and released.

    Each prompt is new, so the first step asks for 256 blocks and gets them, and the second makes
    256 blocks findable and gives them back. In the long run each admission evicts 256 as well.
    """

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._numbers = count()

    def next_steps(self) -> tuple[Step, Step]:
        """Return the two steps of the next prompt."""
        number = next(self._numbers)
        request_id = RequestId(f"request-{number}")
        num_tokens = STEP_BLOCKS * _BLOCK_TOKENS
        hashes = tuple(
            BlockHash(hashlib.sha256(b"%d %d" % (number, i)).digest()) for i in range(STEP_BLOCKS)
        )
        ask = AdmitAsk(
            request_id=request_id, num_tokens=num_tokens, target_tokens=num_tokens, hashes=hashes
        )
        written = Progress(
            request_id=request_id, num_tokens=num_tokens, num_computed_tokens=num_tokens
        )
        return (
            self._step(f"admit-{number}", waiting=(ask,)),
            self._step(
                f"release-{number}",
                progress=(written,),
                releases=(Release(request_id=request_id),),
            ),
        )

    def _step(
        self,
        call_id: str,
        *,
        progress: tuple[Progress, ...] = (),
        releases: tuple[Release, ...] = (),
        waiting: tuple[AdmitAsk, ...] = (),
    ) -> Step:
        return Step(
            call_id=call_id,
            epoch=self._epoch,
            instance_id=_INSTANCE,
            incarnation=_INCARNATION,
            progress=progress,
            releases=releases,
            waiting=waiting,
            token_budget=1 << 20,
        )
