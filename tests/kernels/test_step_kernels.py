"""Each CPU step kernel gives what vLLM's Triton kernel gives on random inputs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import step_kernel_cases
import torch
from interpreter import outputs_of

from vllm_specinfer.hooks import cpu_v2
from vllm_specinfer.kernels.cpu import penalties, step_kernels


@pytest.fixture(autouse=True)
def replaced_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Set here, it is undone: later tests keep the runner they would have had.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    cpu_v2.enable_in_worker()
    yield
    cpu_v2.disable_in_frontend()


def test_replacements_equal_the_triton_kernels(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    # One test: the kernels take a minute to interpret, and workers share nothing.
    references = outputs_of(step_kernel_cases, tmp_path)
    for name in step_kernel_cases.CASES:
        with subtests.test(name):
            compare(step_kernel_cases.run(name), references[name])


def compare(found: list[dict], references: list[dict]) -> None:
    for got, expected in zip(found, references, strict=True):
        assert got.keys() == expected.keys()
        for key, reference in expected.items():
            # A leading ~ marks what the two may round differently: sums, logarithms.
            exact = not key.startswith("~")
            torch.testing.assert_close(
                got[key],
                reference,
                rtol=0,
                atol=0 if exact else 2e-5,
                equal_nan=True,
                msg=lambda text, key=key: f"{key}: {text}",
            )


def test_registering_again_changes_nothing(monkeypatch) -> None:
    from vllm.triton_utils import dispatcher
    from vllm.v1.worker.gpu import input_batch

    kernel = input_batch._post_update_kernel
    looked_through = []
    monkeypatch.setattr(dispatcher, "_rebind_kernels", looked_through.append)
    cpu_v2.enable_in_worker()
    assert input_batch._post_update_kernel is kernel
    assert not looked_through


def test_a_kernel_that_vllm_lacks_is_named_with_the_version() -> None:
    import vllm

    with pytest.raises(RuntimeError, match="input_batch._vanished_kernel") as error:
        step_kernels.register({"input_batch.vanished": lambda: None})
    assert vllm.__version__ in str(error.value)


def test_placeholders_beyond_the_vocabulary_are_not_counted() -> None:
    """Of images, say; vLLM's kernel would write them behind its row."""
    masks, counts = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 40)
    tokens = torch.tensor([[3, 64, 33, 4000, 7], 5 * [0]], dtype=torch.int32)
    lengths = torch.tensor([[4, 0], [5, 0]], dtype=torch.int32)
    penalties.bincount(torch.tensor([0]), tokens, 5, *lengths, masks, 2, counts, 40)
    assert masks.tolist() == [[1 << 3, 1 << 1], [0, 0]]
    assert counts.nonzero().tolist() == [[0, 7]]
