"""GSM8K against `LLM`: few-shot, with reasoning before the answer; resumable.

    python scripts/eval_gsm8k.py --limit 20
    python scripts/eval_gsm8k.py --output results.jsonl     again, to go on where it stopped

Greedy. Each problem's result is appended to --output as soon as it is finished. The score is the share of problems
whose number is right, with its 95 % interval (Wilson's, which also holds for shares near 0).
"""

import argparse
import hashlib
import itertools
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gsm8k import QUESTION, Problem, chat_prompt, completion_prompt, extract_answer, read_problems
from results_file import ResultsFile
from tqdm import tqdm

from jpaged import LLM, SamplingParams
from jpaged.bench.options import int_from
from jpaged.config import DEFAULT_MODEL
from jpaged.output_processor import RequestOutputBuilder
from jpaged.outputs import RequestOutput

DATA = Path(os.environ.get("JPAGED_DATA", Path(__file__).resolve().parent.parent.parent / "shared" / "data"))
TEST_FILE, SHOTS_FILE = "test_first300.jsonl", "train_first32_fewshot.jsonl"
STOPS = {"chat": (), "completion": (f"\n\n{QUESTION}", f"\n{QUESTION}")}


def interval(num_right: int, num_problems: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    share, n = num_right / num_problems, num_problems
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(center - half, 0.0), min(center + half, 1.0)


def score(results: list[dict]) -> str:
    num_right = sum(result["correct"] for result in results)
    low, high = interval(num_right, len(results))
    return (
        f"GSM8K: {num_right} of {len(results)} right, {num_right / len(results):.1%} "
        f"(95 % interval {low:.1%} to {high:.1%})"
    )


def make_result(problem: Problem, output: RequestOutput) -> dict:
    completion = output.outputs[0]
    if completion.error is not None:
        raise RuntimeError(f"request {output.request_id}: {completion.error}")
    target, answer = extract_answer(problem.solution), extract_answer(completion.text)
    return {
        "correct": answer == target,
        "answer": None if answer is None else str(answer),
        "target": str(target),
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(completion.token_ids),
        "text": completion.text,
    }


def solve(
    llm: LLM, prompts: dict[int, str | list[dict]], params: SamplingParams, batch_size: int
) -> Iterator[tuple[int, RequestOutput]]:
    """(index, output) of each problem as it finishes, with batch_size of them in the engine at a time."""
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    waiting, builders = iter(prompts.items()), {}
    try:
        while True:
            for index, prompt in itertools.islice(waiting, batch_size - len(builders)):
                if isinstance(prompt, str):
                    text, ids = prompt, tokenizer.encode(prompt)
                else:
                    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
                    ids = tokenizer.encode(text, add_special_tokens=False)
                try:
                    engine.add_request(str(index), ids, params)
                except ValueError as error:
                    raise ValueError(f"problem {index}: {error}") from None
                builders[str(index)] = RequestOutputBuilder(str(index), text, ids)
            if not builders:
                return
            for delta in engine.step():
                output = builders[delta.request_id].add(delta)
                if output.finished:
                    del builders[delta.request_id]
                    yield int(delta.request_id), output
    finally:
        for request_id in builders:
            engine.abort(request_id)


def evaluate(args: argparse.Namespace, problems: list[Problem], shots: list[Problem], results: ResultsFile) -> None:
    """Solves what results lack."""
    missing = [index for index in range(len(problems)) if index not in results.results]
    if not missing:
        return
    make_prompt = chat_prompt if args.style == "chat" else completion_prompt
    prompts = {index: make_prompt(shots, problems[index]) for index in missing}
    llm = LLM(args.model, dtype=args.dtype)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, stop=STOPS[args.style])
    num_right = sum(results.results[index]["correct"] for index in range(len(problems)) if index in results.results)
    with tqdm(total=len(problems), initial=len(problems) - len(missing), desc="GSM8K", unit="problem") as bar:
        for index, output in solve(llm, prompts, params, args.batch_size):
            results.add(index, make_result(problems[index], output))
            num_right += results.results[index]["correct"]
            bar.set_postfix_str(f"{num_right} right", refresh=False)
            bar.update()


def read_data(args: argparse.Namespace) -> tuple[list[Problem], list[Problem], str]:
    """(problems, shots, what tells these files from others). Raises ValueError, one line, where they are not usable."""
    folder = args.data / "gsm8k" if (args.data / "gsm8k").is_dir() else args.data
    files = [folder / TEST_FILE, folder / SHOTS_FILE]
    for path in files:
        if not path.is_file():
            raise ValueError(f"GSM8K is not there: {path} is missing; give its folder with --data or JPAGED_DATA")
    problems, shots = map(read_problems, files)
    if args.num_shots > len(shots):
        raise ValueError(f"--num-shots is {args.num_shots}, but {files[1]} has {len(shots)} problems")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    return problems[: args.limit], shots[: args.num_shots], digest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto", help="of weights and matmuls (default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="the folder with gsm8k/ in it (JPAGED_DATA; default: %(default)s)"
    )
    parser.add_argument(
        "--num-shots", type=int_from(0), default=4, help="worked examples before each problem (default: %(default)s)"
    )
    parser.add_argument(
        "--style", choices=tuple(STOPS), default="chat", help="the examples as turns of a chat, or as one text"
    )
    parser.add_argument("--max-tokens", type=int_from(1), default=256, help="of an answer (default: %(default)s)")
    parser.add_argument("--limit", type=int_from(1), help="only the first problems (default: all)")
    parser.add_argument(
        "--batch-size", type=int_from(1), default=32, help="problems in the engine at a time (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("gsm8k_results.jsonl"), help="default: %(default)s")
    args = parser.parse_args()
    try:
        problems, shots, digest = read_data(args)
        settings = {
            "model": args.model, "dtype": args.dtype, "style": args.style, "num_shots": args.num_shots,
            "max_tokens": args.max_tokens, "data": digest,
        }  # fmt: skip
        with ResultsFile(args.output, settings) as results:
            evaluate(args, problems, shots, results)
            print(score([results.results[index] for index in range(len(problems))]))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on with what {args.output} lacks", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
