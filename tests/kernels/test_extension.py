"""The library of C++ kernels is built where it is not there."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_specinfer.kernels.cpu import extension


def load(path):
    if not path.read_bytes():
        raise ImportError("file too short")
    return "kernels"


@pytest.mark.parametrize("left_behind", [None, b""])
def test_who_starts_meanwhile_waits_for_the_library(monkeypatch, tmp_path, left_behind):
    """Ranks of an engine would compile the same, side by side; what does not load is
    built anew."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    built = []
    if left_behind is not None:
        path = extension._library()
        path.parent.mkdir()
        path.write_bytes(left_behind)

    def build(path):
        built.append(path)
        time.sleep(0.2)
        path.write_bytes(b"library")

    monkeypatch.setattr(extension, "_build", build)
    monkeypatch.setattr(extension, "_import", load)
    with ThreadPoolExecutor(3) as ranks:
        found = [ranks.submit(extension.load.__wrapped__) for _ in range(3)]
    assert [kernels.result() for kernels in found] == 3 * ["kernels"]
    assert len(built) == 1
