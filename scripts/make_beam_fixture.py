"""Makes tests/fixtures/smollm2_beams.json: beam search of Hugging Face's Llama, float32, on the default model.

    .venv/bin/python scripts/export_hf.py --output /tmp/smollm2_hf
    PYTHON_WITH_TORCH scripts/make_beam_fixture.py --folder /tmp/smollm2_hf

Needs torch and transformers, like make_parity_fixture.py, whose prompts it takes. Each case holds the arguments of
`generate`, and its outputs best first with their scores.
"""

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers
from make_parity_fixture import CHAT_PROMPTS, TEXT_PROMPTS
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "smollm2_beams.json"
NAMES = ("chat_question", "chat_system", "chat_turns", "completion", "single_token", "list", "french", "repetition")
CASES = (
    {"num_beams": 4, "max_new_tokens": 24, "length_penalty": 1.0, "early_stopping": False},
    {"num_beams": 2, "max_new_tokens": 40, "length_penalty": 1.0, "early_stopping": True},
    {"num_beams": 4, "max_new_tokens": 32, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 3, "max_new_tokens": 40, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 6, "max_new_tokens": 16, "length_penalty": -1.0, "early_stopping": False},
)


@torch.inference_mode()
def beams(model, prompt_ids: list[int], eos_token_id: int, case: dict) -> list[dict]:
    result = model.generate(
        torch.tensor([prompt_ids]), attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long), do_sample=False,
        num_return_sequences=case["num_beams"], eos_token_id=eos_token_id, pad_token_id=0, output_scores=True,
        return_dict_in_generate=True, **case,
    )  # fmt: skip
    outputs = []
    for ids, score in zip(result.sequences.tolist(), result.sequences_scores.tolist()):
        tokens = ids[len(prompt_ids) :]
        tokens = tokens[: tokens.index(eos_token_id) + 1] if eos_token_id in tokens else tokens
        outputs.append({"token_ids": tokens, "score": round(score, 6)})
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="what export_hf.py wrote")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = transformers.GenerationConfig()
    entries = []
    for name in tqdm(NAMES, desc="Searching", unit="prompt"):
        if name in CHAT_PROMPTS:
            text = tokenizer.apply_chat_template(CHAT_PROMPTS[name], tokenize=False, add_generation_prompt=True)
        else:
            text = TEXT_PROMPTS[name]
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for case in CASES:
            outputs = beams(model, prompt_ids, tokenizer.eos_token_id, case)
            entries.append({"name": name, "prompt_token_ids": prompt_ids} | case | {"outputs": outputs})
    fixture = {
        "model": "SmolLM2-135M-Instruct",
        "eos_token_id": tokenizer.eos_token_id,
        "made_by": {
            "command": shlex.join(["python", *sys.argv]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": "float32",
            "attention": "eager",
        },
    }
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    head = json.dumps(fixture, indent=1)[:-2]
    args.output.write_text(f'{head},\n "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    ended = sum(o["token_ids"][-1] == tokenizer.eos_token_id for entry in entries for o in entry["outputs"])
    num_outputs = sum(len(entry["outputs"]) for entry in entries)
    print(f"{args.output}: {len(entries)} searches; {ended} of {num_outputs} outputs end with EOS")


if __name__ == "__main__":
    main()
