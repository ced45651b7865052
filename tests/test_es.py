"""Evolution strategies against slow references in NumPy, closed forms and invariants."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import es
from envs import AgentObservation, Coverage, TimeStep

NAN = float("nan")
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time
quick_jit = partial(jax.jit, compiler_options=QUICK)


def key(seed: int = 0):
    return jax.random.key(seed)


def random_theta(size: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=size), jnp.float32)


def assert_trees_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


# --- ask ------------------------------------------------------------------------------------------
def test_population_is_mirrored_around_theta():
    config, theta = es.ESConfig(pop_size=8, sigma=0.3), random_theta(5)
    noise = np.asarray(es.ask(jnp.zeros(5), config, key()))
    assert noise.shape == (8, 5) and noise.dtype == np.float32
    np.testing.assert_array_equal(noise[:4], -noise[4:])
    assert np.unique(noise).size == 40  # no draw is used twice
    np.testing.assert_allclose(es.ask(theta, config, key()), theta + noise, atol=1e-6)


@pytest.mark.parametrize("sigma", [0.02, 1.5])
def test_population_has_standard_deviation_sigma(sigma):
    noise = np.asarray(es.ask(jnp.zeros(100), es.ESConfig(pop_size=2000, sigma=sigma), key()))
    np.testing.assert_allclose(noise.std(), sigma, rtol=0.02)
    np.testing.assert_allclose(noise.std(0), sigma, rtol=0.15)


def test_population_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="--pop must be even and at least 2, got 7"):
        es.Config(pop=7)
    assert es.Config(pop=2).pop == 2 and es.Config(pop=4, es_kind="cem").elite_frac == 0.25
    with pytest.raises(ValueError, match=r"--elite-frac must be at least 1 / --pop = 0\.5, got 0\.25"):
        es.Config(pop=2, es_kind="cem")
    for pop in range(2, 200, 2):
        assert es.Config(pop=pop, es_kind="cem", elite_frac=1 / pop).es_config.elite_frac == 1 / pop


def test_config_hands_each_field_to_the_strategy():
    config = es.Config(pop=6, sigma=0.1, es_lr=0.2, es_kind="cem", elite_frac=0.5, weight_decay=0.3, eval_batch=4)
    expected = es.ESConfig(pop_size=6, sigma=0.1, lr=0.2, kind="cem", elite_frac=0.5, weight_decay=0.3, eval_batch=4)
    assert config.es_config == expected


# --- centered ranks -------------------------------------------------------------------------------
def slow_centered_ranks(fitness) -> list[float]:
    fitness = [-np.inf if np.isnan(value) else value for value in fitness]
    worse = [sum(other < value for other in fitness) for value in fitness]
    equal = [sum(other == value for other in fitness) for value in fitness]
    return [(w + (e - 1) / 2) / (len(fitness) - 1) - 0.5 for w, e in zip(worse, equal, strict=True)]


@pytest.mark.parametrize(
    ("fitness", "expected"),
    [
        ([3.0, 1.0], [0.5, -0.5]),
        ([NAN, NAN], [0.0, 0.0]),
        ([30.0, -1e9, 2.0, 7.0, 3.0], [0.5, -0.5, -0.25, 0.25, 0.0]),
        ([2.0, 2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]),
        ([1.0, 5.0, 1.0, 9.0, 1.0], [-0.25, 0.25, -0.25, 0.5, -0.25]),
        ([NAN, -1e30, 5.0, 6.0, 7.0], [-0.5, -0.25, 0.0, 0.25, 0.5]),
        ([4.0, NAN, NAN, 1.0, 2.0], [0.5, -0.375, -0.375, 0.0, 0.25]),
    ],
)
def test_centered_ranks_by_hand(fitness, expected):
    np.testing.assert_allclose(es.centered_ranks(jnp.array(fitness)), expected, atol=1e-7)
    np.testing.assert_allclose(slow_centered_ranks(fitness), expected, atol=1e-7)


def test_centered_ranks_equal_slow_count():
    fitness = np.random.default_rng(0).integers(0, 40, 100).astype(np.float32)  # many ties
    fitness[[3, 50]] = NAN
    np.testing.assert_allclose(es.centered_ranks(jnp.array(fitness)), slow_centered_ranks(fitness), atol=1e-6)


# --- nes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sigma", [0.01, 0.1])
def test_nes_climbs_a_linear_fitness_along_its_gradient(sigma):
    """A rank is Phi(z) - 1/2, z the noise along the slope in units of sigma, and E[z Phi(z)] = 1 / (2 sqrt(pi))."""
    config = es.ESConfig(pop_size=4096, sigma=sigma, lr=0.5)
    slope, theta = random_theta(10, 1), random_theta(10, 2)
    population = es.ask(theta, config, key())
    updated, _ = es.tell(theta, population, population @ slope, config)
    step, slope = np.asarray(updated - theta, np.float64), np.asarray(slope, np.float64)
    assert step @ slope / np.linalg.norm(step) / np.linalg.norm(slope) > 0.99
    np.testing.assert_allclose(np.linalg.norm(step), 0.5 / sigma / (2 * np.sqrt(np.pi)), rtol=0.1)


def test_nes_update_equals_rank_weighted_noise():
    config = es.ESConfig(pop_size=8, sigma=0.2, lr=0.3, weight_decay=0.7)
    theta, fitness = random_theta(5), [1.0, NAN, 3.0, 3.0, -2.0, 8.0, 0.5, 1.0]
    population = np.asarray(es.ask(theta, config, key()))
    updated, info = es.tell(theta, jnp.asarray(population), jnp.array(fitness), config)
    noise = (population - np.asarray(theta)) / 0.2
    gradient = sum(rank * eps for rank, eps in zip(slow_centered_ranks(fitness), noise, strict=True)) / (8 * 0.2)
    np.testing.assert_allclose(updated, (1 - 0.3 * 0.7) * theta + 0.3 * gradient, atol=1e-5)
    np.testing.assert_allclose(info["sigma"], 0.2, rtol=1e-6)  # nes keeps it


def test_nes_step_does_not_depend_on_the_scale_of_fitness():
    config, theta = es.ESConfig(pop_size=8), random_theta(5)
    population = es.ask(theta, config, key())
    fitness = jnp.array([4.0, 1.0, 7.0, 0.0, 2.0, 6.0, 3.0, 5.0])  # integers stay exact when scaled
    updated, _ = es.tell(theta, population, fitness, config)
    scaled, _ = es.tell(theta, population, 1000 * fitness - 70, config)
    np.testing.assert_array_equal(updated, scaled)
    assert not np.array_equal(updated, theta)


# --- cem ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fitness", "elite_frac", "elite"),
    [
        ([0.0, 9.0, 1.0, 8.0, 2.0, 7.0], 0.5, [1, 3, 5]),
        ([0.0, 9.0, 1.0, 8.0, 2.0, 7.0], 0.49, [1, 3]),  # rounded down
        ([0.0, 9.0, 1.0, 8.0, 2.0, 7.0], 0.01, [1]),  # never empty
        ([0.0, 9.0, 8.0, 8.0, 8.0, 7.0], 0.34, [1, 2, 3, 4]),  # ties with the last of the elite
        ([NAN, 3.0, NAN, 2.0, 1.0, NAN], 0.34, [1, 3]),  # NaN is worst
        ([5.0, 5.0, 5.0, 5.0, 5.0, 5.0], 0.25, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_cem_moves_to_the_elite_mean(fitness, elite_frac, elite):
    config = es.ESConfig(pop_size=6, sigma=0.4, kind="cem", elite_frac=elite_frac)
    theta = random_theta(5)
    population = np.asarray(es.ask(theta, config, key()))
    updated, info = es.tell(theta, jnp.asarray(population), jnp.array(fitness), config)
    np.testing.assert_allclose(updated, population[elite].mean(0), atol=1e-6)
    np.testing.assert_allclose(info["sigma"], np.sqrt(np.mean((population[elite] - theta) ** 2)), rtol=1e-5)


def test_elite_is_not_cut_by_rounding():
    config, population = es.ESConfig(pop_size=100, kind="cem", elite_frac=0.29), jnp.arange(100.0)[:, None]
    theta, _ = es.tell(jnp.zeros(1), population, population[:, 0], config)
    np.testing.assert_allclose(theta, [np.arange(71, 100).mean()], rtol=1e-6)  # 0.29 x 100 is 28.999... in floats


def test_cem_sigma_has_a_floor():
    config, theta = es.ESConfig(pop_size=6, sigma=1e-6, kind="cem"), random_theta(5)
    _, info = es.tell(theta, es.ask(theta, config, key()), jnp.arange(6.0), config)
    np.testing.assert_allclose(info["sigma"], es.SIGMA_FLOOR, rtol=1e-6)
    assert es.SIGMA_FLOOR > 0


# --- both kinds -----------------------------------------------------------------------------------
def search(config, fitness, theta, generations: int):
    """Pass theta and sigma on from one generation to the next; returns their history ([T, D], [T])."""

    def generation(carry, t):
        theta, sigma = carry
        eval_fn = lambda x: fitness(x, t)
        theta, info = es.es_step(theta, eval_fn, config._replace(sigma=sigma), jax.random.fold_in(key(), t))
        return (theta, info["sigma"]), (theta, info["sigma"])

    return jax.lax.scan(generation, (theta, jnp.asarray(config.sigma, float)), jnp.arange(generations))[1]


@pytest.mark.parametrize("kind", ["nes", "cem"])
def test_search_climbs_a_quadratic_and_flees_its_mirror_image(kind):
    config = es.ESConfig(pop_size=32, sigma=0.1, lr=0.02, kind=kind)
    run = lambda sign: search(config, lambda x, _: -sign * jnp.square(x - 3).sum(), jnp.zeros(3), 200)[0][-1]
    climbed, fled = np.linalg.norm(jax.vmap(run)(jnp.array([1.0, -1.0])) - 3, axis=1)
    start = 3 * np.sqrt(3)
    assert climbed < 0.1 and fled > start + 1


def test_cem_follows_an_optimum_that_moves_after_sigma_has_collapsed():
    optimum = lambda t: jnp.where(t < 1000, 2.0, -1.0)
    config = es.ESConfig(pop_size=32, sigma=0.5, kind="cem")
    theta, sigma = search(config, lambda x, t: -jnp.square(x - optimum(t)).sum(), jnp.zeros(20), 2000)
    assert np.isfinite(theta).all() and np.isfinite(sigma).all()
    assert sigma.min() >= np.float32(es.SIGMA_FLOOR) and sigma[999] < 0.01
    np.testing.assert_allclose(theta[999], 2.0, atol=0.05)
    np.testing.assert_allclose(theta[1999], -1.0, atol=0.05)


@pytest.mark.parametrize("fitness", [4.2, NAN])
@pytest.mark.parametrize("kind", ["nes", "cem"])
def test_theta_only_decays_where_fitness_is_constant(kind, fitness):
    """All ranks are equal and all members are elite; their antithetic mean is theta."""
    theta = random_theta(5)
    for weight_decay, shrink in ((0.0, 1.0), (0.5, 1 - 0.02 * 0.5)):
        config = es.ESConfig(pop_size=8, lr=0.02, kind=kind, weight_decay=weight_decay)
        updated, _ = es.tell(theta, es.ask(theta, config, key()), jnp.full(8, fitness), config)
        np.testing.assert_allclose(updated, shrink * theta, atol=1e-6)


@pytest.mark.parametrize("kind", ["nes", "cem"])
def test_info_reports_the_raw_fitness(kind):
    config, theta = es.ESConfig(pop_size=8, kind=kind), random_theta(5)
    fitness = jnp.array([100.0, NAN, -20.0, 40.0, 60.0, NAN, 0.0, 0.0])
    _, info = es.tell(theta, es.ask(theta, config, key()), fitness, config)
    assert (info["best_fitness"], info["mean_fitness"]) == (100.0, 30.0)  # of the members that have one


@pytest.mark.parametrize(("eval_batch", "expected"), [(0, {8}), (1, {1}), (3, {3, 2}), (8, {8})])
def test_eval_batch_bounds_the_members_at_once_and_changes_nothing(eval_batch, expected):
    sizes = set()

    @jax.custom_batching.custom_vmap
    def fitness(x):
        return jnp.zeros(())  # where it is evaluated without vmap

    @fitness.def_vmap
    def of_batch(axis_size, in_batched, x):
        sizes.add(axis_size)
        return -jnp.square(x - 1).sum(-1), True

    config, theta = es.ESConfig(pop_size=8), random_theta(5)
    updated, info = es.es_step(theta, fitness, config._replace(eval_batch=eval_batch), key())
    population = es.ask(theta, config, key())
    expected_theta, expected_info = es.tell(theta, population, -jnp.square(population - 1).sum(-1), config)
    assert sizes == expected
    np.testing.assert_allclose(updated, expected_theta, atol=1e-6)
    np.testing.assert_allclose(info["best_fitness"], expected_info["best_fitness"], rtol=1e-6)


# --- modules as vectors ---------------------------------------------------------------------------
class Mixed(eqx.Module):
    linear: eqx.nn.Linear
    count: jax.Array
    flag: jax.Array
    missing: None
    scale: jax.Array
    width: int = eqx.field(static=True)


def test_module_theta_round_trip_is_the_identity():
    linear = eqx.nn.Linear(3, 2, key=key())
    module = Mixed(linear, jnp.arange(4), jnp.array([True, False]), None, jnp.array(0.1), 5)
    theta = es.module_theta(module)
    assert theta.shape == (3 * 2 + 2 + 1,)
    assert_trees_equal(es.set_module_theta(module, theta), module)

    other = random_theta(theta.size)
    replaced = es.set_module_theta(module, other)
    np.testing.assert_array_equal(es.module_theta(replaced), other)
    assert_trees_equal((replaced.count, replaced.flag), (module.count, module.flag))
    assert not np.array_equal(replaced.linear.weight, linear.weight)


# --- python es.py ---------------------------------------------------------------------------------
ENV = Coverage(grid=6, n_agents=3, horizon=8, comm_r=2, view_r=1)
CONFIG = es.Config(generations=2, rollouts=3, pop=4, hidden=4, cost_coef=0.7)


@pytest.fixture(scope="module")
def start():
    return quick_jit(partial(es.init_state, CONFIG, ENV))(key(7))


def test_two_generations_repeat_for_one_seed_and_differ_for_two(start):
    train = es.train.lower(CONFIG, ENV, start, key()).compile(QUICK)
    first, again, other = (train(start, key(seed)) for seed in (0, 0, 1))
    assert_trees_equal(first, again)
    assert all(column.shape == (2,) for column in first[1].values())
    for before, one, two in zip(*(jax.tree.leaves(s.policy) for s in (start, first[0], other[0])), strict=True):
        assert not np.array_equal(one, before) and not np.array_equal(one, two)


def test_no_key_is_used_twice(start):
    with jax.debug_key_reuse(True):  # raises when the program is built
        es.init_state.lower(CONFIG, ENV, key())
        es.train.lower(CONFIG, ENV, start, key())
        es.evaluate.lower(CONFIG, ENV, start, key(), 2)


class Toy:
    """Two robots, three actions of which the last is masked; reward and cost grow with time. Over after two steps."""

    horizon = 3

    def reset(self, key):
        mask = jnp.array([[True, True, False]] * 2)
        return AgentObservation(jnp.zeros((2, 1)), action_mask=mask), jnp.zeros((), jnp.int32)

    def step(self, key, time, action):
        observation, _ = self.reset(key)
        reward, cost = action * jnp.array([1.0, 3.0]) + time, 1.0 + time
        return TimeStep(observation, reward, cost, time >= 1, jnp.zeros((), bool), {}), time + 1

    def episode_summary(self, mean, last):
        return {}


def test_generation_lets_all_members_play_the_same_episodes():
    state = quick_jit(partial(es.init_state, CONFIG, Toy()))(key())._replace(sigma=jnp.asarray(0.5))
    after, metrics = quick_jit(partial(es.train_step, CONFIG, Toy()))(state, key(5))
    search_key, episode_key = jax.random.split(key(5))
    config, theta = CONFIG.es_config._replace(sigma=0.5), es.module_theta(state.policy)
    population = es.ask(theta, config, search_key)

    def slow_fitness(member):
        """Step by step, the keys as in `evaluate`; an episode is over after its second step."""
        moved, total = state._replace(policy=es.set_module_theta(state.policy, member)), 0.0
        keys = jax.random.split(episode_key, (1 + Toy.horizon, 2, CONFIG.rollouts))
        for e in range(CONFIG.rollouts):
            observation, time = Toy().reset(keys[0, 0, e])
            for t in (1, 2):
                action = es.select_action(CONFIG, Toy(), moved, observation, keys[t, 0, e], False)
                assert set(np.asarray(action)) <= {0, 1}  # the last action is masked
                time_step, time = Toy().step(keys[t, 1, e], time, action)
                total += np.mean(time_step.reward) - 0.7 * time_step.cost
        return total / CONFIG.rollouts

    fitness = np.array([slow_fitness(member) for member in population])
    assert len(set(fitness)) == 4
    np.testing.assert_allclose([metrics["best"], metrics["mean"]], [fitness.max(), fitness.mean()], rtol=1e-5)
    np.testing.assert_allclose(es.module_theta(after.policy), es.tell(theta, population, fitness, config)[0], atol=1e-5)


@pytest.mark.parametrize("pop_size", [0, 1, 7])
def test_population_without_pairs_is_refused(pop_size):
    with pytest.raises(ValueError, match=f"pop_size must be even and at least 2, got {pop_size}"):
        es.ask(jnp.zeros(2), es.ESConfig(pop_size=pop_size), jax.random.key(0))


def test_cem_elite_shrinks_rather_than_take_in_nan():
    """Half of the population is the elite, but only one member has a fitness."""
    population = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    fitness = jnp.array([jnp.nan, 5.0, jnp.nan, jnp.nan])
    config = es.ESConfig(pop_size=4, kind="cem", elite_frac=0.5)
    theta, _ = es.tell(jnp.zeros(1), population, fitness, config)
    np.testing.assert_allclose(theta, [2.0])
