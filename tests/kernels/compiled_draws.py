"""Compiles the kernels that call vLLM's random numbers, and names them.

``python compiled_draws.py``: vLLM defines those only where it finds Triton.
"""

import itertools

import interpreter

POINTERS = {
    "*i64": "children places tokens seeds positions roots top_k columns rows found",
    "*fp32": "scores logprobs temperatures top_p min_p logits",
    "*fp64": "q totals",
}


def main() -> None:
    """Compile them, one after the other."""
    interpreter.let_vllm_use_triton()
    from triton.backends import backends

    del backends["cpu"]  # no compiler
    from test_triton_compiles import compiled, types_of

    from vllm_specinfer.drafting.children import FLAT_ACCEPTANCE, MAX_CHILDREN
    from vllm_specinfer.kernels.triton import coupled, drawn, verification
    from vllm_specinfer.noise import DRAFT_NOISE_SALT
    from vllm_specinfer.tree.proposals import NO_DRAW

    draws = {
        "FLAT": FLAT_ACCEPTANCE,
        "SALT": DRAFT_NOISE_SALT,
        "MAX_CHILDREN": MAX_CHILDREN,
        "NO_DRAW": NO_DRAW,
    }
    kernels = (
        ("coupled", coupled._coupled_children_kernel, {}),
        ("drawn", drawn._drawn_children_kernel, {"REPLACES": True, **draws}),
        ("drawn", drawn._drawn_children_kernel, {"REPLACES": False, **draws}),
        ("tests", verification._verify_draws_kernel, {}),
    )
    # As many as a node has children, padded; the smallest trees, the usual ones, most.
    for block, (name, kernel, constants) in itertools.product((1, 4, 128), kernels):
        assert compiled(kernel, {"BLOCK": block, **constants}, types_of(POINTERS))
        print(name)


if __name__ == "__main__":
    main()
