"""Makes tests/fixtures/windows_greedy.json: what Hugging Face's Mistral and Ministral, float32, make of tiny random weights.

    PYTHON_WITH_TORCH scripts/make_window_fixture.py

Needs torch, transformers and tokenizers. Each case holds what its config.json has beyond that of tests/support/tiny_model.py,
and the greedy tokens after each prompt with their log-probs.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))
from tiny_model import CONFIG, make_tiny_model, random_weights  # noqa: E402

KINDS = ["full_attention", "sliding_attention"]
CASES = [
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20},
    {
        "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": 20,
        "num_hidden_layers": 5, "layer_types": [KINDS[layer % 3 > 0] for layer in range(5)],
    },
]  # fmt: skip
PROMPT_LENGTHS = (3, 19, 20, 21, 70)
NUM_TOKENS = 50


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> dict:
    ids, logprobs = list(prompt), []
    for _ in range(NUM_TOKENS):
        best = torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0, -1], -1).max(-1)
        ids.append(int(best.indices))
        logprobs.append(round(float(best.values), 5))
    return {"prompt_token_ids": prompt, "token_ids": ids[len(prompt) :], "logprobs": logprobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=TESTS / "fixtures" / "windows_greedy.json")
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in PROMPT_LENGTHS]
    cases = []
    for changes in CASES:
        config = CONFIG | changes
        with tempfile.TemporaryDirectory() as folder:
            make_tiny_model(Path(folder), config, random_weights(config))
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        cases.append({"config": changes, "outputs": [greedy(model, prompt) for prompt in prompts]})
    made_by = {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "dtype": "float32", "attention": "eager",
    }  # fmt: skip
    args.output.write_text(json.dumps({"made_by": made_by, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
