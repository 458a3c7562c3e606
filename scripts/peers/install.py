"""Installs the peers, each in a virtual environment of its own under build/peers, and exports the weights for them.

    python scripts/peers/install.py

What is there already is left alone. A peer that cannot be installed is one line, and no error: the comparison goes on
without it.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from peer import HERE, PEERS

DEFAULT_FOLDER = HERE.parent.parent / "build" / "peers"
MODEL = "model"  # the Hugging Face folder, beside the environments


def export_model(folder: Path, model: str) -> None:
    """The GGUF's weights as float32 safetensors, for the peers that read no GGUF: the same numbers."""
    if not (folder / MODEL / "tokenizer_config.json").exists():
        script = HERE.parent / "export_hf.py"
        subprocess.run([sys.executable, script, "--model", model, "--output", folder / MODEL], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    export_model(args.folder, args.model)
    for peer in PEERS:
        if peer.is_installed(args.folder):
            continue
        print(f"installing {peer.name} ...", flush=True)
        try:
            peer.install(args.folder, args.folder / f"{peer.name}.log")
        except OSError as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
