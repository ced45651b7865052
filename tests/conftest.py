"""The tests compile a lot and compute little, so the compiler optimizes less; `optimized` switches it back."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

LESS = jax.__version_info__ < (0, 12)  # without optimizations, jaxlib 0.12.0 computes NaN in sac_shared_critic.py
jax.config.update("jax_disable_most_optimizations", LESS)


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
    jax.config.update("jax_disable_most_optimizations", LESS)
