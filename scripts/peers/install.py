"""Installs the peers, each in a virtual environment of its own under build/peers, and exports the weights for them.

    python scripts/peers/install.py

What is there already is left alone. A peer that cannot be installed is one line, and no error: the comparison goes on
without it.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from last_words import last_error
from peer import HERE, MODEL, PEERS, is_exported

DEFAULT_FOLDER = HERE.parent.parent / "build" / "peers"


def export_model(folder: Path, model: str) -> None:
    """The GGUF's weights as float32 safetensors, for the peers that read no GGUF: the same numbers.

    Raises OSError, one line, where it fails; what it said is in the log.
    """
    log = folder / f"{MODEL}.log"
    command = [sys.executable, HERE.parent / "export_hf.py", "--model", model, "--output", folder / MODEL]
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        raise OSError(f"the weights of {model} cannot be exported: {last_error(log)}; see {log}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not is_exported(args.folder):
        print("exporting the weights ...", flush=True)
        try:
            export_model(args.folder, args.model)
        except OSError as error:
            print(error, file=sys.stderr)
    for peer in PEERS:
        if peer.is_installed(args.folder):
            continue
        print(f"installing {peer.name} ...", flush=True)
        try:
            peer.install(args.folder)
        except OSError as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
