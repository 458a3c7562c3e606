"""`python -m jpaged.bench startup`: cold and warm start to the first token, and the programs that were compiled."""

import sys

from jpaged.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["startup", *sys.argv[1:]]))
