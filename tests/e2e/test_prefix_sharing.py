"""Who may share a prefix, for how long, and that it shows nowhere but in what is computed."""

import random

import pytest
from engines import Request, break_steps, layer_types, make_engine, run

from jpaged import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BLOCK = 16


@pytest.fixture(scope="module")
def engine(model, programs_dir):
    engine = make_engine(model, programs_dir, num_blocks_override=21, max_model_len=160)
    yield engine
    engine.close()


@pytest.fixture
def llm(engine):
    llm = LLM.__new__(LLM)
    llm.engine = engine
    assert llm.reset_prefix_cache()
    return llm


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def hits(engine, request: Request) -> tuple[int, list[int]]:
    """Tokens of one request that the cache gave, and its output."""
    before = engine.metrics.prefix_cache_hits
    (output,) = run(engine, [request], check_every_step=True)
    return engine.metrics.prefix_cache_hits - before, output.token_ids


def salted(salt: str | None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, cache_salt=salt)


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_cached_prefix_that_covers_the_whole_prompt_still_computes_its_last_token(llm, engine, length):
    request = Request(prompt(length), GREEDY)
    cold, expected = hits(engine, request)
    warm, tokens = hits(engine, request)
    assert (cold, warm, tokens) == (0, (length - 1) // BLOCK * BLOCK, expected)


def test_a_salt_shares_with_its_own_tenant_alone(llm, engine):
    ids = prompt(40)
    found = [hits(engine, Request(ids, salted(salt))) for salt in (None, "a", "b", "a", None, "b", "c")]
    assert [num_hits for num_hits, _ in found] == [0, 0, 0, 32, 32, 32, 0]
    assert len({tuple(tokens) for _, tokens in found}) == 1


def test_a_preempted_request_finds_its_own_prefix_again(llm, engine):
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    requests = [Request(prompt(48, seed), params) for seed in range(4)]
    alone = [run(engine, [request])[0].token_ids for request in requests]
    assert llm.reset_prefix_cache()
    before, num_preemptions = engine.metrics.prefix_cache_hits, engine.scheduler.num_preemptions
    together = [output.token_ids for output in run(engine, requests, check_every_step=True)]
    assert together == alone and engine.scheduler.num_preemptions > num_preemptions
    # what a window has passed is free early, and so is overwritten early
    assert engine.metrics.prefix_cache_hits > before or engine.kv.has_windows


@pytest.mark.parametrize("length", [80, 341])
def test_a_shared_prefix_costs_each_request_its_full_blocks_less(model, programs_dir, length):
    """The prompts of the PagedAttention paper's section 6.4."""
    engine = make_engine(model, programs_dir)
    prefix = prompt(length)
    run(engine, [Request(prefix, GREEDY)])
    tokens = engine.metrics.iteration_tokens
    computed, num_decodes = tokens.total, 3 * (GREEDY.max_tokens - 1)
    own = [prompt(30, seed) for seed in (1, 2, 3)]
    run(engine, [Request(prefix + tail, GREEDY) for tail in own])
    assert tokens.total - computed - num_decodes == 3 * (length + 30 - length // BLOCK * BLOCK)
    engine.close()


@pytest.mark.parametrize("kind", [{"temperature": 1.0, "seed": 1}, {"temperature": 0, "use_beam_search": True}], ids=str)
def test_what_samples_and_beams_have_computed_is_found(model, programs_dir, kind):
    engine = make_engine(model, programs_dir, block_size=4, num_blocks_override=400)
    ids = prompt(10)
    outputs = run(engine, [Request(ids, SamplingParams(n=4, max_tokens=15, ignore_eos=True, **kind))])
    for output in outputs:
        text = ids + output.token_ids  # whose last token was never computed
        num_hits, _ = hits(engine, Request(text, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        assert num_hits == (len(text) - 1) // 4 * 4
    engine.close()


def test_the_cache_is_reset_only_while_nobody_holds_blocks(llm, engine):
    request = Request(prompt(40), GREEDY)
    hits(engine, request)
    engine.add_request("running", request.prompt, GREEDY)
    engine.step()
    assert not llm.reset_prefix_cache()
    while engine.has_work:
        engine.step()
    assert hits(engine, request)[0] == 32
    assert llm.reset_prefix_cache()
    assert hits(engine, request)[0] == 0


@pytest.fixture(scope="module")
def pinned(model, programs_dir, tmp_path_factory):
    """20 usable blocks, of which 4 are pinned by a file; the last has 10 tokens."""
    path = tmp_path_factory.mktemp("pins") / "prefix.txt"
    path.write_text("You are a helpful assistant. " * 2, encoding="utf-8")  # 58 tokens, one a byte
    engine = make_engine(model, programs_dir, num_blocks_override=21, max_model_len=160, pin_prefix=(str(path),))
    yield engine
    engine.close()


def pinned_prefix(engine) -> list[int]:
    return engine.tokenizer.encode("You are a helpful assistant. " * 2)


def drain(engine):
    while engine.has_work:
        assert engine.step() == []


def check_idle(engine, num_pinned=None):
    if num_pinned is None:
        num_pinned = 7 if engine.kv.has_windows else 4  # a window of 24 sees two full blocks and the last
    engine.kv.check_invariants([])
    assert engine.kv.pool.num_used == len(engine.kv.pinned.blocks) == num_pinned and not engine.has_work


def ask(engine, ids: list[int]) -> tuple[int, list[int]]:
    tokens = []
    engine.add_request("asked", ids, GREEDY)
    while engine.has_work:
        for delta in engine.step():
            assert delta.request_id == "asked"
            tokens += delta.token_ids
            num_cached = delta.num_cached_tokens
        engine.kv.check_invariants(engine.scheduler.sequences)
    return num_cached, tokens


def test_a_pinned_prefix_is_computed_once_and_outlives_any_traffic(pinned, engine):
    drain(pinned)
    check_idle(pinned)
    assert pinned.metrics.request_success.total() == 0
    ids = pinned_prefix(pinned) + [1, 2, 3]
    assert ask(pinned, ids) == (58, run(engine, [Request(ids, GREEDY)])[0].token_ids)
    assert ask(pinned, ids[:58])[0] == 48  # the last token is always computed
    for seed in range(9):  # 90 blocks through a pool of 20
        assert ask(pinned, prompt(150, seed))[0] == 0
    assert ask(pinned, ids)[0] == 58
    assert pinned.kv.reset_prefix_cache()  # what is pinned stays
    assert ask(pinned, ids)[0] == 58
    check_idle(pinned)


def test_pinned_prefixes_are_computed_anew_after_the_pool_was_lost(pinned, monkeypatch):
    drain(pinned)
    ids = pinned_prefix(pinned) + [5]
    _, expected = ask(pinned, ids)
    break_steps(pinned, monkeypatch, lambda number, step: number == 0)
    assert ask(pinned, ids)[1] == expected
    check_idle(pinned)
    assert ask(pinned, ids) == (58, expected)


def test_a_step_that_fails_when_the_one_before_has_completed_a_pinned_prefix_loses_nothing(
    model, programs_dir, engine, monkeypatch
):
    pinned = make_engine(model, programs_dir, num_blocks_override=21, max_model_len=160)
    ids = prompt(40)
    pinned.pin_prefix(ids)
    pinned.step()
    break_steps(pinned, monkeypatch, lambda number, step: number == 0)
    request = Request(prompt(20, seed=7), GREEDY)
    assert ask(pinned, request.prompt)[1] == run(engine, [request])[0].token_ids
    assert ask(pinned, ids + [5])[0] == 40
    check_idle(pinned, num_pinned=6 if engine.kv.has_windows else 3)
    pinned.close()


def test_a_prefix_that_the_device_fails_on_may_be_pinned_again(model, programs_dir, monkeypatch):
    engine = make_engine(model, programs_dir, num_blocks_override=21, max_model_len=160)
    llm = LLM.__new__(LLM)
    llm.engine = engine
    num_usable = engine.validate.num_usable_blocks
    with monkeypatch.context() as broken:
        break_steps(engine, broken, lambda number, step: True)
        with pytest.raises(RuntimeError, match="the prefix could not be computed"):
            llm.pin_prefix(prompt(40))
    check_idle(engine, num_pinned=0)
    assert engine.validate.num_usable_blocks == num_usable and not engine.pins.prefixes
    llm.pin_prefix(prompt(50, seed=1))
    llm.pin_prefix(prompt(40))
    assert [ask(engine, prompt(length, seed) + [5])[0] for length, seed in ((40, 0), (50, 1))] == [40, 50]
    engine.close()


def test_pinned_prefixes_share_their_common_blocks_and_are_counted_once(model, programs_dir):
    if len(layer_types(model)) > 1:
        pytest.skip("its numbers are those of one attention group")
    engine = make_engine(model, programs_dir, num_blocks_override=21, max_model_len=160)
    llm = LLM.__new__(LLM)
    llm.engine = engine
    first, second = prompt(40), prompt(40)[:33] + prompt(31, seed=9)
    llm.pin_prefix(first)
    llm.pin_prefix(second)
    llm.pin_prefix(second)
    assert engine.pins.num_blocks == 5
    check_idle(engine, num_pinned=5)
    assert ask(engine, second)[0] == 48 and ask(engine, first + [7])[0] == 40
    with pytest.raises(
        ValueError, match=r"pin_prefix needs 15 blocks in all.*of the KV pool's 20.*max_model_len \(160\) needs 10"
    ):
        llm.pin_prefix(prompt(150, seed=3))
    for wrong in (999, 2**70):
        with pytest.raises(ValueError, match=f"token id {wrong}"):
            llm.pin_prefix([wrong] * 20)
    check_idle(engine, num_pinned=5)
    assert engine.pins.num_blocks == 5
    llm.pin_prefix([9, 8, 7])  # less than a block
    assert ask(engine, [9, 8, 7, 6, 5])[0] == 3
    check_idle(engine, num_pinned=6)
    engine.close()


def test_the_memory_table_counts_what_is_pinned(pinned):
    table = pinned.runner.memory.table(pinned.pins.num_blocks)
    if pinned.kv.has_windows:
        assert "7 of these blocks" in table and "160 tokens in 17 blocks, fit" in table
    else:
        assert "4 of these blocks" in table and "256 tokens fit" in table
    assert "pinned prefixes" in table
    assert "pinned" not in pinned.runner.memory.table()


def test_a_file_that_is_no_text_is_refused_by_name(model, programs_dir, tmp_path):
    path = tmp_path / "noise.bin"
    path.write_bytes(b"good, then \xff")
    with pytest.raises(ValueError, match=r"pin_prefix: .*noise.bin is not UTF-8 text: .* at byte 11"):
        make_engine(model, programs_dir, pin_prefix=(str(path),))
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        make_engine(model, programs_dir, pin_prefix=(str(tmp_path / "nowhere.txt"),))


def test_pinning_needs_the_cache(model, programs_dir):
    engine = make_engine(model, programs_dir, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="pin_prefix needs enable_prefix_caching"):
        engine.pin_prefix(prompt(40))
    engine.close()
