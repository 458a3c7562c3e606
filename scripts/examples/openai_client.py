"""A streamed chat with the openai package, which talks to jpaged as to any OpenAI-compatible server.

pip install openai
python scripts/examples/openai_client.py "What is the capital of France?"
"""

import argparse
import time

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="one of the server's --api-key, if it has any")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    start = time.monotonic()
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.question}],
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"min_p": 0.05},  # what the openai package does not know goes here
    )
    usage = None
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        usage = chunk.usage or usage
    seconds = time.monotonic() - start
    print(f"\n\n{usage.prompt_tokens} prompt + {usage.completion_tokens} output tokens in {seconds:.1f} s")


if __name__ == "__main__":
    main()
