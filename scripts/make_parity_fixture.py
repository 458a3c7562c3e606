"""Makes tests/fixtures/smollm2_greedy.json: greedy tokens of Hugging Face's Llama, float32, on the default model.

    .venv/bin/python scripts/export_hf.py --output /tmp/smollm2_hf
    PYTHON_WITH_TORCH scripts/make_parity_fixture.py --folder /tmp/smollm2_hf --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch and transformers (for --gguf also gguf and accelerate), most of which jpaged does not; imports nothing of
jpaged, so that the reference is independent. With --gguf, transformers' own reading of the file is compared with the
exported folder first: every tensor and every prompt's ids must be equal.

For each generated position the fixture holds the token, its log-probability, the second-best token, and how far behind
it is: where the gap is under 1e-3 an implementation may choose either, and the comparison goes on teacher-forced.
"""

import argparse
import hashlib
import json
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 64
OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "smollm2_greedy.json"

CHAT_PROMPTS = {
    "chat_question": [{"role": "user", "content": "What is the capital of France, and what is it known for?"}],
    "chat_explain": [{"role": "user", "content": "Explain to a ten-year-old why the sky is blue."}],
    "chat_system": [
        {"role": "system", "content": "You are a terse assistant. Answer in one sentence."},
        {"role": "user", "content": "How do vaccines work?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "My name is Ada and I like chess."},
        {"role": "assistant", "content": "Nice to meet you, Ada! How long have you been playing?"},
        {"role": "user", "content": "Ten years. What is my name, and what should I practise next?"},
    ],
    "chat_maths": [{"role": "user", "content": "A train travels 60 km in 45 minutes. What is its speed in km/h?"}],
    "chat_code": [{"role": "user", "content": "Write a Python function that reverses a linked list."}],
    "chat_emoji": [{"role": "user", "content": "What do these mean? 😀🎉👩‍👩‍👧‍👦🏳️‍🌈"}],
}

_PARAGRAPH = (
    "The lighthouse on the northern cape was built in 1874 by engineers who had never seen the sea frozen. "
    "In the first winter the ice climbed the tower to the height of the second window, and the keeper, a former "
    "clockmaker named Halvorsen, cut steps into it so that he could still leave by the roof. He kept two logbooks. "
    "The official one recorded wind, barometer and passing ships; the other recorded what he thought about while he "
    "was waiting. "
)

TEXT_PROMPTS = {
    "completion": "Once upon a time, in a small village by the sea, there lived",
    "single_token": "The",
    "code_python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "code_c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "maths": "2 + 2 = 4\n3 + 5 = 8\n12 + 30 = 42\n17 + 25 =",
    "list": "Shopping list:\n- apples\n- bread\n- milk\n-",
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "works": [',
    "table": "| Country | Capital |\n|---|---|\n| France | Paris |\n| Japan |",
    "french": "La Révolution française est une période de",
    "chinese": "人工智能是计算机科学的一个分支，",
    "unicode": "Ω ≈ 3.14 ☃ naïve café — “quotes” … ñandú Ünïcödé 🚀🚀",
    "repetition": "one two three one two three one two three one two",
    "long": _PARAGRAPH * 4 + "In the second logbook, on the last page, he wrote:",
}


@torch.inference_mode()
def greedy(model, prompt_ids: list[int]) -> list[int]:
    """NUM_TOKENS greedy tokens; EOS is a token like any other."""
    ids, cache, tokens = torch.tensor([prompt_ids]), None, []
    for _ in range(NUM_TOKENS):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens


@torch.inference_mode()
def score(model, prompt_ids: list[int], tokens: list[int]) -> dict[str, list]:
    """Log-probabilities at the generated positions, from one pass over the whole sequence."""
    logits = model(input_ids=torch.tensor([prompt_ids + tokens[:-1]])).logits[0, len(prompt_ids) - 1 :]
    logprobs = logits.double().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    others = logprobs.scatter(1, torch.tensor(tokens)[:, None], -torch.inf)
    second, second_ids = others.max(-1)
    return {
        "logprobs": [round(x, 5) for x in chosen.tolist()],
        "gaps": [round(x, 5) for x in (chosen - second).tolist()],
        "runner_up_ids": second_ids.tolist(),
    }


def check_against_gguf(gguf: Path, model, prompts: dict[str, str], tokenizer) -> None:
    """Exits unless transformers' own reading of the GGUF file gives the same tensors and the same prompt ids."""
    other = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    theirs = other.state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, theirs[name]):
            sys.exit(f"{name} differs from transformers' own reading of {gguf}")
    other_tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for name, text in prompts.items():
        ours, reference = (t(text, add_special_tokens=False)["input_ids"] for t in (tokenizer, other_tokenizer))
        if ours != reference:
            sys.exit(f"prompt {name}: ids {ours} differ from transformers' own reading of {gguf}: {reference}")
    print(f"{len(theirs)} tensors and {len(prompts)} prompts equal to transformers' own reading of {gguf.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="what export_hf.py wrote")
    parser.add_argument("--gguf", type=Path, help="the file it was made from, to check it against transformers' reader")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = {
        name: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for name, messages in CHAT_PROMPTS.items()
    } | TEXT_PROMPTS
    if args.gguf:
        check_against_gguf(args.gguf, model, prompts, tokenizer)
    entries = []
    for name, text in tqdm(prompts.items(), desc="Generating", unit="prompt"):
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = greedy(model, prompt_ids)
        scores = score(model, prompt_ids, tokens)
        worst = min(scores["gaps"])
        if worst < -1e-3:
            sys.exit(f"{name}: decoding token by token and the whole pass disagree by {-worst:.2e}")
        entry = {"name": name, "text": text}
        if name in CHAT_PROMPTS:
            entry["messages"] = CHAT_PROMPTS[name]
        entries.append(entry | {"prompt_token_ids": prompt_ids, "token_ids": tokens} | scores)
    fixture = {
        "model": "SmolLM2-135M-Instruct",
        "made_by": {
            "command": shlex.join(["python", *sys.argv]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": "float32",
            "attention": "eager",
            "gguf_sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest() if args.gguf else None,
        },
    }
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    head = json.dumps(fixture, indent=1)[:-2]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(f'{head},\n "prompts": [\n{lines}\n]}}\n', encoding="utf-8")
    gaps = sorted(gap for entry in entries for gap in entry["gaps"])
    print(
        f"{args.output}: {len(entries)} prompts, {args.output.stat().st_size / 1e3:.0f} kB; "
        f"{sum(gap < 1e-3 for gap in gaps)} of {len(gaps)} gaps are under 1e-3, the smallest are {gaps[:3]}"
    )


if __name__ == "__main__":
    main()
