"""Session set-up: kernels run in Triton's interpreter where there is no GPU; all tests share one pool of ranks."""

import os

import pytest
import torch

# read by triton when a kernel is decorated, so it must stand before any kernel module is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# ranks and tests share few cores; the ranks inherit this through the fork server
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

from harness import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def rank_pool():
    """The one pool of worker processes of a test run."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny random model and its tokenizer, to be left as it is; a module may have a `folder` of its own."""
    from launch.assets import tiny_model_folder

    return str(tiny_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def ranks(rank_pool):
    """`ranks(n).run(body, *args)` runs a module-level body on n gloo ranks and returns one result per rank."""
    return rank_pool.ranks
