"""The library of C++ kernels is built where it is not there."""

import multiprocessing
import os
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


def test_what_a_killed_build_has_left_is_deleted_by_a_later_one(monkeypatch, tmp_path):
    """Not what one on another machine may work in, nor other folders of the cache."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    path = extension._library()
    path.parent.mkdir()
    monkeypatch.setattr(extension, "_run", lambda *command: os._exit(9))
    for _ in range(2):
        fork = multiprocessing.get_context("fork")
        killed = fork.Process(target=extension._build, args=(path,))
        killed.start()
        killed.join(60)
        assert killed.exitcode == 9
    old, new = path.parent.iterdir()
    other = path.parent / "other"
    other.mkdir()
    for folder in (old, other):
        os.utime(folder, (0, 0))
    monkeypatch.setattr(extension, "_build", lambda path: path.write_bytes(b"library"))
    monkeypatch.setattr(extension, "_import", load)
    assert extension.load.__wrapped__() == "kernels"
    assert set(path.parent.iterdir()) == {path, new, other}
