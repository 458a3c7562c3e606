"""What the pool holds and who owns it: `snapshot` as plain data, `memory_map` as the picture of the PagedAttention paper."""

from collections.abc import Callable, Iterator
from string import ascii_uppercase

from jpaged.scheduler import Scheduler
from jpaged.sequence import Sequence

WIDTH = 100
BLOCKS_A_LINE = 64
GAUGE = 8  # characters
MAX_BLOCKS_SHOWN = 8  # of a sequence
MAX_SEQUENCES_SHOWN = 26
FREE, CACHED, PINNED, MANY, PASSED = "·", "○", "●", "+", "–"


def snapshot(scheduler: Scheduler) -> dict:
    """Every block, table and queue, as data that json can write.

    Slots count as filled when a step that fills them was planned: one or more may still be in flight. A table has an
    entry of each attention group for every logical block; 0 where the group's window has passed it. Forks are samples
    of those that run that have not started yet. The source of a copy that is still to be made has an owner more for it.
    """
    kv = scheduler.kv
    filled = kv.pinned.num_filled
    for seq in scheduler.sequences:
        for entry, block in enumerate(seq.block_table.blocks):
            i = entry // kv.num_groups
            num_slots = min(max(seq.num_computed_tokens - i * kv.block_size, 0), kv.block_size)
            filled[block] = max(num_slots, filled.get(block, 0))
    pinned = kv.pinned.blocks
    return {
        "block_size": kv.block_size,
        "windows": list(kv.spec.windows),
        "num_blocks_of_groups": num_blocks_of_groups(scheduler),
        "blocks": [
            {
                "id": block.block_id,
                "owners": block.ref_count,
                "hash": None if block.block_hash is None else block.block_hash.digest.hex(),
                "filled": kv.block_size if block.block_hash is not None else filled.get(block, 0),
                "pinned": block in pinned,
            }
            for block in kv.pool.blocks[1:]
        ],
        "free_queue": [block.block_id for block in kv.pool.free_queue()],
        "pinned": [table.block_ids() for table in kv.pinned.tables],
        "running": [_sequence(seq) for seq in scheduler.running],
        "forks": [_sequence(seq) for seq in scheduler.forks.children],
        "waiting": [_sequence(seq) for seq in scheduler.waiting],
        "copies": [[copy.source.block_id, copy.destination.block_id] for copy in kv.copies],
        "swap_space": {"capacity": kv.swap_space.capacity, "used": kv.swap_space.num_used},
        "num_steps_in_flight": len(scheduler.in_flight),
    }


def num_blocks_of_groups(scheduler: Scheduler) -> list[int]:
    """The blocks that sequences hold for each attention group."""
    kv = scheduler.kv
    tables = [seq.block_table.blocks for seq in scheduler.running]
    held = ({block for table in tables for block in table[group :: kv.num_groups]} for group in range(kv.num_groups))
    return [len(blocks - {kv.pool.null_block}) for blocks in held]


def _sequence(seq: Sequence) -> dict:
    return {
        "request_id": seq.request_id,
        "sample": seq.index,
        "token_ids": list(seq.token_ids),
        "num_prompt_tokens": seq.num_prompt_tokens,
        "num_computed_tokens": seq.num_computed_tokens,
        "num_pending_tokens": seq.num_pending,
        "table": seq.block_table.block_ids(),
        "num_swapped_blocks": 0 if seq.swapped is None else len(seq.swapped.block_ids),
    }


def memory_map(state: dict, decode: Callable[[list[int]], str] | None = None) -> str:
    """A snapshot drawn in 100 columns: the pool block by block, then each sequence's table, logical block to physical.

    decode: for the text of each block; token ids stand there without.
    """
    blocks = {block["id"]: block for block in state["blocks"]}
    shown = state["running"][:MAX_SEQUENCES_SHOWN]
    letters = dict(zip(map(_name, shown), ascii_uppercase))
    lines = [*_pool_lines(state, letters), ""]
    for seq in shown:
        lines += [*_sequence_lines(seq, letters[_name(seq)], blocks, state, decode), ""]
    if num_more := len(state["running"]) - len(shown):
        lines += [f"and {num_more} more that run", ""]
    if num_forks := len(state["forks"]):
        lines += [f"{num_forks} samples have yet to fork from those that run", ""]
    lines += _waiting_lines(state)
    return "\n".join(lines).rstrip()


def _pool_lines(state: dict, letters: dict[str, str]) -> Iterator[str]:
    blocks, size = state["blocks"], state["block_size"]
    num_used = sum(block["owners"] > 0 for block in blocks)
    num_cached = sum(block["owners"] == 0 and block["hash"] is not None for block in blocks)
    num_logical = sum(block["owners"] for block in blocks)
    yield (
        f"KV pool  {len(blocks)} blocks of {size} tokens: {num_used} used, {len(blocks) - num_used} free"
        f" ({num_cached} of them cached)"
    )
    if state["windows"] != [None]:
        groups = zip(state["num_blocks_of_groups"], map(_column, state["windows"]))
        yield f"         of layers that see {', '.join(f'{name}: {count}' for count, name in groups)}"
    if num_used:
        saved = 1 - num_used / num_logical
        yield f"         {num_logical} logical blocks in {num_used} physical: sharing saves {saved:.0%}"
    if num_copies := len(state["copies"]):
        yield f"         {num_copies} blocks are to be copied before the next step"
    owner = {block_id: letters.get(_name(seq), MANY) for seq in state["running"] for block_id in seq["table"]}
    yield ""
    for begin in range(0, len(blocks), BLOCKS_A_LINE):
        row = [_cell(block, owner) for block in blocks[begin : begin + BLOCKS_A_LINE]]
        groups = ["".join(row[i : i + 8]) for i in range(0, len(row), 8)]
        yield f"{blocks[begin]['id']:>7}  {' '.join(groups)}"
    yield f"         A-Z a sequence's own   2-9 owners   {PINNED} pinned   {CACHED} free, still cached   {FREE} free"


def _cell(block: dict, owner: dict[int, str]) -> str:
    if block["owners"] == 0:
        return FREE if block["hash"] is None else CACHED
    if block["pinned"]:
        return PINNED
    if block["owners"] > 1:
        return str(block["owners"]) if block["owners"] < 10 else MANY
    return owner.get(block["id"], MANY)


def _sequence_lines(seq: dict, letter: str, blocks: dict[int, dict], state: dict, decode) -> Iterator[str]:
    size, num_groups = state["block_size"], len(state["windows"])
    num_tokens, table = len(seq["token_ids"]), seq["table"]
    logical = [table[i : i + num_groups] for i in range(0, len(table), num_groups)]
    yield (
        f"{letter}  request {_clip(_name(seq), 40)}: {seq['num_prompt_tokens']} tokens of prompt and "
        f"{num_tokens - seq['num_prompt_tokens']} of output, {seq['num_computed_tokens']} computed"
    )
    columns = "  physical"
    if state["windows"] != [None]:
        columns = "".join(f"{_column(window):>8}" for window in state["windows"]) + "  "
    yield f"   logical{columns}            owners"
    hidden = range(0)
    if len(logical) > MAX_BLOCKS_SHOWN:
        hidden = range(MAX_BLOCKS_SHOWN // 2, len(logical) - MAX_BLOCKS_SHOWN // 2)
    for i, block_ids in enumerate(logical):
        if i in hidden:
            if i == hidden.start:
                yield f"       ...  {len(hidden)} blocks more"
            continue
        num_filled = min(max(seq["num_computed_tokens"] - i * size, 0), size)
        gauge = "█" * (num_filled * GAUGE // size)
        gauge += "▌" * (num_filled * GAUGE % size > 0)
        held = [blocks[block_id] for block_id in block_ids if block_id]
        mark = PINNED if any(block["pinned"] for block in held) else " "
        owners = max((block["owners"] for block in held), default=0)
        token_ids = seq["token_ids"][i * size : (i + 1) * size]
        text = repr(decode(token_ids)) if decode else " ".join(map(str, token_ids))
        physical = "".join(f"{block_id or PASSED:>8}" for block_id in block_ids)
        line = f"{i:>10}{physical}  {gauge.ljust(GAUGE, '░')}  {mark} {owners}  "
        yield line + _clip(text, max(WIDTH - len(line), 8))


def _waiting_lines(state: dict) -> Iterator[str]:
    waiting, space = state["waiting"], state["swap_space"]
    if not waiting:
        return
    in_host = f"; {space['used']} of {space['capacity']} blocks of swap space used" if space["used"] else ""
    yield f"{len(waiting)} waiting, the next first{in_host}"
    for seq in waiting[:MAX_BLOCKS_SHOWN]:
        swapped = f", {seq['num_swapped_blocks']} blocks of them swapped out" if seq["num_swapped_blocks"] else ""
        yield f"   request {_clip(_name(seq), 40)}: {len(seq['token_ids'])} tokens{swapped}"
    if len(waiting) > MAX_BLOCKS_SHOWN:
        yield f"   and {len(waiting) - MAX_BLOCKS_SHOWN} more"


def _column(window: int | None) -> str:
    return "all" if window is None else f"last {window}"


def _name(seq: dict) -> str:
    return f"{seq['request_id']} sample {seq['sample']}" if seq["sample"] else seq["request_id"]


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
