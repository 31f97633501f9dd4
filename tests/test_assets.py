"""The wheels hold what the benchmarks and the demo count on."""

import itertools

import pytest

from vllm_specinfer import assets


def test_prompts_are_complete_and_distinct():
    mtbench, humaneval = assets.mtbench(), assets.humaneval()
    assert len(mtbench) == len(set(mtbench)) == 80
    assert len(humaneval) == len(set(humaneval)) == 164
    assert all(text.strip() for text in mtbench + humaneval)


def test_sharegpt_yields_past_the_first_items_of_a_cut_off_file():
    turns = list(itertools.islice(assets.sharegpt(), 1000))
    assert len(turns) == 1000


def test_chat_ends_where_the_answer_begins():
    model = assets.smollm2()
    (ids,) = assets.chat_token_ids(model, ["Hi"])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == 49152
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("count", [1, 7, 50, 0, 500])
def test_as_many_prompts_as_asked_for_are_spread_over_all(count, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"prompt {i}" for i in range(80)))
    every = assets.prompt_ids(str(file))
    found = assets.prompt_ids(str(file), count)
    assert len(every) == 80 and len(found) == (count if 0 < count < 80 else 80)
    places = [every.index(ids) for ids in found]
    gaps = {b - a for a, b in itertools.pairwise(places)}
    assert len(gaps) <= 2 and places[-1] >= 80 - 80 / len(found) - 1


def test_missing_wheel_is_named():
    with pytest.raises(FileNotFoundError, match="some-wheel must be installed"):
        assets._package("no_such_module_here", "some-wheel")


def test_a_model_is_made_once_and_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv(assets.CACHE_ENV, str(tmp_path / "cache"))

    def fails(folder):
        (folder / "config.json").write_text("{")
        raise OSError("the disk is full")

    def quicker(folder):
        assets.made_once("model", lambda other: (other / "config.json").write_text("1"))
        (folder / "config.json").write_text("2")

    with pytest.raises(OSError, match="full"):
        assets.made_once("model", fails)
    assert not list((tmp_path / "cache").iterdir())
    folder = assets.made_once("model", quicker)
    assert (folder / "config.json").read_text() == "1"
    assert assets.made_once("model", fails) == folder


def test_a_user_without_a_home_names_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv(assets.CACHE_ENV, raising=False)
    assert assets.cache_dir() == assets.Path.home() / ".cache" / "vllm-specinfer"

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(assets.Path, "home", no_home)
    monkeypatch.setenv(assets.CACHE_ENV, str(tmp_path))
    assert assets.cache_dir() == tmp_path


def test_the_same_context_goes_before_every_prompt():
    prompts = [[1], [2, 2], [3, 3, 3]]
    assert assets.with_context(prompts, 0) == prompts
    assert assets.with_context(prompts, 2) == [[1, 1], [2, 2], [3, 3, 3]]
    assert assets.with_context(prompts, 8) == [
        [1, 2, 2, 3, 3, 3, 1, 1],
        [1, 2, 2, 3, 3, 3, 2, 2],
        [1, 2, 2, 3, 3, 3, 3, 3],
    ]
