"""A folder that training begins in."""

import pytest

from vllm_specinfer.tuning.settings import SETTINGS_FILE, PoolSettings, open_folder


def test_what_a_kill_left_of_the_first_file_is_in_nobodys_way(tmp_path):
    settings = PoolSettings(target="target", prompts="prompts")
    left = tmp_path / ".left" / SETTINGS_FILE
    left.parent.mkdir()
    left.touch()
    open_folder(tmp_path, settings, [])
    assert (tmp_path / SETTINGS_FILE).is_file()
    (tmp_path / SETTINGS_FILE).rename(tmp_path / "mine.txt")
    with pytest.raises(ValueError, match="must be empty or begun before"):
        open_folder(tmp_path, settings, [])
