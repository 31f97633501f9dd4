"""Offline batch: `LLM(...)` with specinfer.

python examples/offline.py
"""

import os
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    """Answer a few chats in one batch."""
    from vllm import LLM, SamplingParams

    from vllm_specinfer import assets

    llm = LLM(
        str(assets.smollm2()),
        max_model_len=2048,
        max_num_seqs=8,
        speculative_config={
            "method": "specinfer",
            "model": str(Path(__file__).parent / "pools" / "smollm2-135m"),
        },
    )
    chats = [[{"role": "user", "content": text}] for text in assets.mtbench()[:4]]
    for output in llm.chat(chats, SamplingParams(temperature=0, max_tokens=128)):
        print(output.outputs[0].text, "\n" + "-" * 72)


if __name__ == "__main__":
    main()
