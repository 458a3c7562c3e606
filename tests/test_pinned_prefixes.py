"""PinnedPrefixes: each is computed once and stays; one that fails leaves nothing behind."""

import pytest
from test_scheduler import make, request

from jpaged.outputs import TokenDelta
from jpaged.pinned_prefixes import PinnedPrefixes
from jpaged.scheduler import Scheduler
from jpaged.sequence import FinishReason, Sequence
from jpaged.sequence_group import SequenceGroup


def make_pins(promised_len=None, **options) -> tuple[Scheduler, PinnedPrefixes]:
    _, _, scheduler = make(budget=32, **options)

    def add_request(request_id, token_ids, params):
        scheduler.add(Sequence(request_id, token_ids, params, seed=0, max_tokens=1))

    return scheduler, PinnedPrefixes(scheduler.kv, add_request, promised_len=promised_len)


def run_step(scheduler: Scheduler, pins: PinnedPrefixes, *failing: str) -> None:
    """What the engine does; failing are the ids of requests that end with an error."""
    plan = scheduler.schedule()
    pins.hold(plan.sampled)
    for seq in plan.sampled:
        if seq.request_id in failing:
            scheduler.finish(seq, FinishReason.ERROR)
    scheduler.update(plan, [[7] for _ in plan.sampled])
    errors = {seq: "no luck" if seq.request_id in failing else None for seq in plan.sampled}
    deltas = [TokenDelta(s.request_id, 0, [], 0.0, finish_reason=s.finish_reason, error=e) for s, e in errors.items()]
    assert pins.take(deltas) == [delta for delta in deltas if not delta.request_id.startswith("pinned")]
    scheduler.kv.check_invariants(scheduler.sequences)


def test_a_prefix_that_fails_gives_its_blocks_back_and_may_be_pinned_again():
    scheduler, pins = make_pins()
    first, second = list(range(10)), list(range(8)) + [90] * 6
    pins.add(first, [])
    pins.add(second, [])
    assert pins.num_blocks == 5 and list(pins.prefixes) == ["pinned prefix 0", "pinned prefix 1"]
    run_step(scheduler, pins, "pinned prefix 0")
    assert list(pins.prefixes.values()) == [second] and pins.num_blocks == scheduler.kv.pool.num_used == 4
    pins.add(first, [])
    assert len(pins.prefixes) == 2 and pins.num_blocks == 5
    run_step(scheduler, pins)
    assert not pins.computing and scheduler.kv.pool.num_used == 5
    assert scheduler.kv.match_prefix(request(1, first + [1])).num_tokens == 10


def test_a_prefix_is_refused_that_would_take_the_room_of_a_request_that_waits():
    scheduler, pins = make_pins(num_blocks=1 + 12 + 12, promised_len=48)  # twice the longest sequence
    for seq in SequenceGroup(request(1, list(range(40, 48)), max_tokens=29), 3).sequences:  # 2 blocks and 3 times 7
        scheduler.add(seq)
    with pytest.raises(ValueError, match=r"^pin_prefix needs 2 blocks .* leaves 22 .* 24; request 1 needs 23: raise"):
        pins.add(list(range(8)), scheduler.sequences)
    assert not pins.prefixes and pins.num_blocks == 0
    pins.add(list(range(4)), scheduler.sequences)
    with pytest.raises(ValueError, match=r"^pin_prefix needs 13 blocks .*; a request of max_model_len \(48\) needs 12"):
        pins.add(list(range(40, 88)), [])


def test_where_no_length_is_promised_a_prefix_needs_room_for_a_request_that_goes_on_from_it():
    _, pins = make_pins(num_blocks=1 + 12)  # as many as the longest sequence takes
    pins.add(list(range(20)), [])
    assert pins.num_blocks == 5
    says = r"^pin_prefix needs 9 blocks .* leaves 3 .*; a request of 21 tokens, which goes on from a pinned prefix, needs 6"
    with pytest.raises(ValueError, match=says):
        pins.add(list(range(40, 56)), [])
    with pytest.raises(ValueError, match=r"request 1 needs 8: "):  # one that was taken before
        pins.add(list(range(40, 41)), [request(1, list(range(40, 48)), max_tokens=25)])
