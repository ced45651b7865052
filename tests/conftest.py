"""The tests compile a lot and compute little, so the compiler optimizes less; `optimized` switches it back."""

import jax
import pytest

jax.config.update("jax_disable_most_optimizations", True)


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
