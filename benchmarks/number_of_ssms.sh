#!/usr/bin/env bash
# How many SSMs pay? Makes the pools (about two hours on two cores; what is there
# already is kept), then compares them on held-out prompts with 8 nodes each.
#
#     bash benchmarks/number_of_ssms.sh [FOLDER] [PROMPTS_OF_EACH_SET]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/r2} prompts=${2:-20}
python=.venv/bin/python
ssm=examples/pools/smollm2-135m/ssm0
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1
mkdir -p "$out"

# Half the training prompts of the shipped SSM, its held-out ones first.
[ -e "$out/prompts.jsonl" ] ||
    $python examples/training_prompts.py --prompts 6144 --out "$out/prompts.jsonl"
tune() {
    $python -m vllm_specinfer.cli tune --out "$@" \
        --target "$($python -c 'from vllm_specinfer import assets as a; print(a.smollm2())')" \
        --prompts "$out/prompts.jsonl" --max-tokens 160 --compare-length 4 \
        --epochs 1 --learning-rate 5e-4 --validation 0.0104
}
# Two more SSMs, boost-tuned beside the shipped one.
tune "$out/pool" --base $ssm --keep-base --num-ssms 3
# One SSM with the layers of two, trained as they were.
[ -e "$out/deep" ] || $python examples/deepen_ssm.py $ssm "$out/deep" --layers 6
tune "$out/large" --base "$out/deep" --num-ssms 1
# The shipped SSM with all 49152 rows of its head.
if [ ! -e "$out/whole-head" ]; then
    cp -r $ssm "$out/whole-head"
    rm "$out/whole-head/draft_vocab.json"
fi

compare() {
    $python -m vllm_specinfer.cli bench --prompts mtbench humaneval \
        --temperatures 0 0.7 --max-prompts "$prompts" --engine '{"dtype": "float32"}' \
        --out "$out/$1" "${@:2}"
}
# All nodes in every step: --config of a name and the rest of a configuration.
config() {
    configs+=(--config "$1={\"scheduler\": \"static\", $2}")
}
second=$out/pool/ssm1 third=$out/pool/ssm2
configs=()
config "1 SSM" "\"model\": \"$ssm\""
config "1 SSM, whole head" "\"model\": \"$out/whole-head\""
config "1 SSM, wider" "\"model\": \"$ssm\", \"tree\": {\"max_width\": 8}"
config "1 SSM, 6 layers" "\"model\": \"$out/large/ssm0\""
config "2 SSMs" "\"ssms\": [\"$ssm\", \"$second\"]"
config "3 SSMs" "\"ssms\": [\"$ssm\", \"$second\", \"$third\"]"
compare ssms "${configs[@]}"
configs=()
config "1 SSM, ngram" "\"ssms\": [\"$ssm\", \"ngram\"]"
config "1 SSM, suffix" "\"ssms\": [\"$ssm\", \"suffix\"]"
config "3 SSMs, suffix" "\"ssms\": [\"$ssm\", \"$second\", \"$third\", \"suffix\"]"
compare lookups "${configs[@]}"
