"""`python -m jpaged.bench serve|throughput|latency|startup`."""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

from jpaged.bench import latency, serving, startup, throughput
from jpaged.cli import Parser

COMMANDS = {"serve": serving, "throughput": throughput, "latency": latency, "startup": startup}


def main(argv: Sequence[str] | None = None) -> int:
    """Exits with status 2 and one line for a flag that cannot work; returns 1 after one line for all else."""
    argv = list(sys.argv[1:] if argv is None else argv)
    at = argv.index("--") if "--" in argv else len(argv)
    argv, server_flags = argv[:at], argv[at + 1 :]
    parser = Parser(
        prog="python -m jpaged.bench",
        description="Benchmarks with the names that vLLM's users know.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_flags(command)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or a server that we started would stay behind
    logging.basicConfig(level=logging.WARNING)
    try:
        if server_flags and not getattr(args, "start", False):
            raise ValueError("flags after -- are for the server of `serve --start`")
        args.server_flags = server_flags
        return COMMANDS[args.command].run(args)
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        is_of_file = isinstance(error, OSError) and error.filename is not None
        text = f"{error.filename}: {error.strerror}" if is_of_file else " ".join(str(error).split())
        print(f"error: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
