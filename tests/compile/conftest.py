"""The compilers of chips that are not here: `make test-compile`."""

import os

# Before their first use. There is no TPU to ask what it is, and nothing to download from a metadata server.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def pytest_addoption(parser):
    parser.addoption("--update-figures", action="store_true", help="keep the estimates of this run in figures.json")
