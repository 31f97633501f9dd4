"""The wheel holds every file of the package, and what installers look for."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vllm_specinfer
from vllm_specinfer import checkup

ROOT = Path(__file__).parents[1]
NO_FILES = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # Built from a copy: setuptools writes beside the sources.
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "vllm_specinfer", source / "vllm_specinfer", ignore=NO_FILES)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True)
    (file,) = out.iterdir()
    with zipfile.ZipFile(file) as archive:
        yield archive


def test_the_wheel_holds_every_file_of_the_package(wheel):
    package = ROOT / "vllm_specinfer"
    files = {
        str(file.relative_to(ROOT))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {"data/vllm-0.32.json", "kernels/cpu/bindings.cpp"} <= {
        file.partition("/")[2] for file in files
    }
    packed = {n for n in wheel.namelist() if n.startswith("vllm_specinfer/")}
    assert packed == files


def test_the_wheel_says_what_it_is(wheel):
    info = f"vllm_specinfer-{vllm_specinfer.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert dict(entries["vllm.general_plugins"]) == {
        checkup.ENTRY_POINT: "vllm_specinfer.plugin:register"
    }
    assert entries["console_scripts"]["vllm-specinfer"] == "vllm_specinfer.cli:main"


def test_the_changelog_names_the_version():
    assert f"## {vllm_specinfer.__version__} " in (ROOT / "CHANGELOG.md").read_text()
