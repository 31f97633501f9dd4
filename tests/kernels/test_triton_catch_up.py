"""The pass over what is new in texts, laid out by a kernel in the interpreter."""

import catch_up_cases as cases
from interpreter import outputs_of


def test_last_rows_are_laid_out_and_only_new_ones_write_kv(tmp_path) -> None:
    check(outputs_of(cases, tmp_path))


def check(outputs) -> None:
    """Compare with the definition; also on a GPU (`benchmarks/cuda_kernels.py`)."""
    num_new = num_short = 0
    for seed, found in zip(cases.SEEDS, outputs, strict=True):
        case = cases.Case(seed)
        expected = case.expected()
        for name in cases.NAMES:
            assert found[name].tolist() == expected[name].tolist(), (seed, name)
        num_new += int((expected["kv_slots"] != cases.PAD).sum())
        num_short += int((expected["seq_lens"] < case.num_rows).sum())
    assert num_new > 100 and num_short > 20
