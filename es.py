"""Evolution strategies in JAX: ask for a population, evaluate it, tell the fitness. Fitness is maximized.

    population = ask(theta, config, key)                      # [P, D], antithetic pairs theta +- sigma eps
    theta, info = tell(theta, population, fitness, config)    # fitness [P]

`nes` is OpenAI-ES (Salimans et al. 2017): fitness becomes centered ranks, then one step along the estimated gradient,

    theta <- (1 - lr weight_decay) theta + lr / (P sigma) sum_i rank_i eps_i.

`cem` is the cross-entropy method (Rubinstein 1999): theta becomes the mean of the elite, and `info["sigma"]` the spread
of the elite around the old theta, which the caller passes on to the next generation. Deviations from Salimans et al.:
plain gradient ascent instead of Adam, no virtual batch normalization, and all members share one set of episode keys.

`python es.py` evolves a small policy on Coverage, the whole run in one scan. Axes: P population, D parameters.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

SIGMA_FLOOR = 1e-3  # cem keeps searching after its elite has collapsed


# --- 1. the strategy ------------------------------------------------------------------------------
class ESConfig(NamedTuple):
    pop_size: int = 16  # members, even
    sigma: float | Array = 0.05  # standard deviation of the search distribution
    lr: float = 0.05  # step size of nes
    kind: str = "nes"  # nes or cem
    elite_frac: float = 0.25  # share of the population that cem averages
    weight_decay: float = 0.0  # pull towards zero, per unit of lr
    eval_batch: int = 0  # members evaluated at once, 0: all


def ask(theta: Array, config: ESConfig, key: Array) -> Array:
    """Sample antithetic pairs around theta, [D] -> [P, D]; member i + P/2 mirrors member i."""
    noise = jax.random.normal(key, (config.pop_size // 2, theta.size), theta.dtype)
    return theta + config.sigma * jnp.concatenate([noise, -noise])


def centered_ranks(fitness: Array) -> Array:
    """Ranks scaled to [-0.5, 0.5], [P] -> [P]. Ties share their mean rank, NaN is worst."""
    fitness = jnp.where(jnp.isnan(fitness), -jnp.inf, fitness)
    ordered = jnp.sort(fitness)
    below = jnp.searchsorted(ordered, fitness, side="left")
    not_above = jnp.searchsorted(ordered, fitness, side="right")
    return (below + not_above - 1) / 2 / (fitness.size - 1) - 0.5


def nes_tell(theta: Array, population: Array, fitness: Array, config: ESConfig) -> tuple[Array, Array]:
    """One ascent step along the search gradient; returns (theta [D], sigma [])."""
    noise = (population - theta) / config.sigma
    gradient = centered_ranks(fitness) @ noise / (config.pop_size * config.sigma)
    return theta + config.lr * gradient, jnp.asarray(config.sigma, theta.dtype)


def cem_tell(theta: Array, population: Array, fitness: Array, config: ESConfig) -> tuple[Array, Array]:
    """The elite's mean, and its root mean square distance from the old theta per dimension; (theta [D], sigma [])."""
    n_elite = max(1, int(config.pop_size * config.elite_frac))
    fitness = jnp.where(jnp.isnan(fitness), -jnp.inf, fitness)
    elite = fitness >= jnp.sort(fitness)[-n_elite]  # ties with the last of the elite belong to it
    weight = elite / elite.sum()
    variance = weight @ jnp.square(population - theta).mean(1)
    return weight @ population, jnp.maximum(jnp.sqrt(variance), SIGMA_FLOOR)


def tell(theta: Array, population: Array, fitness: Array, config: ESConfig) -> tuple[Array, dict[str, Array]]:
    """Move theta [D] towards the fitter members; population [P, D] from `ask`, fitness [P], higher is better."""
    kind_tell = {"nes": nes_tell, "cem": cem_tell}[config.kind]
    updated, sigma = kind_tell(theta, population, fitness, config)
    updated = updated - config.lr * config.weight_decay * theta
    return updated, {"best_fitness": jnp.nanmax(fitness), "mean_fitness": jnp.nanmean(fitness), "sigma": sigma}


def es_step(
    theta: Array, eval_fn: Callable[[Array], Array], config: ESConfig, key: Array
) -> tuple[Array, dict[str, Array]]:
    """One generation. `eval_fn`: pure, parameters [D] -> fitness []; it is vmapped, `eval_batch` members at a time."""
    population = ask(theta, config, key)
    fitness = jax.lax.map(eval_fn, population, batch_size=config.eval_batch or config.pop_size)
    return tell(theta, population, fitness, config)


# --- 2. Equinox modules as vectors ----------------------------------------------------------------
def module_theta(module: eqx.Module) -> Array:
    """All inexact-array leaves of a module as one vector [D]."""
    return ravel_pytree(eqx.filter(module, eqx.is_inexact_array))[0]


def set_module_theta(module: eqx.Module, theta: Array) -> eqx.Module:
    """The module with its inexact-array leaves replaced by theta [D]; the inverse of `module_theta`."""
    parameters, rest = eqx.partition(module, eqx.is_inexact_array)
    return eqx.combine(ravel_pytree(parameters)[1](theta), rest)
