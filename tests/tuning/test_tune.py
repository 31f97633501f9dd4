"""`vllm-specinfer tune` end to end on a toy target, killed midway, and on bad input."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaForCausalLM

from tests import processes
from tests.e2e.engine import KV_BYTES
from tests.e2e.models import VOCAB, add_tokenizer, tiny_llama, tiny_model
from vllm_specinfer import cli
from vllm_specinfer.parsing import parse_options
from vllm_specinfer.tuning import pool
from vllm_specinfer.tuning.data import (
    LABEL,
    LABELS_FILE,
    SAMPLES_FILE,
    TOP,
    Sample,
    TrainingData,
    prepare,
    read_samples,
    with_labels,
)
from vllm_specinfer.tuning.model import IGNORED, Windows, collate, windows_hit
from vllm_specinfer.tuning.prompts import read_prompts
from vllm_specinfer.tuning.settings import PoolSettings, open_folder

NUM_PROMPTS = 40
ENGINE = {"enforce_eager": True, "kv_cache_memory_bytes": KV_BYTES}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = tiny_llama(folder / "model", seed=0, scale=2, bos_token_id=0)
    add_tokenizer(model)
    rng = np.random.default_rng(0)
    lines = ["".join(chr(33 + t) for t in rng.integers(0, 8, 6)) for _ in range(60)]
    (folder / "prompts.txt").write_text("\n".join(dict.fromkeys(lines)))
    return model, str(folder / "prompts.txt")


def command(target, out, **changes):
    model, prompts = target
    options = {
        "target": model,
        "prompts": prompts,
        "out": out,
        "hidden": 160,
        "layers": 2,
        "max-prompts": NUM_PROMPTS,
        "max-tokens": 24,
        "epochs": 30,
        "batch-size": 8,
        "validation": 0.2,
        "learning-rate": 3e-3,
        "engine": json.dumps(ENGINE),
        **changes,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return ["tune", *(f"--{name}={value}" for name, value in given.items())]


def run_and_kill(arguments, out, checkpoints):
    """Kill the command once it has written such a checkpoint."""
    log = out.parent / "log"
    process = processes.start(cli.main, arguments, log)
    deadline = time.time() + 300
    try:
        while not list(out.glob(f"{checkpoints}/checkpoint-*/trainer_state.json")):
            assert process.is_alive() and time.time() < deadline, log.read_text()
            time.sleep(0.05)
    finally:
        processes.kill(process)


def check_labels(samples, target):
    """They are what the target's logits say."""
    model = LlamaForCausalLM.from_pretrained(target)
    for sample in samples[:3]:
        ids = torch.tensor([sample.prompt + sample.answer])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(sample.prompt) - 1 : -1]
        tokens = torch.from_numpy(sample.label["token"].astype(np.int64))
        chances = sample.label["probability"]
        # Of tokens that are equally likely any may be the first.
        is_answer = sample.label["token"] == np.array(sample.answer)[:, None]
        assert is_answer.any(1).all() and (chances[is_answer] == chances[:, 0]).all()
        assert (np.diff(chances) <= 0).all()
        assert all(len(set(row)) == TOP for row in tokens.tolist())
        # vLLM runs the target in another precision.
        wanted = logits.softmax(-1).gather(1, tokens)
        np.testing.assert_allclose(chances, wanted, atol=0.02)


def test_a_killed_run_goes_on_and_the_pool_is_usable(target, tmp_path):
    out = tmp_path / "pool"
    run_and_kill(command(target, out), out, "checkpoints/ssm1")
    assert json.loads((out / "manifest.json").read_text())["ssms"] == [
        {"model": "ssm0"},
        {"model": "suffix"},
    ]
    # A line that the kill cut off, as well.
    samples, labels = ((out / f).read_bytes() for f in (SAMPLES_FILE, LABELS_FILE))
    (out / SAMPLES_FILE).write_bytes(samples[:-20])
    weights = (out / "ssm0" / "model.safetensors").stat()

    log = processes.run(cli.main, command(target, out), tmp_path / "log")
    assert "ssm in" in log
    assert (out / "ssm0" / "model.safetensors").stat().st_mtime == weights.st_mtime
    assert (out / SAMPLES_FILE).read_bytes() == samples
    assert (out / LABELS_FILE).read_bytes() == labels
    check_labels(with_labels(out, read_samples(out)), target[0])

    options = parse_options({"model": str(out)})
    *ssms, lookup = options.sources
    assert [os.path.basename(s.model) for s in ssms] == ["ssm0", "ssm1"]
    assert lookup.name == "suffix"
    one, two = json.loads((out / "manifest.json").read_text())["rounds"]
    # The target's 96 tokens are far from uniform; both SSMs learned.
    assert one["hit_rate"] > 0.2
    assert two["num_windows"] < one["num_windows"]
    assert two["marked"] > one["marked"] > 0.2
    assert two["pool_hit_rate"] > one["pool_hit_rate"] == one["hit_rate"]
    curves = (out / "curves.csv").read_text().splitlines()
    steps = [line.split(",") for line in curves[1:] if line.split(",")[1]]
    assert float(steps[0][2]) > float(steps[len(steps) // 2 - 1][2])
    # Resumed, the second round still has the losses of all of its steps.
    assert [s[1] for s in steps if s[0] == "2"] == [
        str(step) for step in sorted(int(s[1]) for s in steps if s[0] == "2")
    ]
    assert int(next(s[1] for s in steps if s[0] == "2")) < 20
    assert (out / "curves.png").stat().st_size > 10_000
    assert json.loads((out / "tuning.json").read_text())["versions"]["torch"]

    # It grows, by other batches; what is there stays.
    weights = [(out / name / "model.safetensors").stat() for name in ("ssm0", "ssm1")]
    more = {"num-ssms": 3, "batch-size": 16}
    more["engine"] = json.dumps(ENGINE | {"max_num_seqs": 4})
    processes.run(cli.main, command(target, out, **more), tmp_path / "log")
    after = [(out / name / "model.safetensors").stat() for name in ("ssm0", "ssm1")]
    assert [w.st_mtime for w in after] == [w.st_mtime for w in weights]
    assert (out / SAMPLES_FILE).read_bytes() == samples
    rounds = json.loads((out / "manifest.json").read_text())["rounds"]
    assert [r["ssm"] for r in rounds] == ["ssm0", "ssm1", "ssm2"]
    assert rounds[2]["num_windows"] < two["num_windows"]
    assert rounds[2]["pool_hit_rate"] >= two["pool_hit_rate"]


def test_a_killed_head_goes_on_and_is_usable(target, tmp_path):
    out = tmp_path / "eagle"
    settings = {"type": "eagle3", "hidden": None, "layers": None, "draft-vocab": 64}
    settings |= {"epochs": 30, "max-tokens": 48}
    arguments = command(target, out, **settings)
    run_and_kill(arguments, out, "checkpoints")
    states = (out / "states.bin").stat()

    log = processes.run(cli.main, arguments, tmp_path / "log")
    assert "validation tokens hit first, by depth" in log
    assert states.st_size > 0 and not (out / "states.bin").exists()
    (source,) = parse_options({"model": str(out)}).sources
    assert source.model == str(out / "head")
    rates = json.loads((out / "manifest.json").read_text())["hit_rates"]
    # 96 tokens; the head's own state feeds the second depth and the third.
    assert len(rates) == 3 and min(rates) > 0.2
    rows = [r.split(",") for r in (out / "curves.csv").read_text().splitlines()[1:]]
    steps = [int(r[0]) for r in rows if r[0]]
    losses = [float(r[1]) for r in rows if r[0]]
    # Those from before the kill are still there.
    assert steps == sorted(set(steps)) and steps[0] < 20
    assert losses[-1] < losses[0]
    assert (out / "curves.png").stat().st_size > 10_000
    tokens = json.loads((out / "head" / "draft_vocab.json").read_text())["tokens"]
    assert tokens == sorted(tokens) and len(tokens) <= 64
    # Done is done.
    processes.run(cli.main, arguments, tmp_path / "log", timeout=120)


def test_options_of_another_type_are_refused(target, tmp_path, capsys):
    arguments = command(target, tmp_path / "out", type="eagle3")
    assert cli.main([str(a) for a in arguments]) == 1
    sentence = "--type eagle3 must go without --hidden, --layers"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "kind", "sentence"),
    [
        ("mamba", "ssm", "the target must be a causal language model with full or"),
        ("gemma2", "eagle3", "must give its inner states to an EAGLE-3 head; got"),
    ],
)
def test_targets_that_specinfer_refuses_are_not_trained_for(
    target, tmp_path, capsys, monkeypatch, family, kind, sentence
):
    from vllm.model_executor.models import registry

    # vLLM looks at each architecture in a process of its own.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
    model = tmp_path / "target"
    tiny_model(family, seed=0).save_pretrained(model)
    add_tokenizer(model)
    shape = {} if kind == "ssm" else {"hidden": None, "layers": None}
    arguments = command((model, target[1]), tmp_path / "out", type=kind, **shape)
    assert cli.main(arguments) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_kept_base_stays_as_it_is(target, tokenizer, tmp_path):
    base = tiny_llama(tmp_path / "base", seed=1)
    vocab = {"tokens": [7, 5, 6, 4]}
    (tmp_path / "base" / "draft_vocab.json").write_text(json.dumps(vocab))
    # Some other tokens are the commonest now, and the base may know nothing of them.
    samples = [Sample([1, 2, 3], [40, 41, 42, 43])]
    chosen = PoolSettings(*target, base=base, keep_base=True, num_ssms=1)
    data = TrainingData(samples, samples, [40, 41])
    out = tmp_path / "pool"
    out.mkdir()
    (first,) = pool._Pool(out, chosen, tokenizer, data).run()
    assert json.loads((out / "ssm0" / "draft_vocab.json").read_text()) == vocab
    assert first.hit_rate == first.marked == 0
    models = [LlamaForCausalLM.from_pretrained(f) for f in (base, out / "ssm0")]
    before, after = (model.state_dict() for model in models)
    assert {k: v.dtype for k, v in before.items()} == {
        k: v.dtype for k, v in after.items()
    }
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize("vocab_size", [VOCAB - 32, VOCAB + 32])
def test_an_ssm_is_asked_for_tokens_that_it_has(
    target, tokenizer, tmp_path, vocab_size
):
    asked = pool._Pool(
        tmp_path, PoolSettings(*target), tokenizer, TrainingData([], [], [])
    )._vocab_of(tmp_path, vocab_size)
    assert asked.tolist() == list(range(min(vocab_size, VOCAB)))


@pytest.mark.parametrize("wrong", ["[1]", "{dtype}"])
def test_engine_arguments_are_an_object(target, tmp_path, capsys, wrong):
    with pytest.raises(SystemExit):
        cli.main(command(target, tmp_path / "out", engine=wrong))
    assert "must be a JSON object such as {" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_next_round_learns_the_unmarked_windows_only():
    samples = [Sample([7, 8], [1, 2, 3, 4, 5]), Sample([9], [1, 2])]
    data = Windows(samples, [np.array([True, False, False]), np.array([True])], 2)
    assert len(data) == 1
    assert data[0] == ([7, 8, 1, 2, 3, 4, 5], [IGNORED] * 4 + [3, 4, 5], None)
    padded = collate([data[0], ([4], [4], None)])
    assert padded["input_ids"].shape == padded["labels"].shape == (2, 7)
    assert (padded["labels"][1, 1:] == IGNORED).all()


def test_a_window_is_hit_where_every_token_is():
    hit = np.array([1, 1, 1, 0, 1, 1, 1], bool)
    assert windows_hit(hit, 2).tolist() == [True, False, True, True]
    assert windows_hit(hit, 3).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "must hold at least one prompt; got none"),
        ("\n\n", "must hold at least one prompt; got none"),
        ("{", "line 1 must be JSON"),
        ('{"prompt": "ab"}\n{"text": "ab"}', "line 2 must have a prompt"),
        ('{"prompt": [1, 2, 9999]}', f"token ids below {VOCAB}"),
        ('["ab"]', "line 1 must have a prompt"),
        (b"\xff\xfe\x00", "must be UTF-8 text"),
    ],
)
def test_bad_prompts_are_refused_in_one_sentence(target, tmp_path, content, sentence):
    from transformers import AutoTokenizer

    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=sentence):
        read_prompts(file, AutoTokenizer.from_pretrained(target[0]))


@pytest.fixture(scope="module")
def tokenizer(target):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(target[0])
    loaded.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return loaded


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.characters()) | st.just("\ud800"),
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(st.sampled_from(("role", "content", "prompt")), v)
    ),
    max_leaves=6,
)
LINES = (
    st.fixed_dictionaries({"prompt": JSON}).map(json.dumps)
    | st.fixed_dictionaries({"messages": JSON}).map(json.dumps)
    | JSON.map(json.dumps)
    | st.just("[" * 10**5)
    | st.text()
)


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(['{"messages": [[]]}'])
@given(st.lists(LINES, max_size=3))
def test_any_prompts_are_read_or_refused_in_one_sentence(tokenizer, tmp_path, lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines), "utf-8", "surrogatepass")
    try:
        prompts = read_prompts(file, tokenizer)
    except ValueError as error:
        assert " must " in str(error) and "; got " in str(error)
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert all(0 <= t < len(tokenizer) for ids in prompts for t in ids)


def test_files_of_an_earlier_run_are_refused_where_they_are_broken(target, tmp_path):
    wanted = PoolSettings(*target)
    open_folder(tmp_path, wanted, {})
    for content in ("", "[]", '{"settings": 1}'):
        (tmp_path / "tuning.json").write_text(content)
        with pytest.raises(ValueError, match="must be as it was written; got"):
            open_folder(tmp_path, wanted, {})
    for content in ("text\n", '{"prompt": [1]}\n', "3\n"):
        (tmp_path / "samples.jsonl").write_text(content)
        with pytest.raises(ValueError, match="must be as it was written; got"):
            read_samples(tmp_path)
    (tmp_path / LABELS_FILE).write_bytes(b"short")
    with pytest.raises(ValueError, match="as it was written; got labels of 0 tokens"):
        with_labels(tmp_path, [Sample([1], [2])])


def test_prompts_may_be_text_or_token_ids_and_count_once(target, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target[0])
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "!\\""}\n\n{"prompt": [1, 2]}\n{"prompt": [3]}\n')
    assert read_prompts(file, tokenizer) == [[1, 2], [3]]
    file = tmp_path / "prompts.txt"
    file.write_text('!"\n#\n!"\n')
    assert read_prompts(file, tokenizer) == [[1, 2], [3]]


def test_other_input_is_refused_and_what_is_there_stays(
    target, tokenizer, tmp_path, capsys
):
    out, vocab = tmp_path / "pool", tokenizer.get_vocab()
    other = PoolSettings(*target, hidden=160, engine={"dtype": "float32"})
    open_folder(out, other, vocab)
    # Nothing has been made with them.
    open_folder(out, PoolSettings(*target, hidden=160), vocab)
    (out / "samples.jsonl").touch()
    begun = (out / "tuning.json").read_bytes()
    refused = {
        "begun with other settings (epochs 4 -> 5)": {"epochs": 5},
        "hidden must be a multiple of 32 and at least 160; got 128": {"hidden": 128},
        "layers must be at least 2; got 1": {"layers": 1},
        "hidden must be at most 193, 65 more than the target's": {"hidden": 224},
        "epochs must be at least 1; got 0": {"epochs": 0},
        "seed must be at least 0; got -1": {"seed": -1},
        "learning_rate must be a positive number; got nan": {"learning-rate": "nan"},
        "Is a directory": {"prompts": tmp_path},
        "No such file": {"prompts": tmp_path / "none.txt"},
        "at least two prompts": {"max-prompts": 1},
        "arguments of vllm.LLM; got fo": {"engine": '{"fo": 1}'},
        "--base must go without --hidden": {"base": target[0]},
    }
    model, prompts = target
    for sentence, change in refused.items():
        options = {"target": model, "prompts": prompts, "out": out, "hidden": 160}
        options |= change
        code = cli.main(["tune", *(f"--{k}={v}" for k, v in options.items())])
        assert code == 1
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1
        assert (out / "tuning.json").read_bytes() == begun
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert cli.main(command(target, tmp_path / "full")) == 1
    assert "must be empty or begun before" in capsys.readouterr().err
    assert not read_samples(tmp_path / "full")


def test_two_prompts_must_have_continuations(target, tokenizer, tmp_path):
    settings = PoolSettings(*target, max_prompts=2)
    first, second = read_prompts(Path(settings.prompts), tokenizer)[:2]
    samples = [{"prompt": first, "answer": [1]}, {"prompt": second, "answer": []}]
    open_folder(tmp_path, settings, tokenizer.get_vocab())
    labels = np.zeros(1, LABEL)
    labels.tofile(tmp_path / LABELS_FILE)
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (tmp_path / "samples.jsonl").write_text(lines)
    with pytest.raises(ValueError, match="must continue at least two .* got 1"):
        prepare(tmp_path, settings, tokenizer)


def test_an_ssm_that_marks_nothing_is_the_last(target, tokenizer, tmp_path, capsys):
    settings = PoolSettings(*target, num_ssms=2, compare_length=2, draft_vocab=0)
    sample = Sample([1], [2, 3, 2, 3])
    data = TrainingData([sample], [sample], [])
    tuned = pool._Pool(tmp_path, settings, tokenizer, data)
    numbers = []
    tuned._tune_one = lambda number, folder: numbers.append(number)

    def finish(folder):
        tuned._marks[0][0] |= marks[numbers[-1]]
        marked = float(tuned._marks[0].mean())
        return pool.Round(folder.name, 1, [], 0.0, 0.0, marked)

    tuned._finish = finish
    marks = [False, True]
    tuned.run()
    assert numbers == [0]
    assert "continues no further window" in capsys.readouterr().out
    numbers.clear()
    marks = [True, False]
    tuned.run()
    assert numbers == [0, 1]
    # Nobody is left to be told.
    assert "continues no further window" not in capsys.readouterr().out


def test_a_pool_that_grows_names_all_that_it_has(target, tokenizer, tmp_path):
    sample = Sample([1], [2, 3, 2, 3])
    data = TrainingData([sample], [sample], [])
    tuned = pool._Pool(tmp_path, PoolSettings(*target, num_ssms=3), tokenizer, data)
    for name in ("ssm0", "ssm1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / pool.ROUND_FILE).touch()
    manifest = tmp_path / "manifest.json"
    manifest.write_text("as it was")

    def finish(folder):
        assert manifest.read_text() == "as it was"
        return pool.Round(folder.name, 1, [], 0.0, 0.0, int(folder.name[3:]) / 2 + 0.1)

    def stop(number, folder):
        raise KeyboardInterrupt

    tuned._finish, tuned._tune_one = finish, stop
    with pytest.raises(KeyboardInterrupt):
        tuned.run()
    named = [ssm["model"] for ssm in json.loads(manifest.read_text())["ssms"]]
    assert named == ["ssm0", "ssm1", "suffix"]


def test_what_cannot_be_trained_is_refused_before_anything_is_continued(
    target, tmp_path, capsys
):
    model, prompts = target
    base = shutil.copytree(model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["vocab_size"] += 64
    (base / "config.json").write_text(json.dumps(config))
    shape = {"hidden": None, "layers": None}
    assert cli.main(command(target, tmp_path / "pool", base=base, **shape)) == 1
    assert "base must have the target's vocab_size" in capsys.readouterr().err
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    arguments = {"type": "eagle3", "target": tmp_path / "gpt2", "prompts": prompts}
    arguments["out"] = tmp_path / "head"
    assert cli.main(["tune", *(f"--{k}={v}" for k, v in arguments.items())]) == 1
    assert "layers as Llama's; got 'gpt2' without" in capsys.readouterr().err
    assert not (tmp_path / "pool").exists() and not (tmp_path / "head").exists()


@pytest.mark.parametrize(("scale", "said"), [(8.0, "head without scale"), (1.0, "")])
def test_a_base_whose_logits_are_scaled_is_refused(tmp_path, scale, said):
    from vllm_specinfer.tuning import model

    base = tiny_model("granite", seed=0, logits_scaling=scale)
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        model.check_logits(str(tmp_path / "base"))


def test_a_base_with_another_tokenizer_is_refused(target, tmp_path, capsys):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    base = tiny_llama(tmp_path / "base", seed=1)
    vocab = {chr(200 + i): i for i in range(VOCAB)}
    other = Tokenizer(models.WordLevel(vocab, unk_token=chr(200)))
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(base)
    shape = {"hidden": None, "layers": None}
    assert cli.main(command(target, tmp_path / "pool", base=base, **shape)) == 1
    assert "base must have the tokenizer of the target" in capsys.readouterr().err
    assert not (tmp_path / "pool").exists()
