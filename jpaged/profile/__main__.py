"""Runs a workload and writes where a decode step's time goes: a table, a picture, and the trace that they come from."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from jpaged.cli import Parser
from jpaged.engine import LLMEngine
from jpaged.profile.op_groups import OpGroups
from jpaged.profile.picture import draw
from jpaged.profile.spans import HostProbe
from jpaged.profile.step_profile import StepProfile
from jpaged.profile.trace import read_trace, recording
from jpaged.profile.workload import ProfileConfig, Workload


def program_text(engine: LLMEngine, bucket: tuple[int, int]) -> str:
    """The compiled program's HLO. A backend that cannot show what it loaded from disk compiles it for this."""
    try:
        text = engine.runner.programs[bucket].as_text()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        text = None
    if text is None:
        step, spec = engine.runner.step, engine.runner.spec
        arguments = step.arguments(bucket, spec.num_blocks, spec.table_width)
        text = step.jitted(bucket).lower(*arguments).compile().as_text()
    return text


def profile(engine: LLMEngine, config: ProfileConfig, trace_folder: Path) -> StepProfile:
    """Three runs: the first compiles, the second is timed on the host alone, the third is traced.

    Raises ValueError for a workload that shows no steady steps.
    """
    workload, plain, traced = Workload(engine, config), HostProbe(engine), HostProbe(engine)
    with tqdm(total=3, unit="run", leave=False) as bar:
        for name, watch in (("compile", None), ("time", plain), ("trace", recording(trace_folder, traced))):
            bar.set_description(name)
            workload.run(watch)
            bar.update()
    (bucket,) = traced.buckets
    return StepProfile.of(plain.spans, read_trace(trace_folder), OpGroups(program_text(engine, bucket)))


def describe(engine: LLMEngine, config: ProfileConfig) -> tuple[str, str]:
    """What was run, and on what: two lines."""
    device = engine.runner.mesh.devices.flat[0].device_kind
    return (
        f"{engine.config.model}, {engine.runner.step.dtype.name}: a decode step of {config.num_requests} requests "
        f"({config.prompt_len} + {config.output_len} tokens each)",
        f"jax {jax.__version__} on {device}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m jpaged.profile", description=__doc__, allow_abbrev=False)
    engine_config, config = parser.parse(argv, workload=ProfileConfig)
    logging.basicConfig(level=logging.WARNING)
    folder = Path(config.output)
    table, picture, trace = folder / "step_time.txt", folder / "step_time.svg", folder / "trace"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        engine = LLMEngine(engine_config)
        result = profile(engine, config, trace)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    title, subtitle = describe(engine, config)
    text = "\n".join([title, subtitle, "", result.table(), "", result.check()])
    table.write_text(text + "\n")
    picture.write_text(draw(result, title, subtitle))
    print(f"{text}\n\n{table}, {picture}, and {trace}: open its .trace.json.gz at https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
