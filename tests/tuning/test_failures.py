"""Full disks, short memory and broken files are told in a sentence, bugs are not."""

import inspect
import resource
import signal

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from vllm.v1.engine import utils

from tests import processes
from tests.tuning.test_training import batches
from vllm_specinfer import cli
from vllm_specinfer.tuning import settings, training
from vllm_specinfer.tuning.failures import in_a_sentence


def broken(file, write, read):
    write({"a": torch.zeros(2**18)}, file)
    file.write_bytes(file.read_bytes()[: 2**19])
    read(file)


def told(work, sentence="must suffice and files be whole; got "):
    with pytest.raises(OSError, match=sentence) as error, in_a_sentence():
        work()
    assert "\n" not in str(error.value)


def test_memory_and_broken_files_are_told(tmp_path):
    told(lambda: torch.empty(2**50))
    told(lambda: broken(tmp_path / "a.pt", torch.save, torch.load))
    read = lambda file: safetensors.safe_open(file, "pt")  # noqa: E731
    told(lambda: broken(tmp_path / "a.safetensors", save_file, read))


def test_engines_that_do_not_start_are_told():
    says = "Engine core initialization failed"
    assert says in inspect.getsource(utils.wait_for_engine_startup)

    def start():
        raise RuntimeError(f"{says}. See root cause above. Failed core proc(s): {{}}")

    told(start, "the target's engine must start; got what it says above, Runt")


def write_more_than_there_is(folder):
    """A limit on files stands in for a full disk: torch and safetensors see no other
    difference than the number of the error."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
    weights = {"a": torch.zeros(2**16)}
    told(lambda: torch.save(weights, folder / "a.pt"))
    told(lambda: save_file(weights, folder / "a.safetensors"))


def test_full_disks_are_told(tmp_path):
    processes.call(write_more_than_there_is, tmp_path)


def test_bugs_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes"), in_a_sentence():
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.parametrize("kind", ["ssm", "eagle3"])
def test_the_command_tells_them(kind, tmp_path, capsys, monkeypatch):
    from vllm_specinfer.evidence import engines
    from vllm_specinfer.tuning import head, pool

    def fail(*args, **kwargs):
        raise safetensors.SafetensorError("cut off")

    monkeypatch.setattr(engines, "stay_in_process", lambda: None)
    monkeypatch.setattr(pool, "check_hidden", fail)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    assert head and cli.main(
        ["tune", f"--type={kind}", "--target=t", "--prompts=p", f"--out={tmp_path}"]
    )
    assert capsys.readouterr().err.endswith("got SafetensorError: cut off\n")


def test_training_needs_room_for_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(settings.shutil, "disk_usage", lambda folder: disk)
    disk = type("Disk", (), {"free": 10})
    with pytest.raises(OSError, match="needs 0 MB of free disk; got 0 MB"):
        batches(tmp_path)
    # What an earlier run has written there counts.
    monkeypatch.setattr(training, "FreedMemory", lambda: 1 / 0)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "optimizer.pt").write_bytes(bytes(54))
    with pytest.raises(ZeroDivisionError):
        batches(tmp_path)
    disk.free = 9
    with pytest.raises(OSError, match="of free disk"):
        batches(tmp_path)
