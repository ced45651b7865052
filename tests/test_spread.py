"""Spread against golden trajectories of the reference package (mpe2 1.1.1, simple_spread_v3)."""

from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs import Spread, SpreadState, step_autoreset

GOLDEN = np.load(Path(__file__).parent / "data" / "mpe_golden.npz")
KEY = jax.random.key(0)


def from_five_entries(action):
    """The reference's (none, -x, +x, -y, +y), each clipped to [0, 1], as a push along x and y."""
    entry = np.clip(action, 0, 1)
    return np.stack([entry[..., 2] - entry[..., 1], entry[..., 4] - entry[..., 3]], -1)


def replay(env, state, actions):
    """-> (TimeStep, SpreadState) [T, ...]"""

    def step(state, action):
        time_step, state = env.step(KEY, state, action)
        return state, (time_step, state)

    return jax.lax.scan(step, state, actions)[1]


@pytest.mark.parametrize(("n", "kind"), list(product((3, 5), ("cont", "disc"))))
def test_golden_trajectories(n, kind):
    golden = {name.removeprefix(f"n{n}_{kind}_"): GOLDEN[name] for name in GOLDEN.files}
    action = golden["actions"] if kind == "disc" else from_five_entries(golden["actions"])
    action = jnp.asarray(action, jnp.int32 if kind == "disc" else jnp.float32)
    position, velocity, landmark = (jnp.asarray(golden[f"{name}"]) for name in ("init_pos", "init_vel", "landmarks"))
    start = SpreadState(position, velocity, landmark, jnp.zeros(len(position), jnp.int32))
    assert len(action) == {"cont": 10, "disc": 6}[kind]
    for i, local_ratio in enumerate(GOLDEN["local_ratios"]):
        env = Spread(n_agents=n, local_ratio=float(local_ratio), continuous_actions=kind == "cont")
        first = jax.vmap(env._observe)(start)
        time_step, state = jax.jit(jax.vmap(lambda start, action, env=env: replay(env, start, action)))(start, action)
        np.testing.assert_allclose(first.observation, golden["init_obs"], atol=1e-6)
        np.testing.assert_allclose(state.position, golden["pos"], atol=2e-4)
        np.testing.assert_allclose(state.velocity, golden["vel"], atol=1e-3)
        np.testing.assert_allclose(time_step.reward, golden["rewards"][:, i], atol=2e-4)
        np.testing.assert_allclose(time_step.observation.observation, golden["obs"], atol=1e-3)
        for flag, name in ((time_step.terminated, "terminations"), (time_step.truncated, "truncations")):
            np.testing.assert_array_equal(np.repeat(flag[..., None], n, -1), golden[name])
        collisions = -golden["rewards"][:, 2]  # at local_ratio 1
        np.testing.assert_allclose(time_step.info["collisions"], collisions.mean(-1), atol=1e-6)


def test_pushes_are_clipped():
    env = Spread()
    _, state = env.reset(KEY)
    far, one = (env.step(KEY, state, jnp.full((3, 2), size))[1] for size in (-7.0, -1.0))
    np.testing.assert_array_equal(far.velocity, one.velocity)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_joint_observation_starts_with_its_own_agent(n):
    env = Spread(n_agents=n)
    observation, _ = env.reset(KEY)
    assert observation.observation.shape == (n, 6 * n)
    for i in range(n):
        order = [i, *(k for k in range(n) if k != i)]
        np.testing.assert_array_equal(observation.critic_input[i], observation.observation[np.array(order)].reshape(-1))
    alone, _ = Spread(n_agents=n, critic_observation=False).reset(KEY)
    np.testing.assert_array_equal(alone.critic_input, observation.observation)


def test_agents_on_one_point_and_on_a_landmark_stay_finite_with_finite_gradients():
    env = Spread(n_agents=2)

    def outcome(position, action):
        state = SpreadState(position, jnp.zeros((2, 2)), jnp.zeros((2, 2)), jnp.zeros((), jnp.int32))
        time_step, state = replay(env, state, action)
        return time_step.reward.sum() + time_step.observation.critic_input.sum() + state.velocity.sum()

    value, gradient = jax.value_and_grad(outcome, (0, 1))(jnp.zeros((2, 2)), jnp.zeros((6, 2, 2)))
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in gradient)
    assert np.abs(gradient[1][0]).sum() > 0


def test_gradient_of_the_return_is_that_of_finite_differences():
    env = Spread()
    _, state = env.reset(jax.random.key(1))
    action = 0.5 * jax.random.normal(KEY, (5, 3, 2))
    episode_return = jax.jit(lambda action: replay(env, state, action)[0].reward.sum())
    gradient = jax.grad(episode_return)(action)
    for place in [(0, 0, 0), (1, 2, 1), (3, 1, 0)]:
        step = jnp.zeros_like(action).at[place].set(0.01)
        slope = (episode_return(action + step) - episode_return(action - step)) / 0.02
        np.testing.assert_allclose(gradient[place], slope, rtol=0.02, atol=2e-3)
    assert gradient[4].any() == 0  # a push moves an agent from the next step on


def test_starts_are_uniform_and_at_rest_and_the_clock_starts_again():
    env = Spread(n_agents=2, max_steps=2)
    _, state = jax.vmap(env.reset)(jax.random.split(KEY, 2000))
    for place in (state.position, state.landmark):
        np.testing.assert_allclose(np.quantile(place, [0, 0.25, 0.5, 1], axis=0)[:, 0, 0], [-1, -0.5, 0, 1], atol=0.08)
    assert not state.velocity.any()
    assert np.abs(np.corrcoef(state.position.reshape(2000, 4).T) - np.eye(4)).max() < 0.1
    one = jax.tree.map(lambda x: x[0], state)
    for done in (False, True):
        time_step, one, observation = step_autoreset(env, KEY, one, jnp.ones((2, 2)))
        assert (bool(time_step.truncated), bool(time_step.terminated), int(one.time)) == (done, False, 1 - done)
    assert np.abs(time_step.observation.observation - observation.observation).max() > 0.1


def test_figures_count_contacts_over_the_episode_and_covered_landmarks_at_its_end():
    env = Spread(n_agents=3, max_steps=4)
    position = jnp.array([[0.0, 0.0], [0.29, 0.0], [0.9, 0.9]])
    landmark = jnp.array([[0.0, 0.09], [0.9, 0.79], [-1.0, -1.0]])
    time_step, _ = env.step(KEY, SpreadState(position, jnp.zeros((3, 2)), landmark, jnp.int32(0)), jnp.zeros((3, 2)))
    np.testing.assert_allclose(time_step.info["collisions"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(time_step.info["covered"], 1 / 3, rtol=1e-6)  # the second is 0.11 away
    figures = env.episode_summary(time_step.info, time_step.info)
    np.testing.assert_allclose([figures["collisions"], figures["covered"]], [8 / 3, 100 / 3], rtol=1e-6)


def test_text_map_shows_tracks_landmarks_and_agents():
    track = np.array([[[-1.0, -1.0], [1.0, 1.0]], [[-1.0, -0.9], [1.0, 1.0]]])  # [T, N, 2]
    trajectory = SpreadState(track, track, np.broadcast_to([[0.0, 0.0], [5.0, 0.0]], track.shape), np.arange(2))
    line = Spread(n_agents=2).text_map(trajectory).split("\n")
    assert len(line) == 25
    shown = {(row, column): cell for row, text in enumerate(line) for column, cell in enumerate(text) if cell != " "}
    assert shown == {(22, 4): ".", (21, 4): "0", (2, 44): "1", (12, 24): "x", (12, 48): "x"}
