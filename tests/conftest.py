"""The tests compile a lot and compute little, so the compiler optimizes less; `optimized` switches it back."""

import jax
import pytest

LESS = jax.__version_info__ < (0, 12)  # without optimizations, jaxlib 0.12.0 computes NaN in sac_shared_critic.py
jax.config.update("jax_disable_most_optimizations", LESS)


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
