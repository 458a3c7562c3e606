"""jpaged in a notebook or a script: text completion and chat, without a server.

    python scripts/examples/notebook_generate.py

Each part below is a notebook cell. The first run compiles its programs (seconds each) and keeps them on disk.
"""

# %% An engine in this process. A first start downloads the default model.
from jpaged import LLM, SamplingParams

llm = LLM("SmolLM2-135M-Instruct")

# %% Text in, text out: one output a prompt, in order, with a progress bar and rates.
prompts = ["The capital of France is", "Water boils at", "def fibonacci(n):"]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

# %% A chat: the model's own template, and its own sampling defaults with a few of ours.
conversation = [
    {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]
[answer] = llm.chat(conversation, llm.default_sampling_params(max_tokens=64, seed=1))
print(answer.outputs[0].text)

# %% Log-probs of the tokens that were chosen, and of the best three at each position.
[output] = llm.generate("One, two, three,", SamplingParams(temperature=0, max_tokens=3, logprobs=3))
for token_id, candidates in zip(output.outputs[0].token_ids, output.outputs[0].logprobs):
    print(repr(candidates[token_id].decoded_token), {c.decoded_token: round(c.logprob, 2) for c in candidates.values()})
