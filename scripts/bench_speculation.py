"""What drafts gain where the output repeats the prompt, and what they cost where nothing repeats.

    python scripts/bench_speculation.py --repeat 5

Runs with and without `speculative_config` take turns in one process, on two engines of the same programs: one request
alone, and many of which eight run at once. The prefix cache holds their prompts: what is timed are decodes. Gain: a text with misspelt words is to be said
again. Cost: random prompts at temperature 1. The outputs must be the same but for what bfloat16 leaves open; the script
says how many are.
"""

import argparse
import random
import statistics
import sys
import time

import jax
from tqdm import tqdm

from jpaged import LLM, SamplingParams
from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, spread, write_json
from jpaged.config import DEFAULT_MODEL
from jpaged.speculative_config import SpeculativeConfig

BUCKETS = (2, 4, 8, 16, 24, 40, 64, 256)  # few, so that all are compiled before anything is measured
COST_BAR = 1.03  # seconds with drafts over seconds without, where nothing repeats
COUNTERS = (
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "generation_tokens", "iteration_tokens_total_count"
)  # fmt: skip
EXAMPLE = "Misspelt: {}\nCorrect:"
TEXTS = (  # public domain: Lincoln, Austen, Melville, Carroll, Dickens, Thoreau, Darwin, Shelley
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and "
    "dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is "
    "so well fixed in the minds of the surrounding families.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing "
    "particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was "
    "the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness.",
    "I went to the woods because I wished to live deliberately, to front only the essential facts of life, and see if I "
    "could not learn what it had to teach, and not, when I came to die, discover that I had not lived.",
    "There is grandeur in this view of life, with its several powers, having been originally breathed into a few forms or "
    "into one; and that, whilst this planet has gone cycling on according to the fixed law of gravity, endless forms most "
    "beautiful and most wonderful have been, and are being, evolved.",
    "You will rejoice to hear that no disaster has accompanied the commencement of an enterprise which you have regarded "
    "with such evil forebodings. I arrived here yesterday, and my first task is to assure my dear sister of my welfare.",
)


def misspelt(text: str, rng: random.Random) -> str:
    """With two letters swapped in every tenth word."""
    words = text.split()
    for i in rng.sample(range(len(words)), len(words) // 10):
        at = rng.randrange(max(1, len(words[i]) - 1))
        words[i] = words[i][:at] + words[i][at : at + 2][::-1] + words[i][at + 2 :]
    return " ".join(words)


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, list[list[int]], dict]:
    """Seconds for all prompts at once, their outputs, and what was counted."""
    before = llm.engine.metrics.snapshot()
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    after = llm.engine.metrics.snapshot()
    counted = {name: after[name] - before[name] for name in COUNTERS}
    return seconds, [output.outputs[0].token_ids for output in outputs], counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--num-requests", default="1,24", help="of a run; several, separated by commas")
    parser.add_argument("--max-num-seqs", type=int_from(1), default=8, help="of these, how many run at once")
    parser.add_argument("--max-tokens", type=int_from(1), default=64)
    parser.add_argument("--prompt-len", type=int_from(1), default=64, help="of the random prompts")
    parser.add_argument("--num-speculative-tokens", type=int_from(1), default=4)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeat", type=int_from(1), default=5)
    add_json_option(parser)
    args = parser.parse_args()
    try:
        sizes = [int_from(1)(size) for size in args.num_requests.split(",")]
        ngram = SpeculativeConfig(num_speculative_tokens=args.num_speculative_tokens)
        options = {
            "model": args.model, "dtype": args.dtype, "max_num_seqs": args.max_num_seqs,
            "kv_cache_memory_bytes": 512 << 20, "max_num_batched_tokens": BUCKETS[-1], "token_buckets": BUCKETS,
        }  # fmt: skip
        drafting, plain = LLM(**options, speculative_config=ngram), LLM(**options)
    except (ValueError, OSError, argparse.ArgumentTypeError) as error:
        sys.exit(f"error: {error}")
    for llm in tqdm((drafting, plain), desc="compiling", unit="engine", leave=False):
        llm.engine.runner.programs.compile_all()
    rng = random.Random(0)
    tokenizer, vocab_size = plain.get_tokenizer(), plain.engine.model_config.vocab_size
    greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)

    def edits(count: int) -> list[list[int]]:
        *others, shown = TEXTS
        texts = [others[i % len(others)] for i in range(count)]
        example = EXAMPLE.format(misspelt(shown, rng)) + f" {shown}\n\n"
        return [tokenizer.encode(example + EXAMPLE.format(misspelt(text, rng))) for text in texts]

    def noise(count: int) -> list[list[int]]:
        return [[rng.randrange(vocab_size) for _ in range(args.prompt_len)] for _ in range(count)]

    def params(name: str, count: int) -> list[SamplingParams]:
        if name == "edits":
            return [greedy] * count
        return [
            SamplingParams(temperature=1, seed=i, max_tokens=args.max_tokens, ignore_eos=True) for i in range(count)
        ]

    print(f"{args.model}, {args.max_tokens} tokens each, {ngram}, jax {jax.__version__}, {load_note()}")
    print(f"{'':<14}{'off / on':>24}{'drafted':>10}{'accepted':>10}{'tokens a step':>15}{'equal':>10}")
    numbers = {}
    for name, make_prompts in (("edits", edits), ("noise", noise)):
        for size in sizes:
            ratios, counted, num_equal, prompts, sampling = [], [], 0, make_prompts(size), params(name, size)
            for number in tqdm(range(1 + args.repeat), desc=f"{name} x {size}", unit="pair", leave=False):
                order = [("on", drafting), ("off", plain)]
                results = {key: run(llm, prompts, sampling) for key, llm in (order if number % 2 else order[::-1])}
                if number:  # after the first, the prompts are cached
                    ratios.append(results["off"][0] / results["on"][0])
                    counted.append(results["on"][2])
                    num_equal += sum(a == b for a, b in zip(results["on"][1], results["off"][1]))
            total = {key: sum(one[key] for one in counted) for key in COUNTERS}
            drafted, right = total["spec_decode_num_draft_tokens"], total["spec_decode_num_accepted_tokens"]
            per_step = total["generation_tokens"] / total["iteration_tokens_total_count"]
            num_runs = size * args.repeat
            bar = f"   bar {1 / COST_BAR:.2f}" if name == "noise" else ""
            print(
                f"{name} x {size:<7}{spread(ratios, 2):>24}{drafted / num_runs:>10.1f}{right / num_runs:>10.1f}"
                f"{per_step:>15.2f}{f'{num_equal}/{num_runs}':>10}{bar}"
            )
            numbers[f"{name} x {size}"] = {
                "ratios": ratios, "median": statistics.median(ratios), "drafted": drafted, "accepted": right,
                "tokens_per_step": per_step, "equal": num_equal, "runs": num_runs,
            }  # fmt: skip
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
