"""Benchmarks of the whole engine, with the names that users of vLLM know: `python -m jpaged.bench --help`."""
