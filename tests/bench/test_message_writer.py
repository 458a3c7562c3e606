"""Messages of a workload's lengths, in the model's own tokens."""

import numpy as np
import pytest
from tokenizers_on_disk import smollm2, tiny_sentencepiece

from jpaged.bench.messages import MessageWriter
from jpaged.bench.workloads import BenchRequest


def requests(writer: MessageWriter, *lengths: int) -> list[BenchRequest]:
    rng = np.random.default_rng(0)
    return [BenchRequest(rng.integers(writer.vocab_size, size=n).tolist(), 5, 1.5) for n in lengths]


@pytest.mark.parametrize("make", [smollm2, tiny_sentencepiece])
def test_texts_have_the_length_that_is_asked_for(make):
    writer = MessageWriter(make())
    for request in requests(writer, *[1, 2, 7, 64, 300] * 4):
        written = writer.write(request)
        assert written.prompt == make().encode(written.text, add_special_tokens=False)
        assert abs(len(written.prompt) - len(request.prompt)) <= 1 + len(request.prompt) // 50
        assert "<unk>" not in written.text and "<|user|>" not in written.text
        assert (written.output_len, written.timestamp) == (5, 1.5)
        assert "\ufffd" not in written.text and written.text.isprintable()
        assert writer.write(request) == written


def test_nearly_every_length_is_met_to_the_token():
    writer = MessageWriter(smollm2())
    lengths = [len(writer.write(request).prompt) for request in requests(writer, *[200] * 40)]
    assert lengths.count(200) >= 38


def test_texts_of_requests_that_begin_alike_begin_alike_and_others_differ():
    writer = MessageWriter(smollm2())
    prefix, one, other = (request.prompt for request in requests(writer, 64, 30, 30))
    first, second = (writer.write(BenchRequest(prefix + rest, 5)).prompt for rest in (one, other))
    assert first[:60] == second[:60] and first != second
    assert len({tuple(writer.write(request).prompt) for request in requests(writer, *[20] * 50)}) == 50
