"""The installed vLLM is what the package was written for, by signature and by code."""

import json
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_specinfer import cli, compat, seams

INSTALLED = Path(find_spec("vllm").origin).parent
SCHEDULER = '''
from vllm.base import Base, scaled

class Scheduler(Base):
    limit: int = 3

    def add(self, request: int, front: bool = False) -> None:
        """It adds."""
        # Comments do not count.
        self.queue.append(request)

def launch(x, *, block=64):
    return scaled(x)
'''
BASE = """
class Base:
    needed: str

    def step(self): ...

def half(x):
    return x / 2

def scaled(x):
    return half(x) * 4

def other(x):
    return scaled(x)
"""
TREE = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '0.33.7'\n",
    "vllm/base.py": BASE,
    "vllm/scheduler.py": SCHEDULER,
}
NAMES = {
    "vllm.scheduler:Scheduler",
    "vllm.scheduler:Scheduler.add",
    "vllm.scheduler:Scheduler.limit",
    "vllm.scheduler:Scheduler.step",
    "vllm.scheduler:launch",
}


def write(folder, **changed):
    for name, text in (TREE | changed).items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    return seams.VllmSource(folder)


@pytest.fixture
def changes(tmp_path, monkeypatch):
    """What is said of a vLLM in which one thing is written in another way."""
    monkeypatch.setattr(seams, "TABLES", tmp_path)
    monkeypatch.setattr(seams, "_names", lambda source: NAMES)
    recorded = seams.record(write(tmp_path / "recorded"))
    seams.write({"0.32": {}, "0.33": recorded})

    def compare(old, new, file="vllm/scheduler.py"):
        assert old in TREE[file]
        return seams.compare(
            write(tmp_path / "changed", **{file: TREE[file].replace(old, new)})
        )

    return compare


def test_the_installed_vllm_is_what_the_package_was_written_for():
    source = seams.VllmSource(INSTALLED)
    assert compat.release(source.version) is not None
    assert seams.compare(source) == []


def test_every_name_that_the_package_relies_on_is_recorded_for_each_release():
    source = seams.VllmSource(INSTALLED)
    relied_on, installed = set(seams.record(source)), compat.release(source.version)
    # An older release lacks what only the installed one has.
    for release in compat.SUPPORTED[compat.SUPPORTED.index(installed) :]:
        assert relied_on - seams.table(release).keys() == set(), release


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Comments do not count.", "# Nor here."),
        ('"""It adds."""', '"""It appends."""'),
        ("self.queue.append(request)", "self.queue.append(\n            request)"),
        ("request: int, front: bool", "request: object, front: bool"),
        ("def launch", "def other(): ...\n\ndef launch"),
    ],
)
def test_what_changes_nothing_is_not_reported(changes, old, new):
    assert changes(old, new) == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("append", "insert", "vllm.scheduler:Scheduler.add has other code"),
        ("int = 3", "int = 4", "vllm.scheduler:Scheduler.limit has other code"),
        ("def launch", "def start", "vllm.scheduler:launch is gone"),
        ("def launch", "@jit\ndef launch", "vllm.scheduler:launch has other code"),
        (
            "block=64",
            "block=32, more=1",
            "vllm.scheduler:launch is not the same: -block=64  +block=32  +more=1",
        ),
        ("(Base)", "", "vllm.scheduler:Scheduler.step is gone"),
        (
            "    def add(",
            "    @abstractmethod\n    def end(self): ...\n\n    def add(",
            "vllm.scheduler:Scheduler is not the same: +end()",
        ),
    ],
)
def test_what_changes_is_named(changes, old, new, sentence):
    assert sentence in changes(old, new)


def test_a_later_release_is_recorded_by_what_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(seams, "TABLES", tmp_path)
    monkeypatch.setattr(seams, "_names", lambda source: filter(source.find, NAMES))
    sources = {"0.32": {}, "0.33": {"launch": "start", "append": "insert"}}
    seams.write(dict.fromkeys(sources, {}))
    recorded = {}

    def record(release, changed):
        code = SCHEDULER
        for old, new in changed.items():
            code = code.replace(old, new)
        version = {"vllm/_version.py": f"version = '{release}.1'"}
        source = write(tmp_path / release, **version, **{"vllm/scheduler.py": code})
        recorded[release] = seams.record(source)
        seams.main(str(tmp_path / release))

    for release, changed in sources.items():
        record(release, changed)
    assert {r: seams.table(r) for r in recorded} == recorded
    add = "vllm.scheduler:Scheduler.add"
    differences = {add: recorded["0.33"][add], "vllm.scheduler:launch": None}
    assert json.loads((tmp_path / "vllm-0.33.json").read_text()) == differences
    # Recorded again, an older release leaves the later ones as they are.
    record("0.32", {"limit: int = 3": "limit: int = 4", "launch": "start"})
    assert {r: seams.table(r) for r in recorded} == recorded


def test_a_method_is_found_in_the_class_that_defines_it(changes):
    file = "vllm/base.py"
    expected = ["vllm.scheduler:Scheduler.step has other code"]
    assert changes("(self): ...", "(self): return 1", file) == expected


def test_what_a_kernel_calls_is_looked_at_too(tmp_path):
    source = write(tmp_path)
    called = {"vllm.base:scaled", "vllm.base:half"}
    assert source.helpers("vllm.scheduler:launch") == called
    kernels = "vllm.v1.worker.gpu.sample."
    assert f"{kernels}gumbel:_murmur3_rotl32" in seams.table("0.33")


def test_the_command_reads_a_wheel_and_does_not_run_it(tmp_path, capsys):
    wheel = tmp_path / "vllm-0.99.0.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "raise RuntimeError('was run')")
        archive.writestr("vllm/_version.py", "__version__ = version = '0.99.0'")
    assert cli.main(["check", "--vllm-source", str(wheel)]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        "ok    release not among 0.32, 0.33: compared with the newest of them"
    )
    assert "      vllm.v1.worker.gpu_worker:Worker.load_model is gone" in rest


@pytest.mark.parametrize("name", ["nothing", "empty", "text.whl"])
def test_what_is_no_vllm_is_said_to_be_none(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.whl").write_text("no wheel")
    assert cli.main(["check", "--vllm-source", str(tmp_path / name)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL  --vllm-source must ")


def test_the_command_finds_nothing_in_the_installed_vllm(capsys):
    assert cli.main(["check", "--vllm-source", str(INSTALLED)]) == 0
    assert "is what specinfer was written for" in capsys.readouterr().out
