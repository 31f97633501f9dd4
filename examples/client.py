"""Streams one chat from the server of `examples/serve.sh`.

python examples/client.py "How do bees find their way home?"
"""

import argparse
import sys

from openai import APIConnectionError, OpenAI


def main() -> None:
    """Print the answer as it arrives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default="What is a token tree?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")
    try:
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": args.text}],
            temperature=0,
            max_tokens=256,
            stream=True,
        )
    except APIConnectionError:
        sys.exit(f"no server at {args.url} yet; examples/serve.sh starts one")
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
