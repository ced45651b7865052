"""ppo_ctde.py: values on problems with known answers, and each part against a slow or closed form."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import side_by_side
from probes import PROBES, Probe

import ppo_ctde
from envs import AgentObservation, Coverage, Rendezvous, init_normalizer, update_normalizer
from ppo_ctde import Config


class Dear(Probe):
    """Every step costs 0.7."""

    def step(self, key, state, action):
        time_step, state = super().step(key, state, action)
        return time_step._replace(cost=jnp.asarray(0.7)), state


SMALL = Config(total_timesteps=64, num_envs=4, num_steps=8, num_minibatches=2, hidden=8)
LOSS = jax.jit(jax.value_and_grad(ppo_ctde.ppo_loss, has_aux=True), static_argnums=1)


def run(config, env, seed=0):
    init_key, train_key = jax.random.split(jax.random.key(seed))
    return ppo_ctde.train(config, env, ppo_ctde.init_state(config, env, init_key), train_key)


# --- learning ------------------------------------------------------------------------------------
PROBING = Config(total_timesteps=16_000, num_envs=32, num_steps=8, hidden=16, lr=5e-3, gamma=0.5, num_minibatches=4)


def probe_task(kind):
    """The last one with raw observations and continuous actions."""
    last = kind == "both"
    return replace(PROBING, normalize=not last), Probe(kind, continuous_actions=last)


@pytest.fixture(scope="module")
def probed():
    """kind -> the state at the end of training"""
    kinds = [kind for kind, *_ in PROBES]
    return dict(zip(kinds, side_by_side(lambda kind: run(*probe_task(kind))[0], kinds), strict=True))


@pytest.mark.parametrize(("kind", "seen", "value"), PROBES)
def test_probe_values(probed, kind, seen, value):
    (config, env), state = probe_task(kind), probed[kind]
    observation = AgentObservation(jnp.array(seen, float))
    np.testing.assert_allclose(ppo_ctde.critic_value(config, state, observation), value, atol=0.1)
    if kind in ("action", "both"):
        shown = ppo_ctde.perceive(config, state, observation).observation
        choice = jax.vmap(state.actor)(shown)
        if env.continuous_actions:
            np.testing.assert_allclose(jnp.clip(choice.mode(), -1, 1)[:, 0], [-1, 1], atol=0.1)
        else:
            assert jnp.exp(choice.log_probs)[0, 1] > 0.9


def test_joint_critic_explains_the_return_and_a_local_one_does_not():
    """Four seeds side by side. The bonus keeps them moving: a team that always meets at zero is easy to predict."""
    config = Config(total_timesteps=32_000, num_envs=32, num_steps=10, hidden=32, lr=3e-3, ent_coef=0.1)
    init_key, train_key = jax.random.split(jax.random.key(0), (2, 4))

    def explained(joint):
        env = Rendezvous(critic_observation=joint)
        state = jax.vmap(partial(ppo_ctde.init_state, config, env))(init_key)
        return ppo_ctde.train(config, env, state, train_key)[1]["explained_variance"][-10:].mean(0)

    joint, local = side_by_side(explained, (True, False))
    assert joint.min() > 0.9
    assert local.mean() < 0.7


def test_multiplier_rises_until_the_cost_keeps_its_limit():
    """Action 1 pays 1 and costs 1: only the price keeps the agents from it."""
    config = Config(
        total_timesteps=48_000,
        num_envs=32,
        num_steps=8,
        hidden=16,
        lr=5e-3,
        num_minibatches=4,
        cost_limit=0.2,
        lagrange_init=0.0,
    )
    train = lambda lagrange_lr: run(replace(config, lagrange_lr=lagrange_lr), Probe("tempting"))[1]
    free, priced = side_by_side(train, (0.0, 0.5))
    assert free["cost"][-50:].mean() > 0.9
    assert priced["lagrange_multiplier"].max() > 1  # what the action pays
    assert priced["cost"][-50:].mean() < 0.3


# --- the parts -----------------------------------------------------------------------------------
def test_gae_cuts_the_bootstrap_at_termination_only():
    reward, value, next_value = jnp.ones(3), jnp.zeros(3), jnp.array([0.0, 10.0, 0.0])
    cut, never = jnp.array([False, True, False]), jnp.zeros(3, bool)
    truncated, _ = ppo_ctde.compute_gae(reward, value, next_value, never, cut, 0.9, 0.8)
    terminated, _ = ppo_ctde.compute_gae(reward, value, next_value, cut, never, 0.9, 0.8)
    np.testing.assert_allclose(truncated, [8.2, 10.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(terminated, [1.72, 1.0, 1.0], rtol=1e-6)


def test_rollout_goes_through_episodes_of_another_length():
    """Episodes of 7 steps in rollouts of 10: the clock runs on across iterations."""
    config = Config(total_timesteps=80, num_envs=4, num_steps=10, num_minibatches=2, hidden=8)
    env = Rendezvous(max_steps=7)
    state = ppo_ctde.init_state(config, env, jax.random.key(0))
    cuts = []
    for i in range(3):
        state, transition, _ = ppo_ctde.collect(config, env, state, jax.random.key(i + 1))
        cuts.append(np.asarray(transition.truncated))
        # the value of the outcome is the value of the next observation, except where the episode was cut
        same = np.isclose(transition.next_value[:-1], transition.value[1:], atol=1e-6).all(-1)
        np.testing.assert_array_equal(same, ~cuts[-1][:-1])
    steps = 1 + np.flatnonzero(np.concatenate(cuts)[:, 0])
    np.testing.assert_array_equal(steps, [7, 14, 21, 28])


def test_finished_episodes_are_reported_and_none_is_nan():
    config = Config(total_timesteps=80, num_envs=4, num_steps=3, num_minibatches=2, hidden=8)
    env = Rendezvous(max_steps=5)
    state = ppo_ctde.init_state(config, env, jax.random.key(0))
    state, first, finished = ppo_ctde.collect(config, env, state, jax.random.key(1))
    assert np.isnan(finished["episode_return"]) and finished["episodes"] == 0
    state, second, finished = ppo_ctde.collect(config, env, state, jax.random.key(2))
    reward = np.concatenate([first.reward, second.reward])[:5]  # [5, E, N], the whole first episode
    np.testing.assert_allclose(finished["episode_return"], reward.sum(0).mean(), rtol=1e-5)
    assert finished["episodes"] == 4


def test_evaluation_counts_the_steps_of_an_episode_that_ends_before_the_horizon():
    class Early(Rendezvous):
        horizon = 8

        def step(self, key, state, action):
            time_step, state = super().step(key, state, action)
            return time_step._replace(reward=jnp.where(state.time > 5, jnp.nan, time_step.reward)), state

    env = Early(max_steps=5)
    state = ppo_ctde.init_state(SMALL, env, jax.random.key(0))
    figures, trajectory = ppo_ctde.evaluate(SMALL, env, state, jax.random.key(1), 3)
    distance = np.abs(np.diff(trajectory.position, axis=-1))[:, 0]  # of the first episode
    assert len(distance) == 8 and distance[4] != distance[-1]
    np.testing.assert_allclose(figures["episode_return"][0], -distance[:5].sum(), rtol=1e-5)
    np.testing.assert_allclose(figures["distance"][0], distance[4], rtol=1e-5)


@pytest.fixture(scope="module")
def rollout():
    env = Coverage(grid=6, n_agents=3, horizon=8)
    state = ppo_ctde.init_state(SMALL, env, jax.random.key(0))
    state, transition, _ = ppo_ctde.collect(SMALL, env, state, jax.random.key(1))
    seen = ppo_ctde.perceive(SMALL, state, transition.observation)
    advantage = jax.random.normal(jax.random.key(2), transition.reward.shape)
    batch = ppo_ctde.Batch(seen, transition.action, transition.log_prob, advantage, advantage)
    return state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def test_every_epoch_takes_every_row_once_in_an_order_of_its_own():
    config = Config(num_envs=4, num_steps=6, num_epochs=3, num_minibatches=8)
    row = ppo_ctde.minibatch_rows(config, 24, jax.random.key(0))
    assert row.shape == (3 * 8, 3)
    epoch = np.asarray(row).reshape(3, 24)
    np.testing.assert_array_equal(np.sort(epoch), np.tile(np.arange(24), (3, 1)))
    assert len({tuple(order) for order in [range(24), *epoch.tolist()]}) == 4


def test_ratio_is_one_before_the_first_update(rollout):
    state, batch = rollout
    (_, metrics), _ = LOSS((state.actor, state.critic), SMALL, batch)
    np.testing.assert_allclose(metrics["ratio"], 1.0, atol=1e-5)
    np.testing.assert_allclose(metrics["policy_loss"], 0.0, atol=1e-5)  # minus the mean of normalized advantages


def test_loss_equals_slow_recomputation(rollout):
    """For a policy that has moved on since it acted."""
    state, batch = rollout
    rng = np.random.default_rng(0)
    moved = lambda x: x + jnp.asarray(rng.normal(0, 0.4, x.shape), jnp.float32)
    batch = batch._replace(log_prob=moved(batch.log_prob), target=moved(batch.target))
    (total, metrics), _ = LOSS((state.actor, state.critic), SMALL, batch)

    seen = batch.observation
    probability = np.exp(np.asarray(state.actor(seen.observation, seen.action_mask).log_probs, np.float64))
    advantage = np.asarray(batch.advantage - batch.advantage.mean(), np.float64) / batch.advantage.std()
    surrogate, entropy = np.zeros((2, *advantage.shape))
    clipped = 0
    for index in np.ndindex(advantage.shape):
        ratio = probability[index][batch.action[index]] / np.exp(np.float64(batch.log_prob[index]))
        bounded = min(max(ratio, 0.8), 1.2)
        clipped += bounded != ratio
        surrogate[index] = min(ratio * advantage[index], bounded * advantage[index])
        entropy[index] = -sum(p * np.log(p) for p in probability[index] if p > 0)
    assert 0.2 < clipped / advantage.size < 0.8
    value_loss = np.mean((np.asarray(state.critic(seen.critic_input), np.float64) - np.asarray(batch.target)) ** 2)
    expected = -surrogate.mean(), value_loss, entropy.mean()
    np.testing.assert_allclose([metrics[x] for x in ("policy_loss", "value_loss", "entropy")], expected, rtol=1e-4)
    np.testing.assert_allclose(total, expected[0] + 0.5 * expected[1] - 0.01 * expected[2], rtol=1e-4)


def test_evaluation_takes_the_likeliest_actions_or_samples(rollout):
    state, _ = rollout
    team = jax.tree.map(lambda x: x[0], state.observation)
    choice = state.actor(ppo_ctde.perceive(SMALL, state, team).observation, team.action_mask)
    draw = jax.vmap(lambda key: ppo_ctde.select_action(SMALL, None, state, team, key, False))
    sampled = draw(jax.random.split(jax.random.key(0), 20_000))
    frequency = (sampled[..., None] == np.arange(5)).mean(0)
    np.testing.assert_allclose(frequency, jnp.exp(choice.log_probs), atol=0.02)
    modes = ppo_ctde.select_action(SMALL, None, state, team, jax.random.key(0), True)
    np.testing.assert_array_equal(modes, choice.log_probs.argmax(-1))


def test_loss_is_finite_on_one_row_and_on_constant_advantages(rollout):
    state, batch = rollout
    one_row = jax.tree.map(lambda x: x[:1, :1], batch)
    constant = batch._replace(advantage=jnp.full_like(batch.advantage, 3.0))
    for rows in (one_row, constant):
        outcome = LOSS((state.actor, state.critic), SMALL, rows)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome))


def test_masked_actions_have_no_probability_and_entropy_stays_finite(rollout):
    state, _ = rollout
    observation = jnp.zeros(state.observation.observation.shape[-1])
    only_stay = jnp.array([True, False, False, False, False])
    log_prob = state.actor(observation, only_stay).log_probs
    np.testing.assert_allclose(jnp.exp(log_prob), [1, 0, 0, 0, 0], atol=1e-7)
    np.testing.assert_allclose(state.actor(observation, only_stay).entropy(), 0.0, atol=1e-6)
    mask = jnp.array([True, False, True, False, True])
    draws = jax.vmap(state.actor(observation, mask).sample)(jax.random.split(jax.random.key(0), 10_000))
    assert set(np.unique(draws)) == {0, 2, 4}


def test_gaussian_density_entropy_and_samples():
    """Against double precision, and against the moments of samples."""
    mean, log_std = jnp.array([0.5, -2.0]), jnp.array([-1.0, 0.5])
    choice = ppo_ctde.Gaussian(mean, log_std)
    std = np.exp(np.asarray(log_std, np.float64))
    action = np.array([0.1, 3.0])
    density = np.exp(-np.square(action - mean) / (2 * std**2)) / np.sqrt(2 * np.pi * std**2)
    np.testing.assert_allclose(choice.log_prob(action), np.log(density).sum(), rtol=1e-5)
    np.testing.assert_allclose(choice.entropy(), np.log(std * np.sqrt(2 * np.pi * np.e)).sum(), rtol=1e-5)
    sample = jax.vmap(choice.sample)(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(sample.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(sample.std(0), std, rtol=0.03)
    np.testing.assert_allclose(-choice.log_prob(sample).mean(), choice.entropy(), atol=0.03)
    np.testing.assert_array_equal(choice.mode(), mean)


def test_observations_are_shown_raw_without_the_normalizer():
    raw = AgentObservation(jnp.array([[7.0, -1.0]]))
    normalizer = init_normalizer(raw)
    normalizer = normalizer._replace(
        mean=AgentObservation(jnp.full(2, 3.0)), variance=AgentObservation(jnp.full(2, 4.0))
    )
    state = ppo_ctde.TrainState(*[None] * 3, normalizer, *[None] * 4)
    np.testing.assert_allclose(ppo_ctde.perceive(Config(), state, raw).observation, [[2.0, -2.0]], rtol=1e-6)
    np.testing.assert_array_equal(ppo_ctde.perceive(Config(normalize=False), state, raw).observation, raw.observation)


def test_normalizer_is_updated_once_per_iteration_from_raw_observations():
    env = Rendezvous()
    config = Config(total_timesteps=400, num_envs=4, num_steps=20, num_epochs=1, num_minibatches=1, hidden=8)
    state, metrics = run(config, env)
    assert state.normalizer.count == 400 * env.n_agents
    # One update per iteration, on observations scaled as they were when the team acted on them.
    np.testing.assert_allclose(metrics["ratio"], np.ones(5), atol=1e-5)
    steps = [leaf for leaf in jax.tree.leaves(state.optimizer_state) if leaf.dtype == jnp.int32]
    assert steps and all(step == config.optimizer_steps == 5 for step in steps)
    assert replace(config, num_epochs=3, num_minibatches=2).optimizer_steps == 5 * 3 * 2
    assert state.normalizer.mean.observation.shape == (2,)
    assert state.normalizer.mean.critic_observation.shape == (4,)
    # the second feature is the share of time left: 1.0, 0.9, .., 0.1 in every episode
    np.testing.assert_allclose(state.normalizer.mean.observation[1], 0.55, rtol=1e-5)
    np.testing.assert_allclose(state.normalizer.variance.observation[1], np.var(np.arange(1, 11) / 10), rtol=1e-4)


@pytest.mark.parametrize(
    ("num_envs", "cost_limit", "multiplier"),
    [(16, 0.1, [0.11, 0.17, 0.23]), (4, 0.9, [0.03, 0.01, 0.0])],  # moves by 0.1 (0.7 - cost_limit), but not below 0
)
def test_multiplier_follows_the_mean_cost_however_many_environments_there_are(num_envs, cost_limit, multiplier):
    config = Config(num_steps=8, num_envs=num_envs, total_timesteps=3 * 8 * num_envs, num_minibatches=2, hidden=8)
    config = replace(config, cost_limit=cost_limit, lagrange_init=0.05)
    _, metrics = run(config, Dear("constant"))
    np.testing.assert_allclose(metrics["cost"], 0.7, rtol=1e-5)
    np.testing.assert_allclose(metrics["lagrange_multiplier"], multiplier, atol=1e-6)


def test_seed_decides_and_no_key_is_used_twice():
    env = Rendezvous()
    config = Config(total_timesteps=128, num_envs=4, num_steps=8, num_minibatches=2, hidden=8)
    with jax.debug_key_reuse(True):  # raises when the program is built
        start = ppo_ctde.init_state(config, env, jax.random.key(3))
        train = ppo_ctde.train.lower(config, env, start, jax.random.key(0)).compile()
        ppo_ctde.evaluate.lower(config, env, start, jax.random.key(0), 2)
    first, again, other = (train(start, jax.random.key(seed))[0] for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert (np.asarray(other.actor.head.weight) != np.asarray(first.actor.head.weight)).any()


def test_warm_start_across_grid_and_team_size(tmp_path):
    small, large = Coverage(grid=6, n_agents=2, horizon=8), Coverage(grid=9, n_agents=4, horizon=8)
    saved = ppo_ctde.init_state(SMALL, small, jax.random.key(8))
    saved = saved._replace(normalizer=update_normalizer(saved.normalizer, saved.observation))
    recorder = ppo_ctde.Recorder(SMALL, small, ppo_ctde.Run(run_dir=str(tmp_path)), {})
    recorder.save(0, jax.tree.map(lambda x: x[None], saved))  # of one seed
    loaded = ppo_ctde.init_state_from_checkpoint(SMALL, large, jax.random.key(9), tmp_path)
    assert saved.normalizer.count > 0 and loaded.normalizer.count == 0  # own statistics replace those of another task
    taken_over = [(x.actor, x.critic, x.normalizer.mean, x.normalizer.variance) for x in (loaded, saved)]
    jax.tree.map(np.testing.assert_array_equal, *taken_over)
    assert all(not leaf.any() for leaf in jax.tree.leaves(loaded.optimizer_state))
    with pytest.raises(ValueError, match=r"--normalize must be True as in .*, got False"):
        ppo_ctde.init_state_from_checkpoint(replace(SMALL, normalize=False), large, jax.random.key(9), tmp_path)
    assert loaded.lagrange_multiplier == SMALL.lagrange_init and loaded.env_state.owner.shape == (4, 9, 9)
