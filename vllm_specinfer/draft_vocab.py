"""The tokens that an SSM drafts, where a file beside its weights names them.

Standard library only at import.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

DRAFT_VOCAB_FILE = "draft_vocab.json"


def read_draft_vocab(ssm: "ModelConfig") -> list[int] | None:
    """As `draft_vocab_of`."""
    return draft_vocab_of(ssm.model, ssm.revision, ssm.get_vocab_size())


def draft_vocab_of(
    model: str, revision: str | None, vocab_size: int
) -> list[int] | None:
    """The distinct ids of an SSM's draft vocabulary, None where it has no file.

    Args:
        model: Folder or hub id.
        revision: Of the latter.
        vocab_size: Ids are below it.

    Raises:
        ValueError: One sentence that says what the file must be.
    """
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    try:
        content = get_hf_file_to_dict(DRAFT_VOCAB_FILE, model, revision)
    except (OSError, ValueError, RecursionError) as error:
        wrong: str | None = str(error)
    else:
        if content is None:
            return None
        tokens = content.get("tokens") if isinstance(content, dict) else None
        wrong = _what_is_wrong(tokens, vocab_size)
    if wrong is not None:
        raise ValueError(
            f"{DRAFT_VOCAB_FILE} of the SSM {model!r} must be "
            f'{{"tokens": [...]}} with distinct ids below {vocab_size}; got {wrong}'
        )
    return tokens


def _what_is_wrong(tokens: Any, vocab_size: int) -> str | None:
    if not isinstance(tokens, list):
        return "no such list"
    if not tokens:
        return "no ids"
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            return f"{token!r:.50}"
    token, count = Counter(tokens).most_common(1)[0]
    return None if count == 1 else f"{token} {count} times"
