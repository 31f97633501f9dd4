"""The upstream form of each hook applies to the installed vLLM."""

import compileall
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[1] / "patches"
SITE_PACKAGES = Path(importlib.util.find_spec("vllm").origin).parents[1]


def patches_of_installed_version():
    version = (SITE_PACKAGES / "vllm/_version.py").read_text()
    release = re.search(r"version = '(\d+\.\d+)\.", version).group(1)
    return sorted((PATCHES / release).glob("*.patch"))


@pytest.fixture(params=patches_of_installed_version(), ids=lambda path: path.stem)
def patch(request):
    return request.param


def test_patch_applies_to_the_installed_sources(patch, tmp_path):
    for name in re.findall(r"^--- a/(.+)$", patch.read_text(), re.M):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SITE_PACKAGES / name, tmp_path / name)
    # A repository of its own: below another one git apply would skip the files.
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for command in (["git", "apply", "--check"], ["git", "apply"]):
        subprocess.run([*command, patch], cwd=tmp_path, check=True)
    assert compileall.compile_dir(tmp_path / "vllm", quiet=1)


def test_the_register_names_every_patch(patch):
    assert patch.name in (PATCHES / "README.md").read_text()


def test_there_is_a_patch_for_the_installed_version():
    assert patches_of_installed_version()
