"""How much KV memory forks save, on twenty real prompts: parallel samples and beams that share their blocks.

    python scripts/bench_sharing.py --max-tokens 128

All prompts at once, greedy beams and samples at temperature 1, the prefix cache off, so that nothing is shared but by
forks. The saving is, over all steps, the share of the tables' blocks that are others' too: 1 - physical / logical.
The paper (https://arxiv.org/abs/2309.06180, figure 15) has 6 to 31 % for parallel samples and 38 to 66 % for beams, with
prompts of 19 (Alpaca) to 161 tokens (ShareGPT), in blocks of 16.
"""

import argparse
import json
import logging
from pathlib import Path

from tqdm import tqdm

from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import write_json
from jpaged.config import DEFAULT_MODEL, EngineConfig
from jpaged.engine import LLMEngine
from jpaged.sampling_params import SamplingParams

PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "smollm2_greedy.json"
WIDTHS = (2, 4, 6)
PAPER = {"samples": "6-31 %", "beams": "38-66 %"}


def measure(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, label: str) -> dict[str, float]:
    """Runs all prompts to their end; block-steps with and without sharing, and the saving."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    logical = physical = 0
    with tqdm(total=len(prompts), desc=label, unit="request", leave=False) as bar:
        while engine.has_work:
            engine.step()
            stats = engine.stats()
            logical += stats["num_logical_blocks"]
            physical += stats["num_physical_blocks"]
            bar.update(len(prompts) - len(engine.requests) - bar.n)
    return {"logical": logical, "physical": physical, "saving": 1 - physical / logical}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max-tokens", type=int_from(1), default=128)
    parser.add_argument("--block-size", type=int_from(1), default=16)
    parser.add_argument("--num-prompts", type=int_from(1), default=20)
    add_json_option(parser)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    prompts = [entry["prompt_token_ids"] for entry in json.loads(PROMPTS.read_text())["prompts"]][: args.num_prompts]
    num_seqs = max(WIDTHS) * len(prompts)
    longest = max(map(len, prompts)) + args.max_tokens
    config = EngineConfig(
        model=args.model,
        block_size=args.block_size,
        enable_prefix_caching=False,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(256, num_seqs),
        token_buckets=(num_seqs, max(256, num_seqs)),
        max_model_len=longest,
        num_blocks_override=num_seqs * -(-longest // args.block_size) + 1,
    )
    engine = LLMEngine(config)
    numbers = {}
    mean = sum(map(len, prompts)) / len(prompts)
    print(
        f"{len(prompts)} prompts of {mean:.0f} tokens on average, up to {args.max_tokens} more, in blocks of {args.block_size}"
    )
    print(f"{'':>8}" + "".join(f"{width:>9}" for width in WIDTHS) + f"{'paper':>10}")
    for kind in PAPER:
        row = []
        for width in WIDTHS:
            how = {"use_beam_search": True, "temperature": 0.0} if kind == "beams" else {"seed": width}
            params = SamplingParams(n=width, max_tokens=args.max_tokens, **how)
            row.append(measure(engine, prompts, params, f"{kind} {width}"))
            numbers[f"{kind} {width}"] = row[-1]
        print(f"{kind:>8}" + "".join(f"{one['saving']:>8.1%} " for one in row) + f"{PAPER[kind]:>10}", flush=True)
    engine.close()
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
