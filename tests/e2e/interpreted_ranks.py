"""Two ranks on CUDA's path, each a process on a CPU; see `tests/e2e/interpreted.py`.

``TRITON_INTERPRET=1 python -m tests.e2e.interpreted_ranks TARGET SSM OUTPUT.json``
"""

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import interpreter


def state_of(worker: object) -> dict:
    """What a rank has done and remembers: its steps (`interpreted_worker.counted`),
    digests of texts and last trees, and what it has learned."""
    runner = worker.model_runner
    speculator = runner.speculator
    speculator.learn()
    trees = speculator._ahead._drafter.buffers
    tensors = runner.req_states.all_token_ids.gpu, trees.tokens, trees.parents
    arrays = *(t.numpy() for t in tensors), speculator.budget._profile.value
    return {
        "steps": worker.counts.steps,
        "digests": [hashlib.sha256(a.tobytes()).hexdigest() for a in arrays],
        "learned": speculator.sources.experience.learned(),
    }


def main() -> None:
    """Decode on one rank without trees and on two with them."""
    interpreter.prepare()
    from vllm import LLM as Engine
    from vllm import SamplingParams

    from tests import processes
    from tests.e2e import engine
    from tests.e2e.interpreted import GREEDY, LLM, PROMPTS, SAMPLED, TREE
    from tests.e2e.interpreted_worker import InterpretedRank, cuda_path
    from vllm_specinfer import plugin

    target, ssm, output = sys.argv[1:]
    os.environ.update(processes.ENV)
    plugin.register()
    llm = {"model": target, **LLM}
    params = [{**kind, "max_tokens": 32} for kind in (GREEDY, SAMPLED, GREEDY)]
    job = {"prompts": PROMPTS[:3], "params": params}
    (plain,) = engine._run_jobs([{"llm": llm, "plain_v2": True, **job}])
    config = {"method": "specinfer", "ssms": [ssm, "suffix"]}
    config |= {"tree": TREE, "num_speculative_tokens": 7}
    with (
        cuda_path(worker=InterpretedRank) as counts,
        engine._scheduling(True),
        processes.forked_processes(),
    ):
        # Of which each fork goes on with a copy.
        InterpretedRank.counts = counts
        two = Engine(
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            kv_cache_memory_bytes=engine.KV_BYTES,
            speculative_config=config,
            **llm,
        )
        outputs = two.generate(
            [{"prompt_token_ids": ids} for ids in job["prompts"]],
            [SamplingParams(detokenize=False, **of_one) for of_one in params],
            use_tqdm=False,
        )
        texts = [[list(c.token_ids) for c in o.outputs] for o in outputs]
        states = two.collective_rpc(state_of)
    Path(output).write_text(json.dumps([plain["tokens"], texts, states]))


if __name__ == "__main__":
    main()
