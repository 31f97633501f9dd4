#!/usr/bin/env bash
# Boost-tune a second SSM beside the shipped one, in minutes on two cores.
#
#     bash examples/boost_tune.sh [POOL_FOLDER]
#
# Kill it at any time and give the same command again: it goes on where it was.
set -euo pipefail
out=${1:+$(realpath -m "$1")}
cd "$(dirname "$0")/.."
out=${out:-runs/boost-tune}
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING
mkdir -p "$(dirname "$out")"
prompts=$out.jsonl
.venv/bin/python examples/training_prompts.py --prompts 400 --seed 1 --out "$prompts"
target=$(.venv/bin/python -c 'from vllm_specinfer import assets; print(assets.smollm2())')
.venv/bin/vllm-specinfer tune --target "$target" --prompts "$prompts" --out "$out" \
    --base examples/pools/smollm2-135m/ssm0 --keep-base --num-ssms 2 \
    --max-tokens 64 --epochs 1
