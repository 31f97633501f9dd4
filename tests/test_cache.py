"""Caches that every engine of a machine can use again, and of no other machine."""

from pathlib import Path

import pytest

from vllm_specinfer.cache import cache_folder, cpu

X86 = "processor\t: {}\nmodel\t\t: 143\nmodel name\t: Xeon {}\nflags\t\t: {}\n"
ARM = "processor\t: {}\nBogoMIPS\t: 50.00\nFeatures\t: {}\nCPU part\t: {}\n"


def test_the_cache_is_where_vllms_is(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "~/caches")
    assert cache_folder() == Path("/somewhere/caches/specinfer")
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    assert cache_folder() == Path("/somewhere/.cache/vllm/specinfer")


@pytest.mark.parametrize(
    ("kind", "one", "others"),
    [
        (X86, ("8480", "fpu avx512f"), [("8480", "fpu avx2"), ("8581", "fpu avx512f")]),
        (ARM, ("fp asimd sve", "0xd40"), [("fp asimd", "0xd40"), ("fp sve", "0xd0c")]),
    ],
)
def test_unequal_cpus_are_told_apart(monkeypatch, kind, one, others):
    def told(*values):
        text = "\n".join(kind.format(core, *values) for core in range(4))
        monkeypatch.setattr(Path, "read_text", lambda path: text)
        return cpu()

    assert told(*one) == told(*one)
    assert len({told(*one), *(told(*other) for other in others)}) == 3
