"""The TPU kernel of `ragged_paged_attention`: what is moved, when, and in which order it is worked on.

One program runs three loops, over the sequences that decode, verify and prefill. Each is a pipeline: a producer, some
fetches ahead of the consumer, brings blocks into a ring of KV buffers, whichever sequence comes next; queries are
brought one tile ahead, results leave while the next tile is computed. The loops differ in how many queries make a tile
and in how these are multiplied.

A fetch covers the run `[f * fetch, (f + 1) * fetch)` of a sequence's positions, and of it only the blocks that the tile
sees. A sequence that fits in one fetch is brought once for all of its tiles. What is computed at a time is `tile_kv`
positions, again counted from 0, so that a row is summed in the same order in any chunking.

Block tables can be larger than SMEM (1 MiB), and most of their entries are not needed: rows are brought one by one, a
few sequences ahead of the producer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tpu_dma import ceil_div, start_copies, wait_copies
from .mosaic_tpu_data import TABLE_ROWS, Buffers, Loop, Refs, Tile
from .mosaic_tpu_rows import load_group, load_token, store_group, store_token, zero_tokens
from .mosaic_tpu_softmax import LOG2_E, State, add_stacked
from .mosaic_tpu_strips import Stages, Strips


def attention_kernel(refs: Refs, loops: tuple[Loop, Loop, Loop]):
    """Runs the loops of the three classes, those that have sequences."""
    begin = jnp.int32(0)
    for loop, index in zip(loops, range(3)):
        end = refs.distribution[index]
        pl.when(begin < end)(functools.partial(_run, refs, loop, begin, end))
        begin = end


def _run(refs: Refs, loop: Loop, begin, end):
    rows, lanes, dtype = loop.num_heads * loop.tile_q, refs.q.shape[-1], loop.scoring.dtype
    strip_rows = 0 if loop.is_stacked else loop.scoring.group * loop.strip
    stages = None if loop.is_stacked else Stages.shapes(pltpu.VMEM, strip_rows, loop.tile_kv, lanes, dtype)

    def vmem(*shape, dtype=jnp.float32):
        return pltpu.VMEM(shape, dtype)

    shapes = Buffers(
        q=vmem(2, loop.tile_q, *refs.q.shape[1:], dtype=refs.q.dtype),
        out=vmem(2, loop.tile_q, *refs.q.shape[1:], dtype=refs.out.dtype),
        lse=None if refs.lse is None else vmem(2, loop.tile_q, *refs.lse.shape[1:]),
        rows=vmem(rows, lanes, dtype=jnp.float32 if loop.is_stacked else dtype),  # few rows fill no tile
        top=vmem(rows + strip_rows, 128),
        total=vmem(rows + strip_rows, 128),
        weighted=vmem(rows + strip_rows, lanes),
        stages=stages,
    )
    shapes = {name: shape for name, shape in shapes._asdict().items() if shape is not None}

    def run(**found):
        _Pipeline(refs, loop, Buffers(**dict.fromkeys(Buffers._fields) | found), begin, end).run()

    pl.run_scoped(run, **shapes)


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The loop over sequences `[begin, end)`."""

    refs: Refs
    loop: Loop
    buffers: Buffers
    begin: jax.Array
    end: jax.Array

    def run(self):
        refs, ahead = self.refs, self.refs.kv.shape[0] - 1
        for index, value in enumerate((self.begin, 0, -1, 0)):
            refs.producer[index] = jnp.int32(value)
        for index in range(2):
            refs.in_flight[index] = jnp.int32(0)
        for index in range(TABLE_ROWS - 1):
            self._start_table(self.begin + index)
        jax.lax.fori_loop(0, ahead, lambda _, c: (self._produce(), c)[1], 0)
        self._start_q(self.tile(self.begin, 0), 0)
        jax.lax.fori_loop(self.begin, self.end, self._sequence, (jnp.int32(0), jnp.int32(0)))
        for slot in range(2):
            self._wait_out(slot)

    # Where things are.

    @property
    def fetch(self) -> int:
        return self.refs.kv.shape[1]

    @property
    def block_size(self) -> int:
        return self.refs.pool.shape[1]

    def tile(self, s, j) -> Tile:
        """Tile number `j` of sequence `s`."""
        start, stop = self.refs.starts[s], self.refs.starts[s + 1]
        token = start + j * self.loop.tile_q
        count = jnp.minimum(self.loop.tile_q, stop - token)
        position = self.refs.seq_lens[s] - stop + token
        window = self.loop.scoring.sliding_window
        begin = jnp.int32(0) if window is None else jnp.maximum(position - (window - 1), 0)
        return Tile(token, count, position, begin, position + count, token + count >= stop)

    def _is_resident(self, s):
        """Whether one fetch brings a sequence for all of its tiles."""
        return self.refs.seq_lens[s] <= self.fetch

    def _blocks(self, s, tile: Tile, f):
        """The first block that fetch `f` brings, and the first after."""
        start = f * self.fetch
        end = jnp.where(self._is_resident(s), self.refs.seq_lens[s], tile.end)
        first = jax.lax.div(jnp.maximum(tile.begin, start), self.block_size)
        return first, ceil_div(jnp.minimum(end, start + self.fetch), self.block_size)

    # The producer.

    def _table(self, s):
        slot = jax.lax.rem(s, TABLE_ROWS)
        return pltpu.make_async_copy(self.refs.tables.at[s], self.refs.table.at[slot], self.refs.table_sem.at[slot])

    def _start_table(self, s):
        pl.when(s < self.end)(lambda: self._table(s).start())

    def _produce(self):
        """Starts the next fetch of all, if one is left."""
        refs = self.refs
        s, j, f, count = (refs.producer[index] for index in range(4))

        @pl.when(s < self.end)
        def _():
            tile, is_first = self.tile(s, j), f < 0
            slot = jax.lax.rem(count, refs.kv.shape[0])

            @pl.when(is_first & (j == 0))
            def _():
                self._table(s).wait()
                self._start_table(s + (TABLE_ROWS - 1))

            at = jnp.where(is_first, jax.lax.div(tile.begin, self.fetch), f)
            first, last = self._blocks(s, tile, at)

            def block(index, _):
                row = jax.lax.rem(s, TABLE_ROWS)
                block_id = refs.table[row, 0, 0] + index if self.loop.is_contiguous else refs.table[row, 0, index]
                offset = index * self.block_size - at * self.fetch
                pltpu.make_async_copy(
                    refs.pool.at[block_id], refs.kv.at[slot, pl.ds(offset, self.block_size)], refs.kv_sem.at[slot]
                ).start()
                return 0

            jax.lax.fori_loop(first, last, block, 0)
            tile_done = (at + 1) * self.fetch >= tile.end
            sequence_done = self._is_resident(s) | (tile_done & tile.is_last)
            refs.producer[0] = jnp.where(sequence_done, s + 1, s)
            refs.producer[1] = jnp.where(sequence_done, 0, jnp.where(tile_done, j + 1, j))
            refs.producer[2] = jnp.where(sequence_done | tile_done, -1, at + 1)
            refs.producer[3] = count + 1

    # The consumer.

    def _sequence(self, s, carry):
        num_tiles = ceil_div(self.refs.starts[s + 1] - self.refs.starts[s], self.loop.tile_q)
        return jax.lax.fori_loop(0, num_tiles, functools.partial(self._tile, s), carry)

    def _tile(self, s, j, carry):
        num_tiles, num_fetches = carry
        slot = jax.lax.rem(num_tiles, 2)
        tile, is_resident = self.tile(s, j), self._is_resident(s)
        after = jnp.where(tile.is_last, s + 1, s)
        pl.when(after < self.end)(lambda: self._start_q(self.tile(after, jnp.where(tile.is_last, 0, j + 1)), 1 - slot))
        self._clear(tile)
        self._wait_q(tile, slot)
        self._arrange_q(tile, slot)

        def fetch(f, carry):
            count, under_way = carry
            buffer = jax.lax.rem(count, self.refs.kv.shape[0])
            first, last = self._blocks(s, tile, f)

            @pl.when(jnp.logical_not(is_resident) | (j == 0))
            def _():
                self._produce()
                self._wait_kv(buffer, last - first)

            held_from = first * self.block_size
            held_to = jnp.minimum(last * self.block_size, self.refs.seq_lens[s])
            under_way = self._consume(tile, buffer, f, held_from, held_to, under_way)
            return jnp.where(is_resident & jnp.logical_not(tile.is_last), count, count + 1), under_way

        fetches = jax.lax.div(tile.begin, self.fetch), ceil_div(tile.end, self.fetch)
        if self.loop.is_stacked:
            num_fetches, _ = jax.lax.fori_loop(*fetches, fetch, (num_fetches, ()))
        else:
            num_fetches, under_way = jax.lax.fori_loop(*fetches, fetch, (num_fetches, self.strips.nothing))
            self.strips.finish(under_way)
        self._finish(tile, slot)
        return num_tiles + 1, num_fetches

    def _for_strips(self, count, num: int, act):
        """`act(index, strip)` for `index < num` and for all strips that `count` queries have."""
        num_strips = ceil_div(count, self.loop.strip)

        def all_strips(index, _):
            return jax.lax.fori_loop(0, num_strips, lambda strip, _: (act(index, strip), 0)[1], 0)

        jax.lax.fori_loop(0, num, all_strips, 0)

    def _clear(self, tile: Tile):
        loop, sinks = self.loop, self.refs.sinks

        def clear(head, strip):
            sink = None if sinks is None else jnp.broadcast_to(sinks[pl.ds(head, 1)], (loop.strip, sinks.shape[1]))
            self.state.clear(loop.rows_of(head, strip), sink)

        if loop.is_stacked and (sinks is None or loop.tile_q == 1):
            self.state.clear(slice(None), None if sinks is None else sinks[...])
        else:
            self._for_strips(tile.count, loop.num_heads, clear)

    def _arrange_q(self, tile: Tile, slot):
        """Puts the tile's queries in the order of rows."""
        loop, interpret, (groups, packing) = self.loop, self.loop.scoring.interpret, self.refs.q.shape[1:3]
        q, rows = self.buffers.q.at[slot], self.buffers.rows

        def arrange(index, strip):
            found = load_group(q.at[pl.ds(strip * loop.strip, loop.strip)], index, interpret)
            for i, part in enumerate(found):
                head = index * packing + i

                def put(head=head, part=part):
                    rows[loop.rows_of(head, strip)] = part.astype(rows.dtype)

                if groups * packing > loop.num_heads and i:  # the last group's second is padding
                    pl.when(head < loop.num_heads)(put)
                else:
                    put()

        if loop.tile_q == 1:
            rows[...] = load_token(q, interpret)[: loop.num_heads].astype(rows.dtype)
        else:
            self._for_strips(tile.count, groups, arrange)

    @property
    def state(self) -> State:
        return State(self.buffers.top, self.buffers.total, self.buffers.weighted)

    @property
    def strips(self) -> Strips:
        loop, buffers = self.loop, self.buffers
        return Strips(self.state, buffers.rows, buffers.stages, loop.scoring, loop.strip, loop.num_strips)

    def _consume(self, tile: Tile, buffer, f, held_from, held_to, under_way):
        """Adds the part `[held_from, held_to)` of what was fetched to the tile's rows, or to its strips under way."""
        loop, size, start = self.loop, self.loop.tile_kv, f * self.fetch
        begin = jax.lax.div(jnp.maximum(tile.begin - start, 0), size)
        end = ceil_div(jnp.minimum(tile.end - start, self.fetch), size)
        kv, interpret = self.refs.kv.at[buffer], loop.scoring.interpret

        # What was not brought may be anything, and 0 * NaN is NaN.
        def clear(low, high):
            for_tokens = functools.partial(zero_tokens, kv, low, high, interpret)
            pl.when(low < high)(for_tokens)

        clear(begin * size, held_from - start)
        clear(held_to - start, end * size)

        def run(index, under_way):
            part = kv.at[pl.ds(pl.multiple_of(index * size, size), size)]
            first_kv = start + index * size

            def k_scales(head):
                return self.refs.scales[0, head]

            if loop.is_stacked:
                rows = self.buffers.rows
                add_stacked(self.state, rows, part, k_scales, loop.tile_q, tile.position, first_kv, loop.scoring)
                return under_way
            end_strip = ceil_div(tile.count, loop.strip)
            return self.strips.add(part, k_scales, tile.position, end_strip, first_kv, under_way)

        return jax.lax.fori_loop(begin, end, run, under_way)

    def _finish(self, tile: Tile, slot):
        """Writes the tile's results into their buffer and starts them on their way."""
        self._wait_out(slot)
        if self.loop.tile_q == 1:
            self._finish_token(slot)
        else:
            self._for_strips(tile.count, self.refs.q.shape[1], functools.partial(self._finish_group, slot))
        self.refs.in_flight[slot] = tile.count
        for copy in self._out_copies(tile.token, slot):
            start_copies(tile.count, self.loop.tile_q, copy)

    def _finish_token(self, slot):
        refs, loop, interpret = self.refs, self.loop, self.loop.scoring.interpret
        mean, lse = self.state.result(slice(None))
        scales = [
            jnp.full((loop.scoring.group, 1), refs.scales[1, head], jnp.float32)
            for head in range(loop.scoring.layout.num_kv_heads)
        ]
        mean = mean * (scales[0] if len(scales) == 1 else jnp.concatenate(scales, axis=0))
        padding = refs.q.shape[1] * refs.q.shape[2] - loop.num_heads
        if padding:
            mean = jnp.concatenate([mean, jnp.zeros((padding, mean.shape[1]), mean.dtype)], axis=0)
        store_token(self.buffers.out.at[slot], mean, interpret)
        if refs.lse is not None:
            store_token(self.buffers.lse.at[slot], lse * (1 / LOG2_E), interpret)

    def _finish_group(self, slot, index, strip):
        refs, loop, packing = self.refs, self.loop, self.refs.q.shape[2]
        at, parts = pl.ds(strip * loop.strip, loop.strip), []
        for i in range(packing):
            head = jnp.minimum(index * packing + i, loop.num_heads - 1)
            mean, lse = self.state.result(loop.rows_of(head, strip))
            parts.append(mean * refs.scales[1, jax.lax.div(head, loop.scoring.group)])
            if refs.lse is not None:
                store_group(self.buffers.lse.at[slot, at], head, [lse * (1 / LOG2_E)], loop.scoring.interpret)
        store_group(self.buffers.out.at[slot, at], index, parts, loop.scoring.interpret)

    def _wait_out(self, slot):
        for copy in self._out_copies(0, slot):
            wait_copies(self.refs.in_flight[slot], self.loop.tile_q, copy)

    def _out_copies(self, token, slot):
        def copy(source, target, at, size):
            return pltpu.make_async_copy(
                source.at[slot, pl.ds(at, size)],
                target.at[pl.ds(token + at, size)],
                self.refs.out_sem.at[slot],
            )

        pairs = [(self.buffers.out, self.refs.out), (self.buffers.lse, self.refs.lse)]
        return [functools.partial(copy, *pair) for pair in pairs[: 1 if self.refs.lse is None else 2]]

    def _start_q(self, tile: Tile, slot):
        start_copies(tile.count, self.loop.tile_q, functools.partial(self._q_copy, tile.token, slot))

    def _wait_q(self, tile: Tile, slot):
        wait_copies(tile.count, self.loop.tile_q, functools.partial(self._q_copy, tile.token, slot))

    def _q_copy(self, token, slot, at, size):
        return pltpu.make_async_copy(
            self.refs.q.at[pl.ds(token + at, size)],
            self.buffers.q.at[slot, pl.ds(at, size)],
            self.refs.q_sem.at[slot],
        )

    def _wait_kv(self, buffer, num_blocks):
        def copy(at, size):
            blocks = self.refs.kv.at[buffer, pl.ds(at * self.block_size, size * self.block_size)]
            return pltpu.make_async_copy(blocks, blocks, self.refs.kv_sem.at[buffer])

        wait_copies(num_blocks, self.fetch // self.block_size, copy)
