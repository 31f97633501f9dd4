"""What files of prompts are read as, and which are refused."""

import json
import runpy
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.models import VOCAB, add_tokenizer
from vllm_specinfer.tuning.prompts import read_prompts

EXAMPLE = Path(__file__).parents[2] / "examples" / "training_prompts.py"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Token i is the character chr(32 + i)."""
    folder = tmp_path_factory.mktemp("tokenizer")
    add_tokenizer(str(folder))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def untemplated(tokenizer, tmp_path):
    folder = tmp_path / "untemplated"
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson"])
def test_json_lines_are_known_by_their_names(tokenizer, tmp_path, name):
    file = tmp_path / name
    file.write_text('{"prompt": "!"}\n{"prompt": [2]}\n')
    assert read_prompts(file, tokenizer) == [[1], [2]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", '\n{"prompt": "!"}\n'),
        ("a", '{"messages": []}\n'),
        ("a.json", '{"prompt": "!"}\n'),
        ("a.json", "[\n"),
    ],
)
def test_json_is_no_text_to_train_on(tokenizer, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"must be text where .* not named \.jsonl"):
        read_prompts(tmp_path / name, tokenizer)


def test_text_may_look_like_json(tokenizer, tmp_path):
    lines = ['{"a": 1}', "[1]", '{"prompt": 1}', "{"]
    file = tmp_path / "a.txt"
    file.write_text("\n".join(lines))
    assert read_prompts(file, tokenizer) == [tokenizer.encode(line) for line in lines]


def test_a_byte_order_mark_is_no_text_and_blank_lines_count(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "!"}\n', "utf-8-sig")
    assert read_prompts(file, tokenizer) == [[1]]
    file.write_text('{"prompt": "!"}\n\n\n{', "utf-8")
    with pytest.raises(ValueError, match="line 4 must be JSON"):
        read_prompts(file, tokenizer)


def test_cut_prompts_are_counted_aloud(tokenizer, tmp_path, capsys):
    file = tmp_path / "a.txt"
    file.write_text('!!!\n"!\n!""\n')
    assert read_prompts(file, tokenizer, 2) == [[1, 1], [2, 1], [2, 2]]
    sentence = f"2 prompts of {file} are cut to their last 2 tokens\n"
    assert capsys.readouterr().out == sentence
    read_prompts(file, tokenizer, 3)
    read_prompts(file, tokenizer, 0)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("prompt", [[3], "#"])
def test_tokens_must_have_an_embedding(tokenizer, tmp_path, prompt):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": prompt}))
    assert read_prompts(file, tokenizer, vocab_size=2 * VOCAB) == [[3]]
    with pytest.raises(ValueError, match="line 1 must have token ids below 3; got"):
        read_prompts(file, tokenizer, vocab_size=3)


class OwnTemplate:
    """A tokenizer whose template is code, as Mistral's is."""

    def __len__(self):
        return VOCAB

    def apply_chat_template(self, messages, **options):
        return [len(m["content"]) for m in messages]


def test_chats_need_a_template_whoever_has_it(tokenizer, untemplated, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "!!"}]}')
    assert read_prompts(file, tokenizer) == [[1, 1]]
    assert read_prompts(file, OwnTemplate()) == [[2]]
    none = AutoTokenizer.from_pretrained(untemplated)
    with pytest.raises(ValueError, match="target has no chat template; got messages"):
        read_prompts(file, none)
    file.write_text('{"messages": [{"role": "user"}]}')
    with pytest.raises(ValueError, match="suit the target's tokenizer; got KeyError"):
        read_prompts(file, OwnTemplate())


def test_the_example_takes_targets_without_a_chat_template(tokenizer, untemplated):
    prompts = runpy.run_path(str(EXAMPLE))["prompts"]
    ids = next(prompts(untemplated, seed=0))
    assert ids == next(prompts(Path(tokenizer.name_or_path), seed=0))
