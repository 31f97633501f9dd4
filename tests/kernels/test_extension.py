"""The library of C++ kernels is built where it is not there."""

from vllm_specinfer.kernels.cpu import extension


def test_a_library_that_does_not_load_is_built_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    path = extension._library()
    path.parent.mkdir()
    path.write_bytes(b"")

    def load(path):
        if not path.read_bytes():
            raise ImportError("file too short")
        return "kernels"

    monkeypatch.setattr(extension, "_build", lambda path: path.write_bytes(b"library"))
    monkeypatch.setattr(extension, "_import", load)
    extension.load.cache_clear()
    try:
        assert extension.load() == "kernels"
    finally:
        extension.load.cache_clear()
