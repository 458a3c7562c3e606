#!/bin/sh
# Talks to a running server (make serve) with curl alone: scripts/examples/curl.sh [URL]
set -eu
url=${1:-http://127.0.0.1:8000}
json='Content-Type: application/json'

echo '== which models are served'
curl -sS "$url/v1/models"

printf '\n\n== a chat, streamed: each token is a line of its own as soon as it is there\n'
curl -sSN "$url/v1/chat/completions" -H "$json" -d '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "temperature": 0, "max_tokens": 32, "stream": true, "stream_options": {"include_usage": true}
}'

printf "== a last message that the model goes on with: the answer is what follows '<capital>'\\n"
curl -sS "$url/v1/chat/completions" -H "$json" -d '{
  "messages": [
    {"role": "user", "content": "What is the capital of France? Answer in XML."},
    {"role": "assistant", "content": "<capital>"}
  ],
  "continue_final_message": true, "temperature": 0, "max_tokens": 32
}'

printf '\n\n== two prompts completed at once, with log-probs\n'
curl -sS "$url/v1/completions" -H "$json" -d '{
  "prompt": ["The capital of Italy is", "One, two, three,"],
  "temperature": 0, "max_tokens": 4, "logprobs": 2
}'

printf '\n\n== tokens\n'
curl -sS "$url/tokenize" -H "$json" -d '{"prompt": "Hello world"}'

printf '\n\n== a mistake is answered in one line\n'
curl -sS "$url/v1/completions" -H "$json" -d '{"prompt": "Hello", "temperature": -1}'
echo
