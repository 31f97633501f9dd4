"""Runs engines in a process of its own: `python -m tests.e2e.engine JOBS RESULTS`.

JOBS is a JSON list of {"llm": {...}, "prompts": [[ids]], "params": [{...}],
"batched": bool}; RESULTS gets, per job, the output token ids per prompt and the
speculation counts.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def run(jobs: list[dict], timeout: float = 1200, **env: str) -> list[dict]:
    """Run jobs one after the other in one fresh process; their results."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "jobs.json", Path(folder) / "results.json"
        source.write_text(json.dumps(jobs))
        subprocess.run(
            [sys.executable, "-m", "tests.e2e.engine", str(source), str(target)],
            check=True,
            timeout=timeout,
            env={**os.environ, **ENV, **env},
            cwd=Path(__file__).parents[2],
        )
        return json.loads(target.read_text())


def _run_job(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(disable_log_stats=False, **job["llm"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    params = [SamplingParams(**p) for p in job["params"]]
    if len(params) == 1:
        params *= len(prompts)
    if job.get("batched", True):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    else:
        outputs = [
            llm.generate(prompt, p, use_tqdm=False)[0]
            for prompt, p in zip(prompts, params, strict=True)
        ]
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    result = {
        "tokens": [[list(c.token_ids) for c in o.outputs] for o in outputs],
        "drafts": metrics.get("vllm:spec_decode_num_drafts", 0),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
        "preemptions": metrics.get("vllm:num_preemptions", 0),
        "blocks": manager.block_pool.num_gpu_blocks,
        "free_blocks": manager.block_pool.get_num_free_blocks(),
    }
    del llm
    gc.collect()
    return result


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([_run_job(job) for job in jobs]))
