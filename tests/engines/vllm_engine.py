"""A vLLM engine in a process of its own, told what to do in JSON lines; see `engines.py`."""

import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest

Ask = dict[str, Any]


class Commands:
    """What the engine can be told; the names of the public methods are the commands."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = LLM(**settings)

    def generate(self, ask: Ask) -> list[dict[str, Any]]:
        """Run requests at once, greedily."""
        prompts, params, adapters = [], [], []
        for one in ask["requests"]:
            prompt = TokensPrompt(prompt_token_ids=one["tokens"])
            if one.get("salt"):
                prompt["cache_salt"] = one["salt"]
            prompts.append(prompt)
            params.append(_greedy(one, logprobs=1))
            lora = one.get("lora")
            adapters.append(None if lora is None else LoRARequest(*lora))
        outputs = self._llm.generate(
            prompts, params, lora_request=adapters if any(adapters) else None, use_tqdm=False
        )
        return [_plain(output) for output in outputs]

    def metrics(self, _: Ask) -> dict[str, float]:
        """Return the counters and gauges, those of one name added up."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found

    def reset(self, ask: Ask) -> bool:
        """Reset the prefix cache, and that of the connector if asked for."""
        return bool(self._llm.reset_prefix_cache(reset_connector=ask["external"]))

    def step_requests(self, ask: Ask) -> dict[str, Any]:
        """Run requests a few at a time, and abort some on the way."""
        engine = self._llm.llm_engine
        waiting = list(enumerate(ask["requests"]))
        steps_left: dict[str, int | None] = {}
        results: dict[str, Any] = {}
        while waiting or engine.has_unfinished_requests():
            while waiting and len(steps_left) < ask["at_once"]:
                index, one = waiting.pop(0)
                prompt = TokensPrompt(prompt_token_ids=one["tokens"])
                engine.add_request(f"r{index}", prompt, _greedy(one))
                steps_left[f"r{index}"] = one.get("abort_after_steps")
            for name in [name for name, steps in steps_left.items() if steps == 0]:
                engine.abort_request([name])
                results[name] = {"tokens": None}
                del steps_left[name]
            for name, steps in steps_left.items():
                steps_left[name] = None if steps is None else steps - 1
            for output in engine.step():
                if output.finished and output.request_id in steps_left:
                    results[output.request_id] = {"tokens": list(output.outputs[0].token_ids)}
                    del steps_left[output.request_id]
        return results

    def settle(self, ask: Ask) -> int:
        """Step until no request is left, finished ones included; return the free blocks."""
        core = self._llm.llm_engine.engine_core.engine_core
        end_s = time.monotonic() + ask["timeout_s"]
        while core.scheduler.requests and time.monotonic() < end_s:
            core.step_fn()
        return int(core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _greedy(one: Ask, **settings: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=one["max_tokens"],
        ignore_eos=True,
        extra_args=one.get("extra_args"),
        **settings,
    )


def _plain(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    tables = completion.logprobs or []
    return {
        "tokens": tokens,
        "logprobs": [table[token].logprob for table, token in zip(tables, tokens, strict=True)],
        "finish_reason": completion.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "kv_transfer_params": output.kv_transfer_params,
    }


def main() -> None:
    """Answer on what was stdout: vLLM prints there as well, and is sent to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    commands = Commands(json.loads(sys.argv[1]))
    print(json.dumps({"value": "ready"}), file=answers)
    for line in sys.stdin:
        ask = json.loads(line)
        start_s = time.perf_counter()
        try:
            answer = {"value": getattr(commands, ask["command"])(ask)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["seconds"] = time.perf_counter() - start_s
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
