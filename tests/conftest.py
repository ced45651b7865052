"""The tests compile a lot and compute little, so the compiler optimizes less; `optimized` switches it back."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

jax.config.update("jax_disable_most_optimizations", True)
# jaxlib 0.10.1 compiles twice as fast without the fusion emitters, but then results differ in the last bits between
# programs of different length. DEFAULT, in a program's compiler options, brings them back. Scripts run with them.
WITH_OPTION = jax.__version_info__ == (0, 10, 1)
DEFAULT = {"xla_cpu_use_fusion_emitters": True} if WITH_OPTION else {}
if WITH_OPTION:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"


def side_by_side(function: Callable, arguments: Iterable) -> list:
    """The function of each argument, two at a time: a compilation keeps one core busy."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, arguments))


@pytest.fixture(autouse=True, scope="module")
def free_programs():
    """Compiled programs hold memory maps, of which a process may have only so many."""
    yield
    jax.clear_caches()


@pytest.fixture
def optimized():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
