"""The scales of a quantised pool, and whole sequences as one step."""

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.kv_scales import MARGIN, TEXTS, scales_of, with_kv_scales
from jpaged.model_runner import make_mesh
from jpaged.prefill_batch import prefill_batch
from jpaged.step import StepFunction
from models.config import ModelConfig
from pallas_kernels import PoolLayout

LAYOUTS = [PoolLayout(2, 8, 4, dtype) for dtype in ("int8", "float8_e4m3fn")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_scale_leaves_the_margin_and_at_most_a_sixteenth_more(layout):
    largest, margin = np.random.default_rng(0).lognormal(0, 3, (30, 2, 3)).astype(np.float32), MARGIN[layout.dtype]
    ratio = scales_of(largest, layout) * layout.largest / largest.astype(np.float64)
    assert ratio.min() >= margin * (1 - 1e-6) and ratio.max() <= margin * 17 / 16


def test_last_bits_of_what_a_device_computes_do_not_change_a_scale():
    largest = np.array([[[1.0, 3.7, 0.0123]]], np.float32)
    for change in (-1e-6, 1e-6):
        assert (scales_of(largest * np.float32(1 + change), LAYOUTS[0]) == scales_of(largest, LAYOUTS[0])).all()


def test_a_head_that_gives_zeros_has_a_scale_all_the_same():
    assert scales_of(np.zeros((1, 2, 1), np.float32), LAYOUTS[0]).tolist() == [[[1.0], [1.0]]]


def test_whole_sequences_lie_one_after_the_other():
    batch, num_blocks = prefill_batch([[7, 8, 9], [5], [1, 2, 3, 4, 5]], 2)
    (meta,) = batch.attention
    assert num_blocks == 7  # 2 + 1 + 3, and the null block
    assert meta.block_tables.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert meta.slot_mapping.tolist() == [2, 3, 4, 6, 8, 9, 10, 11, 12]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert batch.token_ids.tolist() == [7, 8, 9, 5, 1, 2, 3, 4, 5]
    assert (meta.query_start_loc.tolist(), meta.seq_lens.tolist()) == ([0, 3, 4, 9], [3, 1, 5])
    assert meta.distribution.tolist() == [0, 0, 3] and batch.logits_indices.tolist() == [2, 3, 8]


def test_the_scales_program_is_not_that_of_another_tokenizer_with_as_many_tokens_and_blocks():
    model = ModelConfig("llama", "any", 64, 32, 48, 1, 4, 2, 64, 8192)
    step = StepFunction(EngineConfig(kv_cache_dtype="int8", block_size=16), model, make_mesh(1))

    class Keys(list):
        def compile(self, key, *_):
            self.append(key)
            raise InterruptedError

    keys = Keys()
    for first, second in ((33, 1), (17, 17)):  # 4 blocks each, but tables of 3 and of 2
        lens = dict.fromkeys(TEXTS, 1) | {TEXTS[0]: first, TEXTS[1]: second}
        with pytest.raises(InterruptedError):
            with_kv_scales(step, step.abstract_state, lambda text: [0] * lens[text], keys)
    assert len(set(keys)) == 2
