"""python -m jpaged.profile on a tiny model: the parts are the whole, and the picture can be read."""

import xml.etree.ElementTree as ElementTree

import pytest
from engines import make_engine
from tiny_model import make_tiny_model

from jpaged.profile.__main__ import main, profile
from jpaged.profile.op_groups import GROUPS
from jpaged.profile.picture import LEFT, PLOT, draw
from jpaged.profile.spans import PARTS, STEP, HostProbe, Span
from jpaged.profile.step_profile import HOST_ORDER, StepProfile, host_times
from jpaged.profile.timeline import GAP
from jpaged.profile.workload import ProfileConfig, Workload

CONFIG = ProfileConfig(num_requests=4, prompt_len=5, output_len=14, num_steps=5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, programs_dir):
    engine = make_engine(str(make_tiny_model(tmp_path_factory.mktemp("tiny"))), programs_dir)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def result(engine, tmp_path_factory) -> StepProfile:
    return profile(engine, CONFIG, tmp_path_factory.mktemp("trace"))


def test_host_and_device_each_add_up_to_the_step(result):
    assert result.num_steps == CONFIG.num_steps - 1
    assert sum(result.device.values()) == pytest.approx(result.host.step_ms, rel=1e-3)
    assert sum(result.host.parts.values()) == pytest.approx(result.host.step_ms, rel=1e-3)
    assert set(result.host.parts) == set(HOST_ORDER) and min(result.host.parts.values()) >= 0
    assert {"attention", "mlp", "head", "qkv", GAP} <= set(result.device) and set(GROUPS) & set(result.device)


def test_the_table_names_every_part(result):
    table = result.table()
    for name in (*HOST_ORDER, *result.device):
        assert f"  {name} " in table
    assert "add up to" in result.check()


def test_the_picture_is_svg_whose_bars_fill_the_width(result):
    root = ElementTree.fromstring(draw(result, "a <title> & more", "below"))
    rects = [r.attrib for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.attrib["height"] == "26"]
    for y in sorted({r["y"] for r in rects}):
        row = [r for r in rects if r["y"] == y]
        assert min(float(r["x"]) for r in row) >= LEFT
        assert max(float(r["x"]) + float(r["width"]) for r in row) == pytest.approx(LEFT + PLOT, abs=1)
    assert "a <title> & more" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_engine_is_itself_again_after_a_probe(engine):
    with HostProbe(engine) as probe:
        engine.step()
    engine.step()
    assert [span.name for span in probe.spans] == ["schedule", "detokenise", STEP]
    assert not {"step", "read"} & set(vars(engine))


def test_mean_host_times_by_hand():
    spans = []
    for begin in (0, 10, 20):
        spans += [Span(name, begin + i, begin + i + 1) for i, name in enumerate(PARTS)] + [Span(STEP, begin, begin + 8)]
    times = host_times([Span(s.name, s.begin * 10**6, s.end * 10**6) for s in spans])
    assert times.step_ms == 10 and times.parts == {
        **dict.fromkeys(PARTS, 1), "rest of the step": 2, "between steps": 2
    }  # fmt: skip


@pytest.mark.parametrize(
    "config, says",
    [
        (ProfileConfig(num_requests=9, prompt_len=5, output_len=14), "never decode all at once"),
        (ProfileConfig(num_requests=2, prompt_len=5, output_len=8), "decode steps are alike"),
    ],
)
def test_a_workload_without_enough_steady_steps_is_refused_and_leaves_nothing_running(engine, config, says):
    with pytest.raises(ValueError, match=says):
        Workload(engine, config).run(HostProbe(engine))
    assert not engine.has_work


def test_the_command_writes_table_picture_and_trace(tmp_path, programs_dir, capsys):
    flags = (
        "--num-requests 2 --prompt-len 3 --output-len 12 --num-steps 3 --dtype float32 --block-size 16 "
        "--max-num-seqs 8 --num-blocks-override 128 --max-num-batched-tokens 64 --token-buckets 8 64"
    ).split()
    model = str(make_tiny_model(tmp_path))
    out = tmp_path / "out"
    flags += ["--compilation-cache-dir", programs_dir, "--output", str(out)]
    assert main([model, *flags]) == 0
    printed = capsys.readouterr().out
    assert "attention" in printed and (out / "step_time.txt").read_text().strip() in printed
    assert (out / "step_time.svg").exists() and list(out.rglob("*.trace.json.gz"))
    assert main([model, *flags, "--num-requests", "9"]) == 1
    assert "error: 9 requests of" in capsys.readouterr().err
