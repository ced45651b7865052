"""The tests compile a lot and compute little, so the compiler optimizes less; `optimized` switches it back."""

import jax
import pytest

jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def optimized():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
