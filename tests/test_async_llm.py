"""AsyncLLM: the engine's process says what LLM says, and neither of the two outlives the other."""

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engines import make_small_async_engine
from tiny_model import CONFIG, make_tiny_model, random_weights

from jpaged import LLM
from jpaged.channel import Channel
from jpaged.engine_client import EngineClient
from jpaged.engine_process import EngineProcess
from jpaged.errors import ContextLengthError
from jpaged.output_processor import RequestOutputBuilder
from jpaged.programs import Programs, Progress
from jpaged.sampling_params import SamplingParams

PROMPT = [5, 6, 7, 8]
# in bfloat16 an answer is the same to the bit whatever else runs
OPTIONS = {"dtype": "bfloat16", "num_blocks_override": 17, "max_num_seqs": 4, "max_num_batched_tokens": 4}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(model, programs_dir):
    engine = make_small_async_engine(model, compilation_cache_dir=programs_dir, **OPTIONS)
    yield engine
    engine.shutdown()


def generate(engine, *requests: SamplingParams):
    """The last output of each, all at once."""

    async def last(number, params):
        async for output in engine.generate(PROMPT, params, f"r{number}"):
            pass
        return output

    async def every():
        return await asyncio.gather(*(last(*item) for item in enumerate(requests)))

    return asyncio.run(every())


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def is_idle(engine) -> bool:
    levels = engine.metrics.levels
    return not levels.num_running and not levels.num_waiting and not levels.num_physical_blocks


def test_every_kind_of_request_is_what_llm_makes_of_it(engine, model, programs_dir):
    llm = LLM(model, block_size=16, compilation_cache_dir=programs_dir, **OPTIONS)
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True)
    text = llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].text
    requests = [
        free,
        SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True, stop=[text[20:23], "never"]),
        SamplingParams(
            temperature=1.0, seed=2, max_tokens=20, n=2, logprobs=3, prompt_logprobs=2, logit_bias={65: 5.0}
        ),
        SamplingParams(temperature=1.0, seed=3, max_tokens=30, n=1, best_of=3, stop=[text[9:11]]),
        SamplingParams(temperature=0, n=3, max_tokens=12, use_beam_search=True),
        SamplingParams(temperature=0, max_tokens=9, bad_words=["a"], stop="\ud801"),
    ]
    expected = llm.generate([PROMPT] * len(requests), requests, use_tqdm=False)
    llm.close()
    assert expected[1].outputs[0].stop_reason == text[20:23] and text[20:23] not in expected[1].outputs[0].text
    for want, got in zip(expected, generate(engine, *requests), strict=True):
        assert (got.outputs, got.prompt_logprobs) == (want.outputs, want.prompt_logprobs)
    wait_until(lambda: is_idle(engine))


def test_a_stop_string_ends_the_sequence_in_the_engine_too(engine):
    [free] = generate(engine, LONG)
    text = free.outputs[0].text
    num_generated = []
    for _ in range(20):  # this process may be late by all of a request's steps, but not again and again
        before = engine.metrics.generation_tokens
        [stopped] = generate(engine, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=text[10:12]))
        wait_until(lambda: is_idle(engine))
        assert stopped.outputs[0].finish_reason == "stop" and len(stopped.outputs[0].token_ids) < 30
        num_generated.append(engine.metrics.generation_tokens - before)
        if num_generated[-1] < 150:
            return
    pytest.fail(f"the engine went on as if nobody had found it: {num_generated}")


def test_a_stream_that_is_closed_is_counted_as_aborted_and_frees_its_blocks(engine):
    async def look_at_one():
        async with aclosing(engine.stream(PROMPT, LONG, "closed")) as deltas:
            async for _ in deltas:
                return

    name = "request_success{finished_reason=abort}"
    before = engine.metrics.snapshot().get(name, 0)
    asyncio.run(look_at_one())
    assert engine.metrics.snapshot()[name] == before + 1 and not engine._streams
    wait_until(lambda: is_idle(engine))


def test_an_id_is_free_again_at_once_and_gets_nothing_of_the_request_before(engine):
    async def abort_and_ask_again():
        async with aclosing(engine.stream(PROMPT, LONG, "same")) as deltas:
            assert (await anext(deltas)).request_id == "same"
            with pytest.raises(ValueError, match="^request id 'same' is in use$"):
                await anext(engine.stream(PROMPT, LONG, "same"))
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        return [token async for delta in engine.stream(PROMPT[::-1], params, "same") for token in delta.token_ids]

    expected = asyncio.run(abort_and_ask_again())
    for _ in range(10):
        assert asyncio.run(abort_and_ask_again()) == expected and len(expected) == 3
    assert not engine._engine_ids


def test_a_reader_that_is_late_gets_what_has_come_as_one_delta_a_sample(engine):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, n=2, logprobs=1)

    async def read_late():
        async with aclosing(engine.stream(PROMPT, params, "late")) as stream:
            deltas = [await anext(stream)]
            while not engine._streams[engine._engine_ids["late"]].reader.is_finished:
                await asyncio.sleep(0.01)
            return deltas + [delta async for delta in stream]

    first, *rest = deltas = asyncio.run(read_late())
    assert len(rest) <= 3, "120 tokens, but for what came with the first"
    assert all(len(delta.token_ids) == len(delta.logprobs) for delta in deltas)
    builder = RequestOutputBuilder("late", None, PROMPT, n=2)
    for delta in deltas:
        output = builder.add(delta)
    assert output.finished and output.outputs == generate(engine, params)[0].outputs


def test_readers_cancelled_at_any_time_leave_nothing_behind(engine):
    rng, params = random.Random(0), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = generate(engine, params)[0].outputs

    async def read(request_id):
        async for _ in engine.generate(PROMPT, LONG, request_id):
            pass

    async def cancel_all():
        for _ in range(15):
            readers = [asyncio.create_task(read(f"r{i}")) for i in range(6)]
            reset = asyncio.create_task(engine.reset_prefix_cache())
            await asyncio.sleep(rng.uniform(0, 0.03))
            for task in (*readers, reset):
                task.cancel()
            await asyncio.gather(*readers, reset, return_exceptions=True)
            assert not engine._streams and not engine._engine_ids and not engine._answers

    asyncio.run(cancel_all())
    wait_until(lambda: engine._num_seen == engine._num_added and not engine.metrics.levels.num_running)
    assert engine.metrics.levels.num_waiting == engine.metrics.levels.num_physical_blocks == 0
    assert generate(engine, params)[0].outputs == expected


def test_what_cannot_cross_to_another_process_is_refused(engine):
    with pytest.raises(ValueError, match="^logits_processors cannot go to the engine's process: LLM has its engine in"):
        engine.validate(PROMPT, SamplingParams(logits_processors=[lambda ids, logits: logits]))
    before = engine.metrics.snapshot()
    params = SamplingParams()
    object.__setattr__(params, "temperature", Fraction(1, 2))  # of which it would have made a float
    with pytest.raises(TypeError, match=r"^Fraction\(1, 2\) cannot be sent to another process$"):
        generate(engine, params)
    assert engine.metrics.snapshot() == before
    assert not engine._streams and not engine._engine_ids and engine._num_added == engine._num_seen
    assert len(generate(engine, SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"max_model_len": 10**6},
            ValueError,
            r"^max_model_len \(1000000\) is over the model's context of 512 tokens$",
        ),
        ({"pin_prefix": ("nowhere.txt",)}, FileNotFoundError, "No such file or directory: 'nowhere.txt'$"),
        ({"attention_backend": "mosaic_tpu"}, ValueError, "^attention_backend .mosaic_tpu. cannot serve here"),
        ({"chat_template": "nowhere.jinja"}, FileNotFoundError, "nowhere.jinja"),
        ({"model": "/nowhere/at-all"}, ValueError, "/nowhere/at-all"),
    ],
)
def test_what_cannot_be_loaded_is_the_error_that_llm_raises_and_leaves_no_process(
    model, programs_dir, monkeypatch, options, error, says
):
    clients, init = [], EngineClient.__init__
    monkeypatch.setattr(EngineClient, "__init__", lambda self, *args: (clients.append(self), init(self, *args))[1])
    with pytest.raises(error, match=says):
        make_small_async_engine(**{"model": model, "compilation_cache_dir": programs_dir, **OPTIONS} | options)
    [client] = clients
    assert client._process.returncode is not None


def test_the_engines_log_comes_out_of_this_process(model, programs_dir, caplog):
    caplog.set_level("INFO", logger="jpaged")
    make_small_async_engine(model, compilation_cache_dir=programs_dir, **OPTIONS).shutdown()
    [record] = [record for record in caplog.records if "KV pool" in record.getMessage()]
    assert (record.name, record.levelname) == ("jpaged.engine_core", "INFO")


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_an_engine_that_ends_says_so_to_everybody_who_waits(model, programs_dir, how):
    engine = make_small_async_engine(model, compilation_cache_dir=programs_dir, **OPTIONS)

    async def watch(request_id):
        return [delta async for delta in engine.stream(PROMPT, LONG, request_id)]

    async def end_in_the_middle():
        watchers = [asyncio.create_task(watch(f"r{i}")) for i in range(6)]  # two wait
        while not engine.metrics.generation_tokens:
            await asyncio.sleep(0.001)
        os.kill(engine.pid, signal.SIGSTOP)
        reset = asyncio.create_task(engine.reset_prefix_cache())
        await asyncio.sleep(0.05)
        if how == "killed":
            os.kill(engine.pid, signal.SIGKILL)
        else:
            await asyncio.to_thread(engine.shutdown)
        outcomes = await asyncio.gather(*watchers, reset, return_exceptions=True)
        return outcomes[:-1], outcomes[-1]

    streams, reset = asyncio.run(end_in_the_middle())
    why = "the engine's process has ended: signal SIGKILL" if how == "killed" else "the engine was shut down"
    ending = ("error", why) if how == "killed" else ("abort", None)
    assert [(deltas[-1].finish_reason, deltas[-1].error) for deltas in streams] == [ending] * 6
    assert isinstance(reset, RuntimeError) and str(reset) == why
    for call in (engine.check_health, lambda: generate(engine, LONG)):
        with pytest.raises(RuntimeError, match=f"^{why}$"):
            call()
    engine.shutdown()


def test_a_pinned_prefix_takes_room_from_requests_and_one_that_fails_gives_it_back(tmp_path, programs_dir):
    """Where no length was promised, the context is as long as there is room beside the prefixes."""
    weights, poison = random_weights(), ord("q") - ord("!")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][poison] = float("nan")
    model = str(make_tiny_model(tmp_path, CONFIG | {"tie_word_embeddings": False}, weights))
    (tmp_path / "good.txt").write_text("g" * 40)
    (tmp_path / "bad.txt").write_text("q" * 40)
    pins = [str(tmp_path / name) for name in ("good.txt", "bad.txt")]
    engine = make_small_async_engine(model, compilation_cache_dir=programs_dir, pin_prefix=pins, **OPTIONS)
    assert engine.tokenizer.encode("q") == [poison]
    wait_until(lambda: engine.max_model_len == 16 * (16 - 3), seconds=120)  # for 16 * (16 - 6), after a program is there
    fits = SamplingParams(max_tokens=13 * 16 - len(PROMPT), ignore_eos=True, logit_bias={poison: -100})
    assert len(generate(engine, fits)[0].outputs[0].token_ids) == fits.max_tokens
    with pytest.raises(ContextLengthError, match=r"is 208 tokens\. .* The KV pool has room for 208 tokens\.$"):
        generate(engine, replace(fits, max_tokens=fits.max_tokens + 1))
    assert len(generate(engine, replace(fits, max_tokens=None))[0].outputs[0].token_ids) == fits.max_tokens
    engine.shutdown()


def test_a_message_that_cannot_be_taken_ends_the_engine_and_tells_everybody(model, programs_dir, caplog):
    engine = make_small_async_engine(model, compilation_cache_dir=programs_dir, **OPTIONS)
    engine._hears["step"] = lambda *arguments: 1 / 0
    [output] = generate(engine, LONG)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error.startswith("what the engine said could not be taken: ZeroDivisionError")
    assert any(record.exc_info for record in caplog.records) and not _is_running(engine.pid)
    engine.shutdown()


def test_a_signal_to_the_whole_service_leaves_the_end_to_this_process(engine):
    os.kill(engine.pid, signal.SIGTERM)
    os.kill(engine.pid, signal.SIGINT)
    time.sleep(0.1)
    assert len(generate(engine, LONG)[0].outputs[0].token_ids) == 200


def test_the_last_word_on_compiling_is_that_all_is_done():
    """Several threads tell how far they are; if one could be overtaken, a server might never be ready."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            ours, theirs = Channel.pair()
            process, programs = EngineProcess(theirs), Programs(lambda key: print, list(range(8)), lambda phase: None)
            process._engine = SimpleNamespace(runner=SimpleNamespace(programs=programs))
            programs.compile_in_background(4, process._tell_progress)
            for thread in programs._threads:
                thread.join()
            theirs.close()
            with pytest.raises(EOFError):
                while True:
                    _, (progress, _) = ours.receive()
            assert Progress(*progress).is_complete
            ours.close()
    finally:
        sys.setswitchinterval(interval)


def test_the_engines_process_ends_with_the_one_that_started_it(model, programs_dir):
    script = f"""if True:
        import os, signal, sys
        sys.path.insert(0, "tests/support")
        from engines import make_small_async_engine
        engine = make_small_async_engine({model!r}, compilation_cache_dir={programs_dir!r})
        print(engine.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.returncode == -signal.SIGKILL
    wait_until(lambda: not _is_running(int(child.stdout)))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # nobody may be there to bury it
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_messages_arrive_as_they_were_sent():
    ours, theirs = Channel.pair()
    values = [
        None,
        True,
        -(2**63),
        2**64 - 1,
        0.1,
        math.inf,
        "é\ud800\u2028",
        {7: 1.5, "a": []},
        [[], [1, "x"]],
        b"\x00",
    ]
    ours.send("name", *values)
    ours.send("numbers", np.int64(3), np.float32(0.5), math.nan, (1, 2), Path("a/b"))
    assert theirs.receive() == ("name", values)
    name, [three, half, nan, *others] = theirs.receive()
    assert (name, three, half, *others) == ("numbers", 3, 0.5, [1, 2], "a/b") and math.isnan(nan)
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()
