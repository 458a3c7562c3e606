"""The two counters of generated tokens: what the engine has sampled, what requests were given, and all between them."""

from dataclasses import replace

from engines import Request, make_engine, run
from tiny_model import make_tiny_model

from jpaged.sampling_params import SamplingParams

PROMPT = [7, 8, 9] * 5
LATE = 3  # steps after which the engine hears that a stop string was found, as from another process


def test_counters_of_generated_tokens_differ_by_what_nobody_is_given(tmp_path_factory, programs_dir, monkeypatch):
    """A mix of everything, and each number from another source than the counters: what sequences hold, what readers got."""
    model = str(make_tiny_model(tmp_path_factory.mktemp("tiny")))
    engine = make_engine(model, programs_dir, speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    num_beam_rows, stops, update, stop = 0, [], engine.scheduler.update, engine._stop

    def counting(plan, token_ids):
        nonlocal num_beam_rows
        appended = update(plan, token_ids)
        num_beam_rows += sum(seq.is_beam for _, seq, _ in appended)
        return appended

    monkeypatch.setattr(engine.scheduler, "update", counting)
    monkeypatch.setattr(engine, "_stop", lambda request_id, index: stops.append([LATE, request_id, index]))
    greedy = {"temperature": 0, "ignore_eos": True}
    beams = SamplingParams(n=2, max_tokens=9, use_beam_search=True, early_stopping="never", **greedy)
    early_ends = [beam.token_ids[4] for beam in run(engine, [Request(PROMPT, beams)])]
    before, num_beam_rows = engine.metrics.snapshot(), 0
    any_text = tuple(engine.tokenizer.decoded_token(i) for i in range(97, 107)) + ("\ufffd",)
    params = {
        "plain": SamplingParams(max_tokens=9, **greedy),
        "aborted": SamplingParams(max_tokens=60, **greedy),
        "drafted": SamplingParams(max_tokens=60, **greedy),
        "stopped": SamplingParams(max_tokens=60, min_tokens=30, stop=any_text, **greedy),
        "stopped samples": SamplingParams(n=3, seed=1, max_tokens=40, min_tokens=5, stop=any_text, ignore_eos=True),
        "best": SamplingParams(n=1, best_of=3, seed=2, max_tokens=11, ignore_eos=True),
        "beams": replace(beams, stop_token_ids=early_ends),
        "scored": SamplingParams(max_tokens=0, prompt_logprobs=1, **greedy),
        "failed": SamplingParams(max_tokens=9, allowed_token_ids=engine.tokenizer.encode("a"), bad_words=["aa"], **greedy),
    }
    engine.pin_prefix(list(range(20)))
    seqs = {}
    for request_id, of_request in params.items():
        engine.add_request(request_id, PROMPT, of_request)
        seqs[request_id] = engine.requests[request_id].seqs
    given, num_steps = dict.fromkeys(params, 0), 0
    while engine.has_work:
        deltas = engine.step()
        num_steps += 1
        if num_steps == 12:
            deltas += engine.abort("aborted")
        for delta in deltas:
            given[delta.request_id] += len(delta.token_ids) + delta.num_dropped_tokens
        for waiting in list(stops):
            waiting[0] -= 1
            if waiting[0] < 0:
                stop(*waiting[1:])
                stops.remove(waiting)
    held = {name: sum(seq.num_output_tokens for seq in of_request) for name, of_request in seqs.items()}
    held["beams"] = num_beam_rows
    surplus = {name: held[name] - given[name] for name in params}
    counted = {name: value - before.get(name, 0) for name, value in engine.metrics.snapshot().items()}
    assert counted["generation_tokens"] == sum(held.values()) + 1, "and one of the pinned prefix"
    assert counted["request_generation_tokens_sum"] == sum(given.values())
    assert counted["generation_tokens"] - counted["request_generation_tokens_sum"] == sum(surplus.values()) + 1
    assert {name for name, count in surplus.items() if count} == {"stopped", "stopped samples", "beams"}
    assert (given["plain"], given["drafted"], given["best"], given["scored"]) == (9, 60, 33, 0)
    assert surplus["beams"] > 0 and 0 < given["aborted"] < 60 and given["failed"] == 1
    assert counted["spec_decode_num_accepted_tokens"] > 10
    engine.close()
