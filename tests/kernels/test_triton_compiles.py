"""What the interpreter runs a compiler may refuse: kernels compiled for a GPU.

None is needed for it; Triton brings the assembler along. The test of draws is left out,
as it calls a function that vLLM compiles on a GPU only.
"""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_specinfer.kernels.triton import commit, places, tree_attention, verification

HOPPER = GPUTarget("cuda", 90, 32)
SHAPE = {
    "GROUP": 4,
    "HEAD_SIZE": 48,
    "HEAD_PADDED": 64,
    "BLOCK_M": 16,
    "TILE": 32,
    "NUM_WORDS": 2,
    "MAX_SPLITS": 32,
    "MIN_TILES_PER_SPLIT": 4,
}
ALL = {"WINDOW": 256, "SINKS": True, "CHAINS": True}
NONE = {"WINDOW": 0, "SINKS": False, "CHAINS": False}
KERNEL = {"BLOCK_SIZE": 16, "PRECISION": "tf32"}
POINTERS = {
    "*bf16": "out query kv_cache sinks",
    "*fp32": "partial moments k_scale v_scale",
    "*i64": "bits layers slot_mapping targets drafts first num_rows places rows ends "
    "slots lengths",
    "*i32": "block_table query_start_loc seq_lens context_lens path count parents "
    "searched texts requests",
    "*i1": "is_tree",
}
BLOCKS = {"places_ptr": "*i32", "count_ptr": "*i32"}
TYPES = {f"{name}_ptr": kind for kind in POINTERS for name in POINTERS[kind].split()}


def type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return TYPES[name]
    return "fp32" if name in ("scale", "softcap") else "i32"


@pytest.mark.parametrize(
    ("kernel", "constants", "types"),
    [
        (
            tree_attention._tree_attention_kernel,
            SHAPE | ALL | KERNEL | {"SOFTCAP": True, "SCALES": True, "SPLIT": True},
            {"kv_cache_ptr": "*fp8e4nv", **BLOCKS},
        ),
        (
            tree_attention._tree_attention_kernel,
            SHAPE | NONE | KERNEL | {"SOFTCAP": False, "SCALES": False, "SPLIT": False},
            BLOCKS,
        ),
        (tree_attention._join_splits_kernel, SHAPE | ALL, BLOCKS),
        (tree_attention._join_splits_kernel, SHAPE | NONE, BLOCKS),
        (
            commit._commit_paths_kernel,
            {"BLOCK_SIZE": 16, "BLOCK_WORDS": commit.BLOCK_WORDS},
            {},
        ),
        (verification._walk_kernel, {"BLOCK": 64}, {}),
        (
            places._newest_places_kernel,
            {"NUM_PLACES": 16, "MIN_MATCH": 3, "BLOCK": places.BLOCK},
            {},
        ),
    ],
)
def test_a_kernel_compiles_for_a_gpu(kernel, constants, types) -> None:
    signature = {
        name: "constexpr" if name in constants else types.get(name, type_of(name))
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=HOPPER).asm["cubin"]
