"""What of the prompts and the target the training data is made of."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, Gemma4Config, LlavaConfig
from transformers.quantizers import quantizer_awq

from tests.e2e.models import VOCAB, add_tokenizer, tiny_llama, tiny_model
from vllm_specinfer.tuning import data
from vllm_specinfer.tuning.data import LABEL, LABELS_FILE, SAMPLES_FILE, Sample, prepare
from vllm_specinfer.tuning.head import tune_head
from vllm_specinfer.tuning.pool import tune
from vllm_specinfer.tuning.readable import check_readable
from vllm_specinfer.tuning.settings import (
    HeadSettings,
    PoolSettings,
    Training,
    open_folder,
)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    from vllm.model_executor.models import registry

    # vLLM looks at each architecture in a process of its own.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())


@pytest.fixture
def continued(monkeypatch):
    """The prompts, each of which gets an answer of five tokens."""
    found = []

    def generate(out, settings, prompts):
        found.extend(prompts)
        return [Sample(ids, [1] * 5) for ids in prompts]

    monkeypatch.setattr(data, "generate", generate)
    return found


def prepared(folder, target, lines, **settings):
    """The data of prompts made of such lines."""
    add_tokenizer(str(target))
    (folder / "prompts.txt").write_text("\n".join(lines))
    settings = Training(str(target), str(folder / "prompts.txt"), **settings)
    tokenizer = AutoTokenizer.from_pretrained(target)
    return prepare(folder / "out", settings, tokenizer)


@pytest.mark.parametrize(
    ("settings", "room"),
    [({}, 72), ({"engine": {"max_model_len": 64}}, 40)],
)
def test_prompts_leave_room_for_their_answers(
    tmp_path, capsys, continued, settings, room
):
    tiny_model("gpt2", seed=0).save_pretrained(tmp_path / "target")
    lines = ["!" * 200, "#"]
    prepared(tmp_path, tmp_path / "target", lines, max_tokens=24, **settings)
    assert [len(ids) for ids in continued] == [room, 1]
    assert f"are cut to their last {room} tokens" in capsys.readouterr().out


def test_answers_must_leave_room_for_prompts(tmp_path, continued):
    tiny_model("gpt2", seed=0).save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="max_tokens must be below the 96 positions"):
        prepared(tmp_path, tmp_path / "target", ["!", "#"], max_tokens=96)
    assert not continued


def test_the_engine_runs_the_target_that_training_reads(tmp_path, continued):
    target = tiny_llama(tmp_path / "target", seed=0)
    with pytest.raises(ValueError, match="must be a folder.*; got the revision 'v2'"):
        prepared(tmp_path, target, ["!", "#"], engine={"revision": "v2"})
    assert not continued


def test_tokens_without_an_embedding_are_not_drafted(tmp_path, continued):
    target = tiny_llama(tmp_path / "target", seed=0, vocab_size=VOCAB - 32)
    found = prepared(tmp_path, target, ["!", "#"], draft_vocab=0)
    assert found.draft_vocab == list(range(VOCAB - 32))


def test_answers_that_were_cut_off_are_counted_aloud(tmp_path, capsys, continued):
    target = tiny_llama(tmp_path / "target", seed=0)
    prepared(tmp_path, target, ["!", "#"], max_tokens=5)
    assert "2 of 2 continuations have all 5 tokens" in capsys.readouterr().out
    (tmp_path / "out" / "tuning.json").unlink()
    prepared(tmp_path, target, ["!", "#"], max_tokens=6)
    assert "continuations have" not in capsys.readouterr().out


def test_a_run_goes_on_where_templates_write_another_date(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0)
    add_tokenizer(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    chats = [[{"role": "user", "content": text}] for text in "!#"]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    settings = PoolSettings(target, str(file))
    open_folder(out, settings, tokenizer.get_vocab())
    # Yesterday's.
    samples = [{"prompt": [9, token], "answer": [4]} for token in (1, 3)]
    (out / SAMPLES_FILE).write_text("".join(json.dumps(s) + "\n" for s in samples))
    np.zeros(2, LABEL).tofile(out / LABELS_FILE)
    tokenizer.chat_template = "8" + tokenizer.chat_template
    found = prepare(out, settings, tokenizer)
    assert [s.prompt for s in found.validation + found.training] == [[9, 1], [9, 3]]


def test_texts_of_another_tokenizer_or_target_are_not_gone_on_with(tmp_path):
    folders = [tiny_llama(tmp_path / name, seed=0) for name in ("one", "two")]
    add_tokenizer(*folders)
    file, link, out = (tmp_path / name for name in ("prompts.txt", "link", "out"))
    file.write_text("!\n#\n")
    link.symlink_to(folders[0])

    def go_on(target):
        tokenizer = AutoTokenizer.from_pretrained(target)
        return prepare(out, PoolSettings(str(target), str(file)), tokenizer)

    tokens = AutoTokenizer.from_pretrained(folders[0]).get_vocab()
    open_folder(out, PoolSettings(folders[0], str(file)), tokens)
    samples = [{"prompt": [token], "answer": [4]} for token in (1, 3)]
    (out / SAMPLES_FILE).write_text("".join(json.dumps(s) + "\n" for s in samples))
    np.zeros(2, LABEL).tofile(out / LABELS_FILE)
    for same in (f"{folders[0]}/", link):
        assert len(go_on(same).training) == 1
    link.unlink()
    link.symlink_to(folders[1])
    with pytest.raises(ValueError, match="begun with other settings .target '.*/one' "):
        go_on(link)
    written = Path(folders[0], "tokenizer.json")
    written.write_text(written.read_text().replace('"a"', '"\u00e4"'))
    with pytest.raises(ValueError, match="tokenizer of .* must be as it was when"):
        go_on(folders[0])


@pytest.mark.parametrize(
    "begin",
    [
        lambda target, out: tune(out, PoolSettings(target, "none", hidden=160)),
        lambda target, out: tune_head(out, HeadSettings(target, "none")),
    ],
)
def test_targets_that_transformers_cannot_read_are_refused(
    tmp_path, monkeypatch, begin
):
    monkeypatch.setattr(quantizer_awq, "is_gptqmodel_available", lambda: False)
    target = tiny_llama(tmp_path, seed=0)
    add_tokenizer(target)
    config = json.loads((tmp_path / "config.json").read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    for quantization in (None, {"quant_method": "modelopt"}, awq):
        config["quantization_config"] = quantization
        (tmp_path / "config.json").write_text(json.dumps(config))
        if quantization is not awq:
            check_readable(target)
    with pytest.raises(ValueError, match="must be one that transformers can read"):
        begin(target, tmp_path / "out")
    LlavaConfig().save_pretrained(target)
    with pytest.raises(ValueError, match="causal language model; got 'llava'"):
        begin(target, tmp_path / "out")


def test_bases_that_transformers_cannot_read_are_refused(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0)
    add_tokenizer(target)
    base = str(tmp_path / "base")
    LlavaConfig().save_pretrained(base)
    with pytest.raises(ValueError, match="the base must be .* model; got 'llava'"):
        tune(tmp_path / "out", PoolSettings(target, "none", base=base))


def test_heads_are_for_language_models_alone(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0)
    add_tokenizer(target)
    Gemma4Config().save_pretrained(target)
    with pytest.raises(ValueError, match="alone; got 'gemma4' with other parts"):
        tune_head(tmp_path / "out", HeadSettings(target, "none"))
