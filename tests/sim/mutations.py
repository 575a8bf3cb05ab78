"""Ways to break kvferry that the simulator must notice: each drops one thing that keeps it right.

`python -m tests.sim.mutations` tries all of them, or those that are named, in a copy of the tree.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.sim.shard import ANY_PROFILE, Shard

ROOT = Path(__file__).parents[2]
CODE_FOLDERS = ("cluster", "coordinator", "proto", "worker")
MAX_SEEDS = 200
STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """In a file, what stands there and what then stands there instead."""

    path: str
    before: str
    after: str


Mutation = tuple[Edit, ...]


COORDINATOR = "coordinator/kvferry/coordinator"
WORKER = "worker/kvferry/worker"
SERVING = "cluster/kvferry/cluster/serving"

MUTATIONS: dict[str, Mutation] = {
    "a step of an earlier life counts": (
        Edit(
            path=f"{COORDINATOR}/service.py",
            before="        self._require_incarnation(instance, command.incarnation)\n",
            after="",
        ),
    ),
    "no checksum is looked at": (
        Edit(
            path=f"{WORKER}/transfer_session.py",
            before="        if frame_checksum(found) != checksum:\n",
            after="        if False:\n",
        ),
    ),
    "a lease's blocks are given back twice": (
        Edit(
            path=f"{COORDINATOR}/state.py",
            before="        pool.free_blocks(reversed(lease.block_ids))\n",
            after="        pool.free_blocks([*lease.block_ids, *lease.block_ids])\n",
        ),
    ),
    "a lease keeps nothing": (
        Edit(
            path=f"{COORDINATOR}/state.py",
            before="        instance.manager.pool.touch(block_ids)\n",
            after="",
        ),
    ),
    "blocks are findable before they have come": (
        Edit(
            path=f"{COORDINATOR}/admission.py",
            before="            delay_cache_blocks=True,\n",
            after="            delay_cache_blocks=False,\n",
        ),
    ),
    "an aborted load's blocks are handed out while somebody still writes": (
        Edit(
            path=f"{SERVING}/scheduler.py",
            before="            self._loading[request_id].aborted = True\n"
            "            return request_id\n",
            after='            self._endings.add(self._loading.pop(request_id), "aborted")\n'
            "            return request_id\n",
        ),
        Edit(
            path=f"{COORDINATOR}/step.py",
            before="    if load is not None:\n        # A writer",
            after="    if load is not None and instance.loads.pop(release.request_id) is None:\n"
            "        # A writer",
        ),
    ),
    "a cancelled load counts as ended at once": (
        Edit(
            path=f"{SERVING}/engine.py",
            before="        for request_id in work.cancel_loads:\n",
            after="        for request_id in work.cancel_loads:\n"
            "            self._scheduler.load_ended(\n"
            "                LoadResult(request_id=request_id, num_computed_tokens=0), 0\n"
            "            )\n",
        ),
    ),
    "a block that gets other content is still served": (
        Edit(
            path=f"{SERVING}/engine.py",
            before="        self._mover.reused(work.reused_block_ids)\n",
            after="",
        ),
    ),
    "a load counts as ended when the first rank has its part": (
        Edit(
            path=f"{SERVING}/all_ranks.py",
            before="        while running:\n",
            after="        running = []\n        while running:\n",
        ),
    ),
    "blocks count as written when the first rank has written them": (
        Edit(
            path=f"{SERVING}/all_ranks.py",
            before="        self._own.written(group_id, known)\n"
            "        self._wait(calls, CALL_TIMEOUT_S)\n",
            after="        self._own.written(group_id, known)\n        del calls\n",
        ),
    ),
    "only the first rank hears that blocks get other content": (
        Edit(
            path=f"{SERVING}/all_ranks.py",
            before='        calls = self._begin("reused", block_ids)\n',
            after="        calls: list[PendingCall] = []\n",
        ),
    ),
    "what is sent is not asked for again after it was copied": (
        Edit(
            path=f"{WORKER}/outgoing.py",
            before="            self.lost_hash = self._served.lost_hash(segment.hash_index)\n",
            after="            self.lost_hash = None\n",
        ),
    ),
    "other weights make no other identity": (
        Edit(
            path=f"{COORDINATOR}/instances.py",
            before="        self.identity_digest = info.identity.digest()\n",
            after="        from dataclasses import replace\n"
            '        self.identity_digest = replace(info.identity, weight_version="").digest()\n',
        ),
        Edit(
            path=f"{WORKER}/service.py",
            before="        if ask.identity_digest != self._identity_digest:\n",
            after="        if False:\n",
        ),
    ),
    "suspects are pulled from": (
        Edit(
            path=f"{COORDINATOR}/state.py",
            before="            if instance_id in without or peer.is_suspect:\n",
            after="            if instance_id in without:\n",
        ),
    ),
    "a request that moves on begins anew": (
        Edit(
            path=f"{SERVING}/router.py",
            before="            output_token_ids=tuple(journey.tokens),\n"
            "            follows_prefill=",
            after="            follows_prefill=",
        ),
    ),
    "a short load counts as whole": (
        Edit(
            path=f"{SERVING}/load_orders.py",
            before="    if outcome.error is None:\n        return len",
            after="    if outcome.error_type != 'Cancelled':\n        return len",
        ),
    ),
}


def seed_that_notices(mutation: Mutation) -> tuple[int, str] | None:
    """Return the first seed that fails with a mutation, and how; None if none does."""
    with _mutated(mutation) as tree:
        shard = Shard(seeds=range(MAX_SEEDS), steps=STEPS, profile=ANY_PROFILE)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cluster.sim.shard", *shard.to_arguments()],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONHASHSEED": "0",
                "PYTHONPATH": os.pathsep.join(str(tree / folder) for folder in CODE_FOLDERS),
            },
        )
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                result = json.loads(line)
                if result["violation"] is not None:
                    process.kill()
                    return result["seed"], result["violation"]
        if process.returncode:
            raise RuntimeError(f"the simulator ended with {process.returncode}")
    return None


def mutated_sources(mutation: Mutation) -> dict[str, str]:
    """Return what is in the files that a mutation changes, with it.

    Raises:
        ValueError: what it changes is not in a file, or more than once.
    """
    sources: dict[str, str] = {}
    for edit in mutation:
        source = sources.get(edit.path) or (ROOT / edit.path).read_text()
        if source.count(edit.before) != 1:
            raise ValueError(f"{edit.path} does not hold once: {edit.before!r}")
        sources[edit.path] = source.replace(edit.before, edit.after)
    return sources


@contextmanager
def _mutated(mutation: Mutation) -> Iterator[Path]:
    """Yield a copy of the code with a mutation in it."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in CODE_FOLDERS:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path, source in mutated_sources(mutation).items():
            (tree / path).write_text(source)
        yield tree


if __name__ == "__main__":
    for name in sys.argv[1:] or MUTATIONS:
        print(f"{name}: {seed_that_notices(MUTATIONS[name]) or 'NOT NOTICED'}", flush=True)
