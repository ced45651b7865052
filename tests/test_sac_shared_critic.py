"""sac_shared_critic.py: values on problems with known answers, and each part against a slow or closed form."""

from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import side_by_side
from probes import PROBES, Probe

import sac_shared_critic as sac
from envs import AgentObservation, Rendezvous, Spread, normalize
from sac_shared_critic import Config

SMALL = Config(
    total_timesteps=64,
    num_envs=4,
    num_steps=8,
    learning_starts=18,  # rounded up to 20, whole steps
    buffer_size=50,
    batch_size=6,
    hidden=8,
    lr=0.01,
    alpha_init=0.3,
)
ENV = Spread(n_agents=3, max_steps=5)
ACTOR_STEP = jax.jit(partial(sac.actor_step, SMALL))
UPDATE_CRITICS = jax.jit(partial(sac.update_critics, SMALL))
UPDATE_ACTORS = jax.jit(partial(sac.update_actors, SMALL))
SAMPLE = jax.jit(sac.squashed_sample)


def key(i=0):
    return jax.random.key(i)


def tree_equal(one, two):
    return all(np.array_equal(*pair) for pair in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


def run(config, env, seed=0):
    init_key, train_key = jax.random.split(key(seed))
    return sac.train(config, env, sac.init_state(config, env, init_key), train_key)


@pytest.fixture(scope="module")
def state():
    return sac.init_state(SMALL, ENV, key())


@pytest.fixture(scope="module")
def batch(state):
    return sac.sample(state.buffer, key(1), SMALL.batch_size)


@pytest.fixture(scope="module")
def trained():
    """With room in the buffer for every row."""
    return run(replace(SMALL, buffer_size=84), ENV)[0]


# --- learning ------------------------------------------------------------------------------------
PROBING = Config(
    total_timesteps=8_000,
    num_envs=8,
    num_steps=1000,
    learning_starts=200,
    buffer_size=4_000,
    batch_size=32,
    hidden=16,
    lr=5e-3,
    gamma=0.5,
    tau=0.05,
)


@pytest.fixture(scope="module")
def probed():
    """kind -> the state at the end of training"""
    kinds = [kind for kind, *_ in PROBES]
    train = lambda kind: run(PROBING, Probe(kind, continuous_actions=True))[0]
    return dict(zip(kinds, side_by_side(train, kinds), strict=True))


@pytest.mark.parametrize(("kind", "seen", "value"), PROBES)
def test_probe_values(probed, kind, seen, value):
    state = probed[kind]
    observation = AgentObservation(jnp.array(seen, float))
    shown = sac.perceive(PROBING, state, observation)
    for agent in range(2):
        team = jax.tree.map(lambda x, agent=agent: x[agent], state.team)
        mean, _ = jax.vmap(team.actor)(shown.observation)
        action = jnp.tanh(mean)
        learned = sac.smaller_value(team.critics.critic, shown.critic_input, action)
        np.testing.assert_allclose(learned, value, atol=0.1)
        if kind in ("action", "both"):
            assert (jnp.abs(action[:, 0] - np.array([1] if kind == "action" else [-1, 1])) < 0.1).all()


def test_shared_critic_learns_rendezvous():
    """Two agents that see only themselves meet in the middle; random ones end 0.7 apart."""
    config = Config(
        total_timesteps=16_000,
        num_envs=16,
        num_steps=500,
        learning_starts=1_000,
        buffer_size=20_000,
        batch_size=64,
        hidden=32,
        lr=3e-3,
        gamma=0.9,
        tau=0.02,
    )
    env = Rendezvous(continuous_actions=True, speed=0.25)
    start, train_key = sac.init_state(config, env, key()), key(1)
    state, metrics = sac.train(config, env, start, train_key)
    before, after = (sac.evaluate(config, env, each, key(2), 200)[0]["distance"].mean() for each in (start, state))
    assert before > 0.5
    assert after < 0.1
    assert np.isfinite(metrics["critic_loss"]).all()


# --- pooling and syncing --------------------------------------------------------------------------
@pytest.mark.parametrize(("rows", "agents"), [(4, 3), (3, 3)])
def test_pool_keeps_the_parts_of_a_row_together(rows, agents):
    """Every number says which environment and agent it belongs to, and which part it is."""
    code = 100 * np.arange(rows)[:, None] + 10 * np.arange(agents)  # [B, N]

    def coded(part, size=None):
        number = code + 0.1 * part
        return number if size is None else np.repeat(number[..., None], size, -1)

    transition = sac.Transition(
        observation=AgentObservation(coded(1, 2), coded(2, 5)),
        action=coded(3, 4),
        reward=coded(4),
        terminated=coded(5),
        truncated=coded(6),
        next_observation=AgentObservation(coded(7, 2), coded(8, 5)),
    )
    pooled = sac.pool(transition)
    for part, leaf in enumerate(jax.tree.leaves(pooled), 1):
        assert len(leaf) == rows * agents
        np.testing.assert_allclose(leaf.reshape(rows * agents, -1)[:, 0], code.reshape(-1) + 0.1 * part)
    assert (pooled.action == pooled.action[:, :1]).all()


def test_stored_flags_are_those_of_the_team(state):
    row = jax.tree.map(lambda x: x[: state.buffer.size], state.buffer.row)
    assert row.truncated.shape == (20, 3) and not row.terminated.any()
    np.testing.assert_array_equal(row.truncated[:, 0], np.repeat(np.arange(5) == 4, 4))  # episodes of 5 steps
    np.testing.assert_array_equal(row.truncated, row.truncated[:, :1].repeat(3, 1))


def test_stored_next_observation_is_the_true_outcome(state):
    row = jax.tree.map(lambda x: x[:20].reshape(5, 4, *x.shape[1:]), state.buffer.row)  # [T, E, N, ...]
    np.testing.assert_array_equal(row.next_observation.observation[:-1], row.observation.observation[1:])
    moved = row.next_observation.observation[-1] - row.observation.observation[-1]
    assert np.abs(moved[..., 2:4]).max() < 0.25  # not a reset: nobody jumps
    assert np.abs(state.observation.observation - row.next_observation.observation[-1]).max() > 0.5


def test_team_starts_with_equal_critics_different_twins_and_copied_targets():
    for share in (True, False):
        config = replace(SMALL, share_critic=share)
        observation, _ = jax.vmap(ENV.reset)(jax.random.split(key(), 4))
        team = jax.jit(partial(sac.init_team, config, ENV))(observation, key())
        assert tree_equal(team.critics.critic, team.critics.target_critic)
        weight = np.asarray(team.critics.critic.network.layers[0].weight)  # [N, 2, hidden, C + A]
        assert (weight[:, 0] != weight[:, 1]).mean() > 0.9
        assert (weight[0] == weight[1]).all() == share
        actor = np.asarray(team.actor.network.layers[0].weight)
        assert (actor[0] != actor[1]).mean() > 0.9
        np.testing.assert_allclose(jnp.exp(team.log_alpha), np.full(3, 0.3), rtol=1e-6)


def test_updates_leave_all_critics_bit_equal_and_the_actors_different(trained):
    state = trained
    for leaf in jax.tree.leaves(state.team.critics):
        for agent in (1, 2):
            np.testing.assert_array_equal(leaf[0], leaf[agent])
    for leaf in jax.tree.leaves(state.team.actor):
        assert (np.asarray(leaf[0]) != np.asarray(leaf[1])).any()
    assert len(set(np.asarray(state.team.log_alpha).tolist())) == 3
    start = sac.init_state(SMALL, ENV, jax.random.split(key())[0])
    assert not tree_equal(start.team.critics.critic, state.team.critics.critic)


def test_independent_critics_learn_on_their_own_rows(state, batch):
    config = replace(SMALL, share_critic=False)
    team, _ = jax.jit(partial(sac.update_critics, config))(state.team, key(4), batch)
    for leaf, old in zip(jax.tree.leaves(team.critics.critic), jax.tree.leaves(state.team.critics.critic), strict=True):
        assert all((np.asarray(leaf[i]) != np.asarray(old[i])).any() for i in range(3))
        assert (np.asarray(leaf[0]) != np.asarray(leaf[1])).any()


def test_pooled_update_is_that_of_a_single_agent_on_the_concatenated_rows(state, batch):
    """The next actions are given, so that the only difference is who the rows come from."""
    next_action = jax.random.uniform(key(2), batch.action.shape, minval=-1.0)
    critic_batch = sac.CriticBatch(batch, next_action, jax.random.normal(key(3), batch.reward.shape))
    critic_batch = jax.tree.map(lambda x: x[:2], critic_batch)
    first = jax.tree.map(lambda x: x[0], state.team.critics)
    pooled, _ = jax.jit(partial(sac.critic_step, SMALL))(first, sac.pool(critic_batch))

    rows = jax.tree.map(lambda x: jnp.concatenate([x[0], x[1]]), critic_batch)
    observation, following = rows.transition.observation.critic_input, rows.transition.next_observation.critic_input

    def loss(critic):  # one agent, row by row
        total = 0.0
        for b in range(len(observation)):
            target = jnp.minimum(
                *(
                    jax.tree.map(lambda x, twin=twin: x[twin], first.target_critic)(following[b], rows.next_action[b])
                    for twin in (0, 1)
                )
            )
            target = rows.transition.reward[b] + SMALL.gamma * (target + rows.entropy_bonus[b])
            for twin in (0, 1):
                value = jax.tree.map(lambda x, twin=twin: x[twin], critic)(observation[b], rows.transition.action[b])
                total += (value - jax.lax.stop_gradient(target)) ** 2 / len(observation)
        return total

    update, _ = sac.make_optimizer(SMALL).update(jax.jit(jax.grad(loss))(first.critic), first.optimizer_state)
    expected = optax.apply_updates(first.critic, update)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), pooled.critic, expected)


def test_pooled_update_uses_the_rows_of_every_agent(state, batch):
    team, _ = UPDATE_CRITICS(state.team, key(4), batch)
    for agent in range(3):
        other = batch._replace(reward=batch.reward.at[:, agent].add(1.0))
        changed, _ = UPDATE_CRITICS(state.team, key(4), other)
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), team.critics.critic, changed.critics.critic)
        assert max(jax.tree.leaves(moved)) > 1e-5
    for leaf, old in zip(jax.tree.leaves(team.critics), jax.tree.leaves(state.team.critics), strict=True):
        np.testing.assert_array_equal(leaf[1:], old[1:])  # the others wait for sync


def test_next_actions_and_their_entropy_are_those_of_each_agents_own_actor(state, batch):
    team = state.team._replace(log_alpha=jnp.log(jnp.array([0.1, 0.5, 2.0])))
    _, metrics = UPDATE_CRITICS(team, key(4), batch)
    noise, next_action, bonus = jax.random.normal(key(4), batch.action.shape), [], []
    for i in range(3):
        agent = jax.tree.map(lambda x, i=i: x[i], team)
        action, log_prob = SAMPLE(agent.actor, batch.next_observation.observation[:, i], noise[:, i])
        next_action.append(action), bonus.append(-[0.1, 0.5, 2.0][i] * log_prob)
    rows = sac.pool(sac.CriticBatch(batch, jnp.stack(next_action, 1), jnp.stack(bonus, 1)))
    first = jax.tree.map(lambda x: x[0], team.critics)
    loss, value = jax.jit(sac.critic_loss, static_argnums=1)(first.critic, SMALL, first.target_critic, rows)
    np.testing.assert_allclose([metrics["critic_loss"], metrics["value"]], [loss, value], rtol=1e-5)


def test_every_actor_steps_on_its_own_rows(state, batch):
    team, metrics = UPDATE_ACTORS(state.team, key(4), batch)
    noise = jax.random.normal(key(4), batch.action.shape)
    for i in range(3):
        agent, observation = (
            jax.tree.map(lambda x, i=i: x[i], state.team),
            AgentObservation(batch.observation.observation[:, i], batch.observation.critic_input[:, i]),
        )
        alone, expected = ACTOR_STEP(agent, observation, noise[:, i])
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), {n: m[i] for n, m in metrics.items()}, expected
        )
        stepped = jax.tree.map(lambda x, i=i: x[i], (team.actor, team.log_alpha))
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), stepped, (alone.actor, alone.log_alpha))


def test_sync_copies_the_first_agents_critics_and_nothing_else(state):
    number = jax.tree.map(lambda x: x + jnp.arange(3).reshape(3, *[1] * (x.ndim - 1)).astype(x.dtype), state.team)
    synced = sac.sync(number)
    for leaf, old in zip(jax.tree.leaves(synced.critics), jax.tree.leaves(number.critics), strict=True):
        np.testing.assert_array_equal(leaf, np.broadcast_to(old[:1], old.shape))
    assert tree_equal(synced._replace(critics=None), number._replace(critics=None))


# --- the parts -----------------------------------------------------------------------------------
def test_smaller_value_has_the_gradient_of_one_twin_even_at_a_tie():
    """That of `min` is an average over the values that equal the result, or NaN where rounding leaves none."""

    class Slope(eqx.Module):
        slope: jax.Array

        def __call__(self, x, action):
            return self.slope * action[..., 0]

    smaller = partial(sac.smaller_value, Slope(jnp.array([1.0, -1.0])), jnp.zeros(1))
    for action, value, slopes in ((0.5, -0.5, [-1]), (-0.5, -0.5, [1]), (0.0, 0.0, [-1, 1])):
        result, gradient = jax.value_and_grad(smaller)(jnp.array([action]))
        assert result == value and gradient[0] in slopes


@pytest.mark.parametrize(("output", "log_std"), [(-100.0, -5.0), (0.0, -1.5), (100.0, 2.0)])
def test_standard_deviations_stay_between_e_to_the_minus_5_and_e_squared(state, output, log_std):
    actor = jax.tree.map(lambda x: x[0], state.team.actor)
    last = jax.tree.map(jnp.zeros_like, actor.network.layers[-1])
    last = eqx.tree_at(lambda last: last.bias, last, jnp.array([0.5, -3.0, output, output]))
    actor = eqx.tree_at(lambda actor: actor.network.layers[-1], actor, last)
    np.testing.assert_allclose(actor(jnp.zeros((7, 18))), np.broadcast_to([[[0.5, -3.0]], [[log_std] * 2]], (2, 7, 2)))


def test_squashed_log_density_at_known_points():
    zero = jnp.zeros(1)
    for u, expected in ((0.0, -0.918939), (10.0, -32.30523), (-10.0, -32.30523), (20.0, -162.30523)):
        np.testing.assert_allclose(sac.squashed_log_prob(jnp.array([u]), zero, zero), expected, rtol=1e-6)
    far = jnp.array([50.0, -50.0])
    value, gradient = jax.value_and_grad(sac.squashed_log_prob)(far, jnp.zeros(2), jnp.zeros(2))
    np.testing.assert_allclose(value, 2 * (-1250 - 0.918939 - 2 * (np.log(2) - 50)), rtol=1e-6)
    np.testing.assert_allclose(gradient, [-48.0, 48.0], rtol=1e-5)


def test_squashed_density_integrates_to_one_over_the_actions():
    mean, log_std = jnp.array([0.3]), jnp.array([-0.5])
    action = np.linspace(-1, 1, 200_001)[1:-1]
    log_prob = jax.vmap(lambda u: sac.squashed_log_prob(u[None], mean, log_std))(jnp.arctanh(jnp.asarray(action)))
    np.testing.assert_allclose(np.trapezoid(np.exp(np.asarray(log_prob, np.float64)), action), 1.0, atol=1e-3)


def test_sampled_actions_have_the_density_that_is_claimed(state):
    """Change of variables from a normal, in double precision."""
    actor = jax.tree.map(lambda x: x[0], state.team.actor)
    observation = jnp.linspace(-1, 1, 18)
    mean, log_std = (np.asarray(x, np.float64) for x in actor(observation))
    noise = jnp.linspace(-2, 2, 10).reshape(5, 2)
    action, log_prob = jax.vmap(partial(sac.squashed_sample, actor, observation))(noise)
    np.testing.assert_allclose(action, np.tanh(mean + np.exp(log_std) * noise), atol=1e-6)
    log_normal = -0.5 * np.square(noise) - log_std - 0.5 * np.log(2 * np.pi)
    expected = log_normal - np.log(1 - np.square(np.tanh(mean + np.exp(log_std) * noise)))
    np.testing.assert_allclose(log_prob, expected.sum(-1), atol=1e-4)


def test_teams_act_by_samples_or_modes_of_each_agents_own_actor(state):
    team = jax.tree.map(lambda x: x[0], state.observation)
    seen = sac.perceive(SMALL, state, team).observation
    mean, log_std = (
        jnp.stack(x)
        for x in zip(*(jax.tree.map(lambda x, i=i: x[i], state.team.actor)(seen[i]) for i in range(3)), strict=True)
    )
    act = lambda key, deterministic: sac.select_action(SMALL, ENV, state, team, key, deterministic)
    np.testing.assert_allclose(act(key(), True), jnp.tanh(mean), atol=1e-6)
    drawn = np.arctanh(
        np.asarray(jax.vmap(partial(act, deterministic=False))(jax.random.split(key(), 5000)), np.float64)
    )
    np.testing.assert_allclose(np.median(drawn, 0), mean, atol=0.1 * np.exp(log_std).max())
    spread = np.diff(np.quantile(drawn, [0.1587, 0.8413], axis=0), axis=0)[0] / 2  # one standard deviation
    np.testing.assert_allclose(spread, np.exp(log_std), rtol=0.1)


@pytest.mark.parametrize(("log_std", "direction"), [(-20.0, 1), (0.0, -1)])
def test_temperature_rises_when_the_entropy_is_below_its_target(state, log_std, direction):
    agent = jax.tree.map(lambda x: x[0], state.team)
    last = jax.tree.map(jnp.zeros_like, agent.actor.network.layers[-1])
    last = eqx.tree_at(lambda last: last.bias, last, last.bias.at[2:].set(log_std))
    agent = agent._replace(actor=eqx.tree_at(lambda actor: actor.network.layers[-1], agent.actor, last))
    observation = AgentObservation(jnp.zeros((5, 18)), jnp.zeros((5, 54)))
    after, metrics = ACTOR_STEP(agent, observation, jax.random.normal(key(), (5, 2)))
    assert (metrics["entropy"] < -2) == (direction == 1)
    assert np.sign(after.log_alpha - agent.log_alpha) == direction


def test_target_is_the_smaller_twin_plus_entropy_and_only_termination_cuts_it(state, batch):
    first = jax.tree.map(lambda x: x[0], state.team.critics)
    rows = sac.pool(sac.CriticBatch(batch, batch.action, 0.7 + 0 * batch.reward))
    next_input = rows.transition.next_observation.critic_input
    bias = lambda critic: critic.network.layers[-1].bias
    values = lambda critic: jax.vmap(lambda twin: jax.vmap(twin)(next_input, rows.next_action))(critic)
    centered = bias(first.target_critic) - values(first.target_critic).mean(1).reshape(bias(first.target_critic).shape)
    target_critic = eqx.tree_at(bias, first.target_critic, centered)
    twins = values(target_critic)
    assert (twins[0] < twins[1]).any() and (twins[0] > twins[1]).any()
    zero = jax.tree.map(jnp.zeros_like, first.critic)  # then the loss is twice the mean squared target
    for flag in (0, 1):
        transition = rows.transition._replace(terminated=jnp.full(len(next_input), flag, bool))
        transition = transition._replace(truncated=jnp.ones(len(next_input), bool))
        loss, _ = sac.critic_loss(zero, SMALL, target_critic, rows._replace(transition=transition))
        target = transition.reward + SMALL.gamma * (1 - flag) * (np.minimum(*twins) + 0.7)
        np.testing.assert_allclose(loss, 2 * np.square(target).mean(), rtol=1e-5)


def test_targets_follow_by_tau(state, batch):
    team, _ = UPDATE_CRITICS(state.team, key(5), batch)
    old, new = (jax.tree.map(lambda x: x[0], each.critics) for each in (state.team, team))
    expected = jax.tree.map(lambda t, c: (1 - SMALL.tau) * t + SMALL.tau * c, old.target_critic, new.critic)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), new.target_critic, expected)


def test_actor_climbs_its_critic_and_pays_for_its_certainty(state, batch):
    agent = jax.tree.map(lambda x: x[0], state.team)._replace(log_alpha=jnp.log(0.3))
    observation = jax.tree.map(lambda x: x[:, 0], batch.observation)
    noise = jax.random.normal(key(6), (SMALL.batch_size, 2))
    gradient = jax.jit(jax.grad(sac.actor_loss, has_aux=True))
    (_, slope), metrics = gradient((agent.actor, agent.log_alpha), agent.critics.critic, observation, noise)
    expected = 0.0
    for b in range(SMALL.batch_size):
        action, log_prob = sac.squashed_sample(agent.actor, observation.observation[b], noise[b])
        twin = [jax.tree.map(lambda x, i=i: x[i], agent.critics.critic) for i in (0, 1)]
        value = min(each(observation.critic_input[b], action) for each in twin)
        expected += (0.3 * log_prob - value) / SMALL.batch_size
    np.testing.assert_allclose(metrics["actor_loss"], expected, rtol=1e-4)
    target_entropy = -2
    np.testing.assert_allclose(slope, 0.3 * (metrics["entropy"] - target_entropy), rtol=1e-4)  # of log_alpha


def test_a_gradient_step_learns_from_normalized_rows_of_the_buffer(state):
    after, _ = jax.jit(partial(sac.collect_and_learn, SMALL, ENV))(state, key(7))
    *_, sample_key, update_key = jax.random.split(key(7), 4)
    batch = sac.sample(after.buffer, sample_key, SMALL.batch_size)
    seen, seen_next = (normalize(after.normalizer, each) for each in (batch.observation, batch.next_observation))
    batch = batch._replace(observation=seen, next_observation=seen_next)
    team, _ = jax.jit(partial(sac.update_team, SMALL))(state.team, update_key, batch)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), after.team, team)


# --- replay buffer --------------------------------------------------------------------------------
@pytest.mark.parametrize(("capacity", "insert"), [(10, 4), (7, 3), (8, 4), (5, 5), (4, 1)])
def test_buffer_keeps_the_last_rows_whole(capacity, insert):
    """Every leaf of a row holds the number of the row, from 1 on."""

    def rows(start, count):
        number = 1 + jnp.arange(start, start + count, dtype=float)
        coded = lambda *shape: jnp.broadcast_to(number.reshape(-1, *[1] * len(shape)), (count, *shape))
        observation = AgentObservation(coded(2, 3), coded(2, 5))
        return sac.Transition(observation, coded(2, 1), coded(2), coded(2), coded(2), observation)

    buffer = sac.init_buffer(rows(0, insert), capacity)
    add = jax.jit(sac.add)
    for i in range(6):
        buffer = add(buffer, rows(insert * i, insert))
        written = min(insert * (i + 1), capacity)
        assert buffer.size == written
        stored = sorted(np.asarray(buffer.row.reward[:written, 0]).astype(int).tolist())
        assert stored == list(range(insert * (i + 1) - written + 1, insert * (i + 1) + 1))
        drawn = sac.sample(buffer, key(i), 500)
        seen = set(np.asarray(drawn.reward[:, 0]).astype(int).tolist())
        assert seen == set(stored)  # only written rows, and all of them
        for leaf in jax.tree.leaves(drawn):
            np.testing.assert_array_equal(leaf.reshape(500, -1), np.tile(drawn.reward[:, :1], leaf[0].size))


def test_buffer_is_all_that_grows_with_its_size():
    configs = (replace(SMALL, buffer_size=size) for size in (50, 90))
    small, large = (jax.eval_shape(partial(sac.init_state, config, ENV), key()) for config in configs)
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert size(small._replace(buffer=None)) == size(large._replace(buffer=None))
    assert size(large.buffer.row) * 50 == size(small.buffer.row) * 90


@pytest.mark.parametrize("num_envs", [1, 4])
def test_training_writes_into_the_buffer_instead_of_copying_it(num_envs):
    config = replace(SMALL, num_envs=num_envs, buffer_size=10_000)
    state = jax.eval_shape(partial(sac.init_state, config, ENV), key())
    memory = sac.train.lower(config, ENV, state, key()).compile().memory_analysis()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.buffer))
    assert memory.temp_size_in_bytes < 0.05 * size


# --- runs -----------------------------------------------------------------------------------------
def test_statistics_of_the_two_observations_are_those_of_all_rows(trained):
    state, row = trained, trained.buffer.row
    assert state.normalizer.count == (20 + 64) * 3
    steps = [leaf for leaf in jax.tree.leaves(state.team) if leaf.dtype == jnp.int32]  # of the optimizers
    assert steps and all((step == SMALL.optimizer_steps).all() for step in steps)
    for name in ("observation", "critic_observation"):
        rows = np.asarray(getattr(row.observation, name)).reshape(84 * 3, -1)
        np.testing.assert_allclose(getattr(state.normalizer.mean, name), rows.mean(0), atol=1e-4)
        np.testing.assert_allclose(getattr(state.normalizer.variance, name), rows.var(0), atol=1e-4)


def test_finished_episodes_are_reported_and_none_is_nan(state):
    step = jax.jit(partial(sac.train_step, replace(SMALL, num_steps=3), ENV))
    state, finished = step(state, key(1))
    assert np.isnan(finished["episode_return"]) and finished["episodes"] == 0
    state, finished = step(state, key(2))
    reward = state.buffer.row.reward[20:40].reshape(5, 4, 3)  # behind the random rows, five steps in 4 environments
    np.testing.assert_allclose(finished["episode_return"], reward.sum(0).mean(), rtol=1e-5)
    assert finished["episodes"] == 4


def test_no_key_is_used_twice(state):
    with jax.debug_key_reuse(True):  # raises when the program is built
        sac.init_state.lower(SMALL, ENV, key())
        sac.train.lower(SMALL, ENV, state, key())
        sac.evaluate.lower(SMALL, ENV, state, key(), 2)


def test_critic_may_see_what_the_actor_sees():
    env = replace(ENV, critic_observation=False)
    start = jax.eval_shape(partial(sac.init_state, SMALL, env), key())
    state, _ = jax.eval_shape(partial(sac.train, SMALL, env), start, key())
    assert state.team.critics.critic.network.layers[0].weight.shape == (3, 2, 8, 18 + 2)
    assert state.normalizer.mean.critic_observation is None


def test_agents_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="--continuous-actions must be on"):
        sac.init_state(SMALL, replace(ENV, continuous_actions=False), key())

    class Mixed(Spread):
        def reset(self, key):
            observation, env_state = super().reset(key)
            return AgentObservation((observation.observation[:1], observation.observation[1:, :4])), env_state

    with pytest.raises(ValueError, match="homogeneous agents"):
        sac.init_state(SMALL, Mixed(), key())


def test_warm_start_takes_over_the_networks_but_not_the_optimizers(trained, tmp_path):
    config = replace(SMALL, buffer_size=84)
    recorder = sac.Recorder(config, ENV, sac.Run(run_dir=str(tmp_path)), {})
    recorder.save(0, jax.tree.map(lambda x: x[None], trained))
    loaded = sac.init_state_from_checkpoint(config, ENV, key(9), tmp_path)
    assert tree_equal(sac.networks(loaded), sac.networks(trained))
    for team, fresh in ((trained.team, False), (loaded.team, True)):
        leaves = jax.tree.leaves((team.optimizer_state, team.critics.optimizer_state))
        assert all(leaf.any() != fresh for leaf in leaves)
