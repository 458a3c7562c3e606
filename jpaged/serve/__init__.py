"""The OpenAI-compatible HTTP server: `python -m jpaged.serve`."""
