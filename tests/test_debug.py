"""snapshot and memory_map: what they say of the pool is what is there, in 100 columns."""

import json

import pytest
from test_scheduler import Walk, fake_tokens, make, request
from test_sequence_group import group_of

from jpaged.debug import memory_map, snapshot
from jpaged.levels import Levels
from jpaged.swapping import swap_out


def run_step(scheduler):
    plan = scheduler.schedule()
    scheduler.update(plan, fake_tokens(plan))


def shared_run():
    """Two requests that share two blocks of 4 with a pinned prefix, one that has ended, and one that waits."""
    _, _, scheduler = make(budget=16, num_blocks=21, max_num_seqs=2)
    prefix = list(range(10, 18))
    scheduler.add(request(1, prefix + [1, 2, 3, 4], max_tokens=1))
    while scheduler.has_work:
        run_step(scheduler)
    pinned = scheduler.kv.pinned
    pinned.pin(pinned.hold_tail(request(0, [])), prefix)
    scheduler.add(request(2, prefix + [5], max_tokens=9))
    scheduler.add(request(3, prefix + [6, 7, 8, 9, 10], max_tokens=9))
    scheduler.add(request(4, prefix, max_tokens=9))
    for _ in range(2):
        run_step(scheduler)
    return scheduler


def test_memory_map_draws_blocks_tables_and_queues():
    scheduler = shared_run()
    state = json.loads(json.dumps(snapshot(scheduler)))
    lines = memory_map(state).splitlines()
    outputs = [" ".join(map(str, seq.output_token_ids)) for seq in scheduler.running]
    assert lines[:5] == [
        "KV pool  20 blocks of 4 tokens: 5 used, 15 free (1 of them cached)",
        "         9 logical blocks in 5 physical: sharing saves 44%",
        "",
        "      1  ●●○ABB·· ········ ····",
        "         A-Z a sequence's own   2-9 owners   ● pinned   ○ free, still cached   · free",
    ]
    assert lines[6:11] == [
        "A  request 2: 9 tokens of prompt and 2 of output, 10 computed",
        "   logical  physical            owners",
        "         0       1  ████████  ● 3  10 11 12 13",
        "         1       2  ████████  ● 3  14 15 16 17",
        f"         2       4  ████░░░░    1  5 {outputs[0]}",
    ]
    assert lines[17:18] == [f"         3       6  ████░░░░    1  10 {outputs[1]}"]
    assert lines[-2:] == ["1 waiting, the next first", "   request 4: 8 tokens"]


def test_blocks_show_their_text_where_somebody_can_read_it():
    drawn = memory_map(snapshot(shared_run()), decode=lambda ids: "".join(chr(ord("a") + i) for i in ids))
    assert "  'klmn'" in drawn and "  'opqr'" in drawn


@pytest.mark.parametrize("seed", range(10))
def test_a_snapshot_of_any_walk_agrees_with_the_pool_and_fits_the_page(seed):
    walk = Walk(seed, max_in_flight=1)
    for _ in walk.steps(num_requests=15):
        state = snapshot(walk.scheduler)
        pool = walk.scheduler.kv.pool
        assert json.loads(json.dumps(state)) == state
        tables = [seq["table"] for seq in state["running"] + state["waiting"]]
        for block in state["blocks"]:
            assert block["owners"] == sum(table.count(block["id"]) for table in tables)
            assert (block["owners"] == 0) == (block["id"] in state["free_queue"])
            assert 0 <= block["filled"] <= state["block_size"]
        assert len(state["free_queue"]) == pool.num_free and len(state["blocks"]) == walk.spec.num_usable_blocks
        for seq in state["running"]:
            for group in range(len(state["windows"])):
                table = seq["table"][group :: len(state["windows"])]
                filled = [state["blocks"][i - 1]["filled"] if i else state["block_size"] for i in table]
                assert sum(filled) >= seq["num_computed_tokens"]
        held = {i for table in tables for i in table if i}
        assert sum(state["num_blocks_of_groups"]) == len(held) and len(state["windows"]) == len(walk.spec.windows)
        for decode in (None, str):
            assert all(len(line) <= 100 for line in memory_map(state, decode).splitlines())


def test_forks_to_come_and_copies_to_make_are_told():
    _, _, scheduler = make(budget=4)
    seqs = group_of(request(1, list(range(6)), max_tokens=4), 4)
    for seq in seqs:
        scheduler.add(seq)
    run_step(scheduler)
    state = snapshot(scheduler)
    assert [seq["sample"] for seq in state["running"] + state["forks"]] == [0, 1, 2, 3] and not state["waiting"]
    assert (Levels.of(scheduler).num_running, Levels.of(scheduler).num_forks) == (1, 3)
    assert "3 samples have yet to fork from those that run" in memory_map(state).splitlines()

    run_step(scheduler)
    for seq in seqs[:2]:
        assert scheduler.kv.allocate_slots(seq, 1)  # as for a step that is given up before it is planned whole
    state = snapshot(scheduler)
    held = [i for seq in state["running"] for i in seq["table"]] + [source for source, _ in state["copies"]]
    assert [block["owners"] for block in state["blocks"]] == [held.count(block["id"]) for block in state["blocks"]]
    assert len(state["copies"]) == Levels.of(scheduler).num_copies == 2 and not state["forks"]
    assert "         2 blocks are to be copied before the next step" in memory_map(state).splitlines()


def test_what_is_swapped_out_is_told():
    _, _, scheduler = make(budget=32, num_blocks=9)
    scheduler.kv.swap_space.capacity = 16
    for number in range(2):
        scheduler.add(request(number, [number] * 7, max_tokens=13))
    run_step(scheduler)
    victim = scheduler.running[-1]
    assert swap_out(scheduler.kv, victim)
    scheduler.running.remove(victim)
    scheduler.waiting.append(victim)
    assert memory_map(snapshot(scheduler)).splitlines()[-2:] == [
        "1 waiting, the next first; 8 of 16 blocks of swap space used",
        "   request 1: 8 tokens, 2 blocks of them swapped out",
    ]


def test_long_tables_and_long_queues_are_cut_short():
    _, _, scheduler = make(budget=64, num_blocks=300, block_size=1, max_num_seqs=30)
    for number in range(45):
        scheduler.add(request(number, [number] * 20, max_tokens=20))
    for _ in range(40):
        run_step(scheduler)
    lines = memory_map(snapshot(scheduler)).splitlines()
    assert any("blocks more" in line for line in lines) and "and 37 more" not in lines
    assert len(lines) < 320 and all(len(line) <= 100 for line in lines)
    assert any(line.strip().startswith("and ") and line.endswith("more") for line in lines)
