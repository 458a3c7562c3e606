"""`serve`: latency and throughput of a running OpenAI-compatible server, as its clients see them.

python -m jpaged.bench serve --request-rate 4 --dataset-name sharegpt-like
python -m jpaged.bench serve --base-url http://127.0.0.1:9000 --trace azure.csv.gz --time-scale 0.5
python -m jpaged.bench serve --backend openai-chat --input-len 200 --output-len 100
python -m jpaged.bench serve --start --request-rate 1,2,4,8 --plot latency.png -- --model SmolLM2-135M-Instruct
"""

import argparse
import asyncio
import contextlib
import math
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

from jpaged.bench import plot
from jpaged.bench.arrivals import draw_arrivals, replay
from jpaged.bench.client import ChatClient, CompletionClient, served_model, wait_until_ready
from jpaged.bench.http import HttpClient
from jpaged.bench.load import send_all
from jpaged.bench.messages import MessageWriter
from jpaged.bench.options import add_json_option, int_from, json_object, list_of, percent, positive, rate
from jpaged.bench.outcomes import Outcome
from jpaged.bench.report import block, details, failures, goodput_limit, summarise
from jpaged.bench.results import write_json
from jpaged.bench.server_process import ServerProcess
from jpaged.bench.workloads import BenchRequest, Workload, add_workload_flags

SUMMARY = "against a running server: TTFT, TPOT, ITL, E2EL and throughput, at one rate or several"
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}  # by backend, with vLLM's names
MAX_OPEN_FILES = 65536
DEATH_SECONDS = 5  # from when a server no longer answers to its end


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_workload_flags(parser)
    parser.add_argument("--seed", type=int_from(0), default=0, help="of lengths, tokens and arrivals")
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    group.add_argument(
        "--backend",
        choices=ENDPOINTS,
        help="openai: completions of token ids; openai-chat: chats of one message (default: what --endpoint takes)",
    )
    group.add_argument("--endpoint", help="default: /v1/completions, or what --backend needs")
    group.add_argument(
        "--tokenizer",
        help="for chats, whose messages are text of the workload's lengths, without what the chat template adds: a "
        "folder, .gguf file, known name or hub id (default: the model's)",
    )
    group.add_argument("--start", action="store_true", help="start one for this run; its flags follow after --")
    group.add_argument("--model", help="the name to ask for (default: the first that the server lists)")
    group.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: the environment's OPENAI_API_KEY"
    )
    group.add_argument("--ready-timeout", type=positive, default=600.0, help="seconds to wait for it to be ready")
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=list_of(rate),
        metavar="RATE[,RATE...]",
        help="requests a second, each value a run of its own (default: the trace's arrivals, or inf: all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        help="shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier (default: %(default)s)",
    )
    group.add_argument(
        "--time-scale", type=positive, default=1.0, help="stretches a trace's gaps; 0.5 replays it at twice the rate"
    )
    group.add_argument("--max-concurrency", type=int_from(1), help="requests under way at most; others wait here")
    group.add_argument(
        "--num-warmups", type=int_from(0), default=1, help="requests before the run (default: %(default)s)"
    )
    group.add_argument(
        "--request-timeout", type=positive, default=6 * 3600.0, help="seconds until one counts as failed"
    )
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--vocab-size", type=int_from(1), default=32000, help="prompts are random ids below it (default: %(default)s)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate the workload's lengths, whatever the model says",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="further fields; null leaves one out"
    )
    group = parser.add_argument_group("report")
    group.add_argument(
        "--metric-percentiles", type=list_of(percent), default=[99.0], metavar="P[,P...]", help="default: 99"
    )
    group.add_argument(
        "--goodput",
        type=goodput_limit,
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="also count the requests within these limits: ttft:500 tpot:50 e2el:10000",
    )
    group.add_argument("--save-result", action="store_true", help="write the numbers to a file named after the run")
    group.add_argument("--result-dir", type=Path, default=Path(), help="where --save-result writes (default: here)")
    group.add_argument("--save-detailed", action="store_true", help="with each request's own numbers in the file")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw latency against rate (.png, .svg, .pdf)")
    add_json_option(group)


def run(args: argparse.Namespace) -> int:
    """Status 1 where no request was answered. Raises ValueError, OSError or RuntimeError for what cannot work."""
    _choose_endpoint(args)
    if args.plot is not None:
        plot.check(args.request_rate or ())
    workload = Workload(args, args.seed)
    allow_open_files()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(args.server_flags)) if args.start else None
        try:
            results = asyncio.run(_sweep(args, workload, server.url if server else args.base_url))
        except (OSError, RuntimeError):
            if server is not None:
                server.check(DEATH_SECONDS)  # it knows better why nobody answers
            raise
    _keep(args, results)
    return 0 if any(result["completed"] for result in results) else 1


async def _sweep(args: argparse.Namespace, workload: Workload, base_url: str) -> list[dict]:
    """The numbers of a run at each rate."""
    http = HttpClient(base_url, {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {})
    await wait_until_ready(http, args.ready_timeout, lambda text: print(text, file=sys.stderr, flush=True))
    model, root = await served_model(http, args.model)
    is_chat = args.backend == "openai-chat"
    writer = MessageWriter.for_model([args.tokenizer] if args.tokenizer else [root, model]) if is_chat else None
    fields = {
        "model": model,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos or None,
        "stream": True,
        "stream_options": {"include_usage": True},
        # or a token that is no whole character yet would come with the next one; a chat counts what can be read
        "return_token_ids": None if is_chat else True,
        **args.extra_body,
    }
    client = (ChatClient if is_chat else CompletionClient)(http, args.endpoint, fields, args.request_timeout)
    await _warm_up(client, _requests(workload, args, writer, args.num_warmups))
    print(f"{workload.description}; model {model} at {base_url}")
    results = []
    for request_rate in args.request_rate or [None]:
        arrivals = _arrivals(args, workload, request_rate)
        requests = _requests(workload, args, writer)
        outcomes, duration = await send_all(client, requests, arrivals, args.max_concurrency)
        result = summarise(outcomes, duration, args.metric_percentiles, dict(args.goodput))
        print(block(result, args.metric_percentiles, request_rate, args.max_concurrency), flush=True)
        if text := failures(outcomes):
            print(text, file=sys.stderr, flush=True)
        results.append(_described(args, model, request_rate, workload, outcomes) | result)
    return results


def _choose_endpoint(args: argparse.Namespace) -> None:
    """Raises ValueError where --backend and --endpoint are of different kinds."""
    kind = "openai-chat" if args.endpoint and args.endpoint.endswith("/chat/completions") else "openai"
    args.backend = args.backend or kind
    args.endpoint = args.endpoint or ENDPOINTS[args.backend]
    if args.endpoint.endswith("/chat/completions") != (args.backend == "openai-chat"):
        raise ValueError(f"--backend {args.backend} is for {ENDPOINTS[args.backend]}, got --endpoint {args.endpoint}")


def _requests(
    workload: Workload, args: argparse.Namespace, writer: MessageWriter | None, limit: int | None = None
) -> list[BenchRequest]:
    if writer is None:
        return workload.requests(args.vocab_size, limit)
    return [writer.write(request) for request in workload.requests(writer.vocab_size, limit)]


async def _warm_up(client: CompletionClient, requests: list[BenchRequest]) -> None:
    """Raises RuntimeError where a request fails: the whole run would. Their tokens are not those of the run."""
    if not requests:
        return
    outcomes, _ = await send_all(client, requests, [0.0] * len(requests))
    error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    if error is not None:
        raise RuntimeError(f"a request to warm up failed: {error}")


def _arrivals(args: argparse.Namespace, workload: Workload, request_rate: float | None) -> list[float]:
    if request_rate is None and workload.has_timestamps:
        return replay([row.arrival for row in workload.rows], args.time_scale)
    rng = np.random.default_rng([args.seed, 0, 1])
    return draw_arrivals(len(workload.rows), request_rate or math.inf, args.burstiness, rng)


def _described(
    args: argparse.Namespace, model: str, request_rate: float | None, workload: Workload, outcomes: list[Outcome]
) -> dict:
    """What the run was, under vLLM's names."""
    if request_rate is None:
        request_rate = "trace" if workload.has_timestamps else math.inf
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "model_id": model,
        "num_prompts": len(workload.rows),
        "request_rate": "inf" if request_rate == math.inf else request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    } | (details(outcomes) if args.save_detailed else {})


def _keep(args: argparse.Namespace, results: list[dict]) -> None:
    """One run is an object, as vLLM writes it; several are a list."""
    kept = results if len(results) > 1 else results[0]
    write_json(args.json, kept)
    if args.save_result:
        first = results[0]
        rates = "-".join(_short(result["request_rate"]) for result in results)
        name = f"{first['endpoint_type']}-{rates}qps-{Path(first['model_id']).name}-{first['date']}.json"
        path = args.result_dir / name
        write_json(path, kept)
        print(f"numbers in {path}")
    if args.plot is not None:
        plot.draw(results, args.metric_percentiles, args.plot)
        print(f"picture in {args.plot}")


def _short(request_rate: float | str) -> str:
    return request_rate if isinstance(request_rate, str) else f"{request_rate:g}"


def allow_open_files() -> None:
    """A connection is a file, and a thousand of them is the usual limit. A server that we start inherits the new."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
