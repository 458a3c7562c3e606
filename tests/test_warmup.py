"""python -m jpaged.warmup: the first call compiles, the next one and every engine after it load."""

import pytest
from engines import make_engine
from tiny_model import make_tiny_model

from jpaged.warmup import main

FLAGS = "--dtype float32 --block-size 16 --max-num-seqs 4 --num-blocks-override 8 --max-num-batched-tokens 16".split()


def test_warm_up_leaves_nothing_to_compile_for_an_engine_with_the_same_flags_whatever_its_model_is_called(tmp_path, capsys):
    model = str(make_tiny_model(tmp_path))
    cache = str(tmp_path / "programs")
    argv = [model, *FLAGS, "--token-buckets", "4", "16", "--compilation-cache-dir", cache]
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("4 programs: 4 compiled, 0 loaded from the cache, ")
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 programs: 0 compiled, 4 loaded from the cache, ") and cache in out
    (tmp_path / "called otherwise").mkdir()
    same = str(make_tiny_model(tmp_path / "called otherwise"))
    engine = make_engine(
        same, cache, max_num_seqs=4, num_blocks_override=8, max_num_batched_tokens=16, token_buckets=(4, 16),
        max_model_len=None,
    )  # fmt: skip
    engine.runner.programs.compile_all()
    assert engine.metrics.snapshot()["xla_compiles{phase=warmup}"] == 0
    engine.close()


def test_a_model_that_is_not_there_is_one_line_and_status_1(tmp_path, capsys):
    assert main([str(tmp_path / "absent.gguf")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_flag_that_cannot_work_is_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--max-num-seqs", "0"])
    assert caught.value.code == 2 and "max_num_seqs must be at least 1" in capsys.readouterr().err
