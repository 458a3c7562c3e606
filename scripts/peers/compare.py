"""jpaged beside its peers: the same token ids, the same weights, in turns, in one session.

    python scripts/peers/install.py     # once
    python scripts/peers/compare.py

Every engine is a process of its own, with the settings that its worker_*.py states, and is stopped while another one is
measured. In each round of a workload every engine takes its turn, with fresh prompts; a ratio is of two runs of the
same round. Machines are noisy: trust ratios, and look at their spread. What takes minutes runs in the first round only.
"""

import argparse
import random
import signal
import sys
from pathlib import Path

from install import DEFAULT_FOLDER
from peer import HERE, LLAMA_CPP, MODEL, TRANSFORMERS, VLLM
from process import WorkerProcess
from table import JPAGED, NOT_ASKED_FOR, TRANSFORMERS_MODES, Results
from tqdm import tqdm
from workload import Workload, workloads

from jpaged.bench.options import add_json_option, int_from
from jpaged.bench.results import load_note, write_json
from models.weights import DEFAULT_MODEL, open_checkpoint, resolve_model

ONLY_VLLM = {"ShareGPT-like"}  # its lengths differ, which the other peers' batches cannot make use of
ONCE = {  # minutes each
    ("32x(128+128)", "transformers generate_batch"),
    ("64x(256+128)", "llama.cpp"),
    ("64x(256+128)", "transformers generate"),
}
NEVER = {("64x(256+128)", "transformers generate_batch")}  # 8 minutes, at a sixth of the other mode's rate
Command = tuple[list[str], dict[str, str]]  # and its environment


def commands(folder: Path, model: str) -> tuple[dict[str, Command], dict[str, str]]:
    """The command of each engine that is installed, in the order of their turns; and why each other one is absent."""
    exported = str(folder / MODEL)
    found = {JPAGED: ([sys.executable, str(HERE / "worker_jpaged.py"), model], {})}
    missing = {}
    for peer, name, arguments in (
        (VLLM, VLLM.name, [exported]),
        (LLAMA_CPP, LLAMA_CPP.name, [str(resolve_model(model))]),
        *((TRANSFORMERS, mode, [exported, mode.split()[-1]]) for mode in TRANSFORMERS_MODES),
    ):
        if why := peer.why_absent(folder):
            missing[name] = why
        else:
            found[name] = ([str(peer.python(folder)), str(HERE / peer.worker), *arguments], peer.env(folder))
    return found, missing


class Comparison:
    """The engines that started, and what has been measured of them.

    missing: why the others are not there; those that crash are added to it.
    """

    def __init__(self, vocab_size: int, seed: int, missing: dict[str, str]):
        self.results = Results()
        self.settings: dict[str, str] = {}
        self.missing = dict(missing)
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._workers: dict[str, WorkerProcess] = {}

    def start(self, wanted: dict[str, Command], folder: Path) -> None:
        """Starts each of the wanted; their logs go to folder."""
        for name, (command, env) in tqdm(wanted.items(), desc="starting", unit="engine"):
            try:
                worker = WorkerProcess(command, env, folder / f"{name.replace(' ', '-')}-worker.log")
                self._workers[name] = worker
                self.settings[name] = worker.wait_until_ready()
            except OSError as error:
                self._drop(name, error)

    def measure(self, workload: Workload, rounds: int, bar: tqdm) -> None:
        """rounds turns of every engine, after a short run of each that is not counted."""
        for number in range(-1, rounds):
            for name, worker in list(self._workers.items()):
                if not takes_part(name, workload, number):
                    continue
                bar.set_description(f"{workload.name} {name}")
                try:
                    seconds = worker.run(workload.request(self._rng, self._vocab_size, is_warm_up=number < 0))
                except OSError as error:
                    self.results.cut.add((workload.name, name))
                    self._drop(name, error)
                    continue
                if number >= 0:
                    self.results.add(workload.name, name, number, workload.num_output_tokens / seconds)
                    bar.update()

    def _drop(self, name: str, error: OSError) -> None:
        """A peer that fails is left out of what follows. Raises the error where it is jpaged: then there is nothing."""
        if worker := self._workers.pop(name, None):
            worker.close()
        if name == JPAGED:
            raise OSError(f"{name}: {error}") from error
        self.missing[name] = str(error)
        print(f"{name}: {error}", file=sys.stderr)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


def takes_part(name: str, workload: Workload, number: int) -> bool:
    if workload.name in ONLY_VLLM:
        return name in (JPAGED, VLLM.name)
    if (workload.name, name) in NEVER:
        return False
    return number <= 0 or (workload.name, name) not in ONCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where install.py put the peers")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what install.py exported: a name or a .gguf file")
    parser.add_argument("--engines", help="some of them, separated by commas (default: all that are installed)")
    parser.add_argument("--workloads", help="some of them, separated by commas (default: all)")
    parser.add_argument("--rounds", type=int_from(1), default=3, help="alternating runs a cell (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    add_json_option(parser)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # workers sleep: nobody else would end them
    try:
        loads = chosen(args.workloads, {load.name: load for load in workloads()})
        found, missing = commands(args.folder, args.model)
        engines = chosen(args.engines, found, always=JPAGED, missing=missing)
        missing |= {name: NOT_ASKED_FOR for name in found if name not in engines}
        vocab_size = open_checkpoint(resolve_model(args.model)).config.vocab_size
        note = load_note()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    comparison = Comparison(vocab_size, args.seed, missing)
    try:
        comparison.start(engines, args.folder)
        turns = sum(
            takes_part(name, load, number)
            for name in engines
            for load in loads.values()
            for number in range(args.rounds)
        )
        with tqdm(total=turns, unit="run") as bar:
            for load in loads.values():
                comparison.measure(load, args.rounds, bar)
    except OSError as error:
        sys.exit(f"error: {error}")
    finally:
        comparison.close()
    for name, settings in comparison.settings.items():
        print(f"{name}: {settings}")
    print(f"{note} before; median (least to most) of {args.rounds} rounds\n")
    print(comparison.results.table(comparison.missing))
    numbers = {"settings": comparison.settings, "missing": comparison.missing, "load": note}
    write_json(args.json, numbers | {"output_tokens_per_s": comparison.results.rates})


def chosen(
    names: str | None, among: dict, always: str | None = None, missing: dict[str, str] | None = None
) -> dict:
    """The named ones, in their own order. Raises ValueError for a name that is absent, with its reason in missing."""
    if names is None:
        return among
    wanted = names.split(",")
    for name in wanted:
        if missing and name in missing:
            raise ValueError(f"{name}: {missing[name]}")
        if name not in among:
            raise ValueError(f"there is no {name!r}; there are {', '.join(among)}")
    return {name: value for name, value in among.items() if name in wanted or name == always}


if __name__ == "__main__":
    main()
