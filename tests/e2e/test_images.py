"""Targets that read images and rotate by M-RoPE: the text is that of plain decoding."""

import pytest

from tests.e2e import engine
from tests.e2e.models import (
    IMAGE,
    IMAGE_BEGINS,
    IMAGE_ENDS,
    add_tokenizer,
    tiny_llama,
    tiny_vision_model,
)
from tests.e2e.test_greedy import GREEDY, job, prompt

# Positions behind an image are fewer than its tokens; one prompt has none.
IMAGES = [(8, 12), (28, 12), None, (16, 40), (20, 20)]
LENGTH = 40


def a_prompt(i: int, has_image: bool) -> list[int]:
    """Ids, some before and some behind the image."""
    ids = [1 + token % (IMAGE - 1) for token in prompt(7 + i, i)]
    image = [IMAGE_BEGINS, IMAGE, IMAGE_ENDS] if has_image else []
    return ids[:3] + image + ids[3:]


PROMPTS = [a_prompt(i, shape is not None) for i, shape in enumerate(IMAGES)]
PARAMS = [
    {**GREEDY, "temperature": 0.7 * (i % 2), "seed": i, "max_tokens": LENGTH}
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By what drafts, and "plain"."""
    folder = tmp_path_factory.mktemp("images")
    target = tiny_vision_model(folder / "target", seed=0)
    # It knows nothing of images, but ids; the target knows M-RoPE as an SSM, too.
    ssm = tiny_llama(folder / "ssm", seed=0)
    add_tokenizer(ssm)

    def run(config: dict | None, ssm: str = target) -> dict:
        llm = {"skip_tokenizer_init": False, "max_num_batched_tokens": 48}
        made = job((target, ssm), config, PARAMS, PROMPTS, **llm)
        return {**made, "images": IMAGES}

    runs = {
        "plain": {**run(None), "plain_v2": True},
        "itself": run({"tree": "4,2,2"}),
        "SSM of text": run({"tree": "4,2,2"}, ssm),
        "suffix": run({"model": "suffix"}),
        "flat": {**run({"tree": "4,2,2"}), "mutation": "position"},
    }
    return dict(zip(runs, engine.run(list(runs.values())), strict=True))


@pytest.mark.parametrize("source", ["itself", "SSM of text", "suffix"])
def test_the_text_is_plain_decodings_behind_images(results, source):
    plain, tree = results["plain"], results[source]
    print(source, tree["accepted"], "of", tree["drafted"], "nodes accepted")
    assert tree["tokens"] == plain["tokens"]
    assert [len(t) for (t,) in tree["tokens"]] == [LENGTH] * len(PROMPTS)
    assert tree["free_blocks"] == tree["blocks"] - 1
    assert tree["drafts"] > 10 and tree["accepted"]


def test_branches_are_accepted_behind_images(results):
    assert results["itself"]["branches"] > 10


def test_flat_positions_show_behind_images(results):
    assert results["flat"]["tokens"] != results["plain"]["tokens"]
