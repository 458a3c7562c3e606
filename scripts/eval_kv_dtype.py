"""What a quantised KV pool changes: log-probs and greedy tokens, against the pool in the dtype of the weights.

    python scripts/eval_kv_dtype.py
    python scripts/eval_kv_dtype.py --num-problems 20          and problems of GSM8K, few-shot (JPAGED_DATA)

Log-probs are of the parity fixture's continuations, teacher-forced, each prompt and continuation in one prefill. Greedy
tokens are of the fixture's prompts, decoded in one batch: how many come before the first that differs. A problem agrees
where the answer's number is the same, right or wrong.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from eval_gsm8k import DATA, read_data, solve
from flax import nnx
from gsm8k import Problem, chat_prompt, extract_answer

from jpaged import LLM, SamplingParams
from jpaged.bench.options import int_from
from jpaged.config import DEFAULT_MODEL
from jpaged.prefill_batch import prefill_batch

FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "smollm2_greedy.json"
POOL_TOKENS = 16384


def teacher_forced(llm: LLM, prompts: list[dict]) -> np.ndarray:
    """log P of every token of the continuations, given all before it."""
    runner, num_tokens = llm.engine.runner, len(prompts[0]["token_ids"])
    expected = np.array([p["token_ids"] for p in prompts]).reshape(-1, 1)
    batch, _ = prefill_batch([p["prompt_token_ids"] + p["token_ids"] for p in prompts], runner.layout.block_size)
    before = batch.logits_indices[:, None] - num_tokens + np.arange(num_tokens)
    batch = dataclasses.replace(batch, logits_indices=before.ravel().astype(np.int32))
    model = nnx.merge(runner.step.graphdef, jax.tree.unflatten(runner.step.treedef, runner.leaves))

    @jax.jit
    def forward(batch, pools):
        logprobs = jax.nn.log_softmax(model(batch, pools)[0], axis=-1)
        return jnp.take_along_axis(logprobs, expected, axis=-1)

    return np.asarray(forward(batch, runner.state.pools))[:, 0]


def greedy(llm: LLM, prompts: list[dict]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=len(prompts[0]["token_ids"]), ignore_eos=True)
    outputs = llm.generate([p["prompt_token_ids"] for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def answers(llm: LLM, problems: list[Problem], shots: list[Problem]) -> list:
    """(the answer's number, whether it is right) of every problem."""
    prompts = {index: chat_prompt(shots, problem) for index, problem in enumerate(problems)}
    texts = {
        index: output.outputs[0].text
        for index, output in solve(llm, prompts, SamplingParams(temperature=0, max_tokens=256), 32)
    }
    numbers = [extract_answer(texts[index]) for index in range(len(problems))]
    return [(number, number == extract_answer(problem.solution)) for number, problem in zip(numbers, problems)]


def evaluate(args: argparse.Namespace, kv_cache_dtype: str, prompts: list[dict], gsm8k: tuple) -> dict:
    llm = LLM(
        args.model, dtype=args.dtype, kv_cache_dtype=kv_cache_dtype, max_num_seqs=32, token_buckets=(32, 512),
        num_blocks_override=POOL_TOKENS // 64, block_size=64,
    )  # fmt: skip
    result = {
        "bytes": llm.engine.runner.step.bytes_per_block // 64,
        "logprobs": teacher_forced(llm, prompts),
        "tokens": greedy(llm, prompts),
        "answers": answers(llm, *gsm8k) if gsm8k[0] else [],
    }
    llm.engine.close()
    return result


def same_from_the_start(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def row(name: str, result: dict, base: dict) -> str:
    errors = np.abs(result["logprobs"] - base["logprobs"])
    same = [same_from_the_start(a, b) for a, b in zip(result["tokens"], base["tokens"])]
    whole = sum(a == b for a, b in zip(result["tokens"], base["tokens"]))
    line = (
        f"{name:10} {result['bytes']:>12,} {errors.mean():>8.4f} {np.quantile(errors, 0.99):>8.4f} {errors.max():>8.4f}"
        f" {np.mean(result['logprobs'] - base['logprobs']):>+9.4f} {whole:>6} of {len(same)} {np.mean(same):>9.1f}"
    )
    if result["answers"]:
        agree = sum(a[0] == b[0] for a, b in zip(result["answers"], base["answers"]))
        right = sum(is_right for _, is_right in result["answers"])
        line += f" {agree:>6} of {len(result['answers'])} {right:>6}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="with the fixture's tokenizer (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of weights and matmuls (default: %(default)s)")
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["int8", "fp8"], help="default: int8 fp8")
    parser.add_argument("--num-problems", dest="limit", type=int_from(0), default=0, help="of GSM8K (default: none)")
    parser.add_argument("--num-shots", type=int_from(0), default=4, help="worked examples before each problem")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with gsm8k/ in it (default: %(default)s)")
    args = parser.parse_args()
    gsm8k = [], []
    if args.limit:
        try:
            gsm8k = read_data(args)[:2]
        except (ValueError, OSError) as error:
            parser.exit(1, f"error: {error}\n")
    prompts = json.loads(FIXTURE.read_text(encoding="utf-8"))["prompts"]
    header = (
        f"{'pool':10} {'bytes/token':>12} {'mean':>8} {'p99':>8} {'worst':>8} {'bias':>9} {'equal':>12} {'same':>9}"
    )
    print(header + (f" {'agree':>12} {'right':>6}" if args.limit else ""), flush=True)
    base = evaluate(args, "auto", prompts, gsm8k)
    print(row("auto", base, base), flush=True)
    for name in args.kv_cache_dtypes:
        print(row(name, evaluate(args, name, prompts, gsm8k), base), flush=True)


if __name__ == "__main__":
    main()
