#!/usr/bin/env bash
# Is the budget worth its cost at every load? Tokens/s over plain vLLM's, time to the
# first token and bookkeeping, the former two with an SSM that is wrong, too.
# Two hours on two cores; what runs beside it shows.
#
#     bash benchmarks/budget.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/budget}
python=.venv/bin/python
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=4
mkdir -p "$out"

# table.md, turns.csv and speedup.png
$python benchmarks/load.py --ssms good wrong --contexts 0 2048 --temperatures 0 1 \
    --batches 32 16 8 4 2 1 --max-turns 3 --starts 1 --out "$out" \
    --engine '{"dtype": "float32", "max_num_batched_tokens": 8192}'
$python benchmarks/first_token.py --contexts 0 2048 --rounds 8 --texts 4 |
    tee "$out/first_token.md"
for batch in 1 8 32; do
    for temperature in 0 0.7; do
        $python benchmarks/step_profile.py --prompts $((batch > 16 ? 2 * batch : 16)) \
            --batch $batch --temperature $temperature | tee -a "$out/bookkeeping.txt"
    done
done
