"""Console: what the person who started the server reads in the terminal."""

import asyncio
import logging
import sys
import time

from tqdm import tqdm

import jpaged
from jpaged.serve.config import ServeConfig
from jpaged.serve.limits import OPEN_PATHS

POLL_SECONDS = 0.1
STATS_SECONDS = 10

logger = logging.getLogger("jpaged.serve")


class BarFriendlyHandler(logging.StreamHandler):
    """Writes log lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def set_up_logging(config: ServeConfig) -> None:
    """Our own lines, warnings of everybody, and a line a request if asked for."""
    handlers = [BarFriendlyHandler()]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", handlers=handlers)
    logging.getLogger("jpaged").setLevel(logging.INFO)
    access_logger = logging.getLogger("uvicorn.access")
    access_logger.setLevel(logging.INFO if config.access_log else logging.WARNING)
    access_logger.addFilter(_is_no_probe)


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Probes and scrapers come every few seconds for ever: they are not worth a line."""
    _, _, path, *_ = record.args
    return path not in OPEN_PATHS


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


async def show_warmup(engine: "jpaged.AsyncLLM", config: ServeConfig, url: str) -> None:
    """A progress bar until every program is compiled, then where the server is and how to try it."""
    start = time.monotonic()
    if not engine.progress.is_complete:
        say(f"the model is loaded and answers at {url}; until its programs are compiled, first answers are slower")
        await (_show_bar(engine) if sys.stderr.isatty() else _log_progress(engine))
    seconds = time.monotonic() - start
    if (error := engine.progress.error) is not None:
        say(f"compiling ahead was given up ({error}); programs are compiled on first use")
        return
    say(f"jpaged is ready at {url} (all programs compiled, {seconds:.1f} s after loading). Try:")
    say(_example(engine, config, url))


def _is_compiling(engine: "jpaged.AsyncLLM") -> bool:
    return not engine.progress.is_complete and engine.progress.error is None


async def _show_bar(engine: "jpaged.AsyncLLM") -> None:
    num_compiled, num_programs, *_ = engine.progress
    with tqdm(total=num_programs, initial=num_compiled, desc="compiling", unit=" programs", file=sys.stderr) as bar:
        while _is_compiling(engine):
            bar.n = engine.progress.num_compiled
            bar.refresh()
            await asyncio.sleep(POLL_SECONDS)
        bar.n = engine.progress.num_compiled


async def _log_progress(engine: "jpaged.AsyncLLM") -> None:
    """For a log file, where a bar would be a mess: a line now and then."""
    next_line = time.monotonic()
    while _is_compiling(engine):
        if time.monotonic() >= next_line:
            logger.info("compiled %d of %d programs", *engine.progress[:2])
            next_line += STATS_SECONDS
        await asyncio.sleep(POLL_SECONDS)


async def log_stats(engine: "jpaged.AsyncLLM") -> None:
    """A line of rates every ten seconds in which there was something to count. Never returns."""
    before, then = engine.metrics.snapshot(), time.monotonic()
    while True:
        await asyncio.sleep(STATS_SECONDS)
        now, seconds = engine.metrics.snapshot(), time.monotonic() - then
        change = {name: value - before.get(name, 0.0) for name, value in now.items()}
        if change["prompt_tokens"] or change["generation_tokens"] or now["num_requests_waiting"]:
            logger.info(_stats_line(now, change, seconds))
        before, then = now, then + seconds


def _stats_line(now: dict[str, float], change: dict[str, float], seconds: float) -> str:
    parts = [
        f"running {now['num_requests_running']:.0f}",
        f"waiting {now['num_requests_waiting']:.0f}",
        f"prompt {change['prompt_tokens'] / seconds:.1f} tokens/s",
        f"output {change['generation_tokens'] / seconds:.1f} tokens/s",
        f"KV pool {now['kv_cache_usage_perc']:.0%} used",
    ]
    if change["prefix_cache_queries"]:
        parts.append(f"prefix cache {change['prefix_cache_hits'] / change['prefix_cache_queries']:.0%} hit")
    if change["num_preemptions"]:
        parts.append(f"{change['num_preemptions']:.0f} preemptions")
    return ", ".join(parts)


def _example(engine: "jpaged.AsyncLLM", config: ServeConfig, url: str) -> str:
    if engine.tokenizer.has_chat_template:
        path = "chat/completions"
        question = '{"role": "user", "content": "What is the capital of France?"}'
        body = f'{{"messages": [{question}], "stream": true, "temperature": 0}}'
    else:
        path = "completions"
        body = '{"prompt": "Once upon a time", "max_tokens": 64, "stream": true}'
    target = f"--unix-socket {url.removeprefix('unix:')} http://localhost" if url.startswith("unix:") else url
    key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    return f"  curl -N {target}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
