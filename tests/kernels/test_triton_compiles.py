"""What the interpreter runs a compiler may refuse: kernels compiled for a GPU.

None is needed for it; Triton brings the assembler along. Kernels that call functions of
vLLM's are compiled by `compiled_draws.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_specinfer.kernels.triton import (
    catch_up,
    commit,
    growth,
    matches,
    penalties,
    places,
    row_blocks,
    splits,
    step_rows,
    suffix_trees,
    texts,
    tiles,
    tree_attention,
    trees,
    union,
    verification,
)

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
ALL = {"WINDOW": 256, "SINKS": True}
NONE = {"WINDOW": 0, "SINKS": False}
KERNEL = {"BLOCK_SIZE": 16, "PRECISION": "tf32"}
POINTERS = {
    "*bf16": "out query kv_cache sinks",
    "*fp32": "partial moments k_scale v_scale",
    "*i64": "bits layers slot_mapping targets emitted first places rows ends "
    "slots lengths tokens ancestor_bits positions",
    "*i32": "block_table query_start_loc seq_lens context_lens path count parents "
    "searched texts requests num_rows starts num_computed depths",
    "*i1": "is_tree attended",
}


def types_of(pointers: dict[str, str]) -> dict[str, str]:
    """The type of each pointer, given names by type."""
    return {f"{n}_ptr": kind for kind in pointers for n in pointers[kind].split()}


TYPES = types_of(POINTERS)
BLOCKS = types_of({"*i32": "places count"})
# Where the levels of a tree and a pass over them differ from the rest.
GROWTH = types_of(
    {
        "*i64": "tokens children columns used_above bits_above scratch used limits "
        "context roots row_slots positions kv_slots row_bits",
        "*i32": "table row_tokens",
        "*i1": "is_node",
        "*fp32": "scores logprobs above correction level_scores",
    }
)
TREES = types_of(
    {
        "*i64": "kept_tokens of_candidates parents_of_candidates places order",
        "*i32": "parents kept_parents depths",
        "*fp32": "scores scores_of_candidates",
    }
)
UNION = types_of(
    {
        "*i64": "parents_out firsts tokens parents",
        "*i32": "bounds",
        "*fp32": "scores_out scores",
    }
)
TEXTS = types_of({"*i32": "copies texts ends", "*i64": "known"})
LOOKUPS = types_of(
    {
        "*i64": "filled tokens_out parents_out",
        "*i32": "places which past",
        "*i1": "grows",
        "*fp32": "scores_out correction",
    }
)


def type_of(name: str) -> str:
    if name.endswith("_ptr"):
        return TYPES[name]
    return "fp32" if name in ("scale", "softcap", "least") else "i32"


def signature_of(kernel, constants: dict, types: dict[str, str]) -> dict[str, str]:
    """The type of each argument; `types` where it is not the usual one."""
    return {
        name: "constexpr" if name in constants else types.get(name) or type_of(name)
        for name in kernel.arg_names
    }


KERNELS = [
    (
        tree_attention._tree_attention_kernel,
        SHAPE | ALL | KERNEL | {"SOFTCAP": True, "SCALES": True},
        {"kv_cache_ptr": "*fp8e4nv", **BLOCKS},
    ),
    (
        tree_attention._tree_attention_kernel,
        SHAPE | NONE | KERNEL | {"SOFTCAP": False, "SCALES": False},
        BLOCKS,
    ),
    (splits.join_splits_kernel, SHAPE | ALL | {"MAX_BLOCKS": 128}, BLOCKS),
    (splits.join_splits_kernel, SHAPE | NONE | {"MAX_BLOCKS": 1}, BLOCKS),
    (
        commit._commit_paths_kernel,
        {"BLOCK_SIZE": 16, "BLOCK_WORDS": commit.BLOCK_WORDS},
        {},
    ),
    (
        catch_up._last_rows_kernel,
        {"PAD_SLOT": -1, "BLOCK": 16},
        types_of({"*i64": "last row_slots num_new kv_slots"})
        | types_of({"*i32": "row_tokens table lengths", "*i1": "grows"}),
    ),
    (growth._extend_kernel, {"BLOCK": 16}, GROWTH),
    (
        growth._expand_kernel,
        {
            "NUM_WORDS": 2,
            "SIZE_PADDED": 4,
            "BEST_FIRST": True,
            "PAD_SLOT": -1,
            "BLOCK": growth.MOST_COMPARED,
            "OTHERS": growth.OTHERS,
        },
        GROWTH,
    ),
    (
        trees._tree_kernel,
        {
            "ROOT": -1,
            "NO_NODE": -2,
            "NUM_WORDS": 2,
            "NODES_PADDED": 128,
            "BLOCK": trees.BLOCK,
        },
        TREES,
    ),
    (union._union_kernel, {"NUM_SOURCES": 2, "BLOCK": union.BLOCK}, UNION),
    (verification._walk_kernel, {"BLOCK": 64}, {}),
    (
        step_rows._visibility_kernel,
        {"NUM_WORDS": 2, "BLOCK": step_rows.BLOCK},
        {},
    ),
    (step_rows._positions_kernel, {"BLOCK": step_rows.BLOCK}, {}),
    (
        row_blocks._row_blocks_kernel,
        {"ROWS": 3, "BLOCK": row_blocks.BLOCK},
        BLOCKS,
    ),
    (
        penalties._path_penalties_kernel,
        {"BLOCK": penalties.BLOCK},
        types_of(
            {
                "*fp32": "logits repetition frequency presence",
                "*i32": "slots paths prompt_bits counts",
            }
        ),
    ),
    (
        matches._earliest_match_kernel,
        {"ROOT": -1, "NODES_PADDED": 1024, "BLOCK": matches.BLOCK},
        LOOKUPS,
    ),
    (texts._catch_up_kernel, {"BLOCK": texts.BLOCK}, TEXTS),
    (
        places._newest_places_kernel,
        {"NUM_PLACES": 16, "NO_PLACE": -1, "MIN_OWN": 2, "MIN_PAST": 3}
        | {"BLOCK": places.BLOCK},
        LOOKUPS,
    ),
    (
        suffix_trees._suffix_trees_kernel,
        {"NUM_PLACES": 16, "MAX_MATCH": 32, "PAST_TRUST": 0.75, "ROOT": -1}
        | {"BLOCK": suffix_trees.BLOCK, "CLEARED": suffix_trees.CLEARED},
        LOOKUPS,
    ),
]
# What a kernel is launched for where trees are small; tiles of fewer lanes than a warp
# has are laid out in other ways.
SMALL = {
    trees._tree_kernel: ("NODES_PADDED",),
    growth._extend_kernel: ("BLOCK",),
    growth._expand_kernel: ("SIZE_PADDED", "BLOCK"),
    verification._walk_kernel: ("BLOCK",),
    matches._earliest_match_kernel: ("NODES_PADDED",),
    catch_up._last_rows_kernel: ("BLOCK",),
}


def compiled(kernel, constants: dict, types: dict[str, str], **options) -> bytes:
    signature = signature_of(kernel, constants, types)
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=HOPPER, options=options).asm["cubin"]


@pytest.mark.parametrize(("kernel", "constants", "types"), KERNELS)
def test_a_kernel_compiles_for_a_gpu(kernel, constants, types) -> None:
    assert compiled(kernel, constants, types)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("small", SMALL)
def test_a_kernel_compiles_for_small_trees(small, size) -> None:
    ((kernel, constants, types),) = (k for k in KERNELS if k[0] is small)
    sizes = dict.fromkeys(SMALL[kernel], size)
    words = {"NUM_WORDS": 1} if "NUM_WORDS" in constants else {}
    assert compiled(kernel, constants | sizes | words, types)


def test_kernels_with_vllms_random_numbers_compile_for_a_gpu() -> None:
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("compiled_draws.py")],
        env=os.environ | {"VLLM_PLUGINS": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == 3 * ["coupled", "drawn", "drawn", "tests"]


def largest_tile(head_size, element, group, target, cache=None, layer=NONE):
    """The kernel with its largest tiles; addresses and strides as in an engine."""
    kernel, size = tree_attention._tree_attention_kernel, 2 if element == "bf16" else 4
    lanes, tile = tiles.tile_shape(512, group, head_size, size)
    constants = SHAPE | layer | KERNEL | {"SCALES": bool(cache)}
    constants |= {"SOFTCAP": layer is ALL}
    constants |= {"HEAD_SIZE": head_size, "HEAD_PADDED": head_size}
    constants |= {"BLOCK_M": lanes, "TILE": tile, "NUM_WORDS": 1, "GROUP": group}
    data = {f"{name}_ptr": f"*{element}" for name in ("out", "query")}
    data["kv_cache_ptr"] = f"*{cache or element}"
    signature = signature_of(kernel, constants, BLOCKS | data)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or "stride" in name
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 8 if lanes >= 128 else 4}
    options["num_stages"] = tiles.num_stages(head_size, size)
    return triton.compile(source, target=target, options=options)


@pytest.mark.parametrize(
    ("head_size", "element", "group"),
    [(64, "bf16", 4), (128, "bf16", 4), (256, "bf16", 4), (128, "fp32", 4)]
    # StarCoder's and Falcon's one KV head.
    + [(128, "fp32", 48), (256, "bf16", 71)],
)
def test_the_largest_tiles_fit_into_the_shared_memory_of_an_ada_gpu(
    head_size, element, group
):
    ada = GPUTarget("cuda", 89, 32)
    compiled = largest_tile(head_size, element, group, ada)
    assert compiled.metadata.shared <= 99 * 1024


@pytest.mark.parametrize(
    ("capability", "room", "cache", "layer"),
    [
        (80, 163, None, NONE),
        (89, 99, "fp8e4nv", ALL),
        (90, 227, "fp8e4nv", ALL),
        (100, 227, None, NONE),
        (120, 99, None, NONE),
        (120, 99, "fp8e4nv", ALL),
    ],
)
def test_the_largest_tiles_compile_for_other_gpus(capability, room, cache, layer):
    """Whose tensor cores are used in other ways, with room of so many KiB."""
    target = GPUTarget("cuda", capability, 32)
    compiled = largest_tile(128, "bf16", 4, target, cache, layer)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= room * 1024
