"""What the process gives back to the system between steps, and has to take anew."""

import subprocess
import sys

import pytest

PAGE_FAULTS_OF_A_SECOND_RUN = """
import resource, sys, threading
import numpy as np
from jpaged.host_memory import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)

def run():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.empty(96 * 2**20, np.uint8).fill(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_large_temporaries_of_any_thread_come_from_pages_that_are_there():
    def count(mode: str) -> int:
        command = [sys.executable, "-c", PAGE_FAULTS_OF_A_SECOND_RUN, mode]
        child = subprocess.run(command, stdout=subprocess.PIPE)
        if child.returncode == 3:
            pytest.skip("this C library has no mallopt")
        return int(child.stdout)

    assert count("kept") < 20
    assert count("as by default") >= 48  # huge pages; it is 24576 of 4 KiB
