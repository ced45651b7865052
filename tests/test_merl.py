"""MERL: each part against a slow NumPy computation or a value by hand, the whole by its invariants."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DEFAULT, side_by_side

import es
import merl
from envs import MOVES, AgentObservation, Coverage, CoverageState

# Short range: robots lose each other, so that the skills differ and the constraint costs.
ENV = Coverage(grid=6, n_agents=3, horizon=8, comm_r=2, view_r=1)
CONFIG = merl.Config(
    outer=2, grad_steps=1, rollouts=4, pop=4, sigma=0.5, num_epochs=1, num_minibatches=1, hidden=8, congestion="on"
)
# A task that a run of seconds solves: two robots that cannot lose each other.
EASY = Coverage(grid=5, n_agents=2, horizon=20)
LEARNING = merl.Config(
    outer=12, grad_steps=3, rollouts=16, pop=4, num_minibatches=4, hidden=32, lr=3e-3, lagrange_lr=2.0
)

QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time
quick_jit = partial(jax.jit, compiler_options=QUICK)


def key(seed: int = 0):
    return jax.random.key(seed)


def to_numpy(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64 if leaf.dtype == np.float32 else None), tree)


def assert_trees_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def changed_leaves(left, right) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(left)
    pairs = zip(leaves, jax.tree.leaves(right), strict=True)
    return {jax.tree_util.keystr(name) for (name, one), two in pairs if not np.array_equal(one, two)}


@pytest.fixture(scope="module")
def fresh():
    """A state whose policy has opinions, unlike an untrained one, and whose price has moved on."""
    state = quick_jit(partial(merl.init_state, CONFIG, ENV))(key(7))._replace(lagrange_multiplier=jnp.asarray(0.7))
    heads = lambda state: (state.policy.selector_head, state.policy.executor_head)
    return eqx.tree_at(heads, state, jax.tree.map(lambda leaf: 40 * leaf, heads(state)))


class Watched(Coverage):
    """Coverage that also tells where the robots stood before the step, and its own reward."""

    def step(self, key, state, action):
        time_step, next_state = super().step(key, state, action)
        seen = {"position": state.position, "reward": time_step.reward}
        return time_step._replace(info=time_step.info | seen), next_state


@pytest.fixture(scope="module")
def collected(fresh):
    """(Transition, final AgentObservation, info) of the episodes that a PPO step with key(6) learns from."""
    env, collect_key = Watched(**dataclasses.asdict(ENV)), jax.random.split(key(6))[0]
    return quick_jit(lambda policy: merl.collect(CONFIG, env, policy, collect_key))(fresh.policy)


@pytest.fixture(scope="module")
def rows(collected):
    """A batch of ten rows as a policy sees them that has moved on since; made-up advantages and targets."""
    rng = np.random.default_rng(0)
    transition = jax.tree.map(lambda leaf: leaf[3:].reshape(-1, *leaf.shape[2:])[:10], collected[0])
    noise = rng.normal(0, 0.4, (10, 3)).astype(np.float32)
    transition = transition._replace(choice=transition.choice._replace(log_prob=transition.choice.log_prob + noise))
    return merl.Batch(transition, *(jnp.asarray(rng.normal(1, 3, (2, 10, 3)), jnp.float32)))


@pytest.fixture(scope="module")
def loss():
    function = lambda networks, batch: merl.ppo_loss(networks, CONFIG, ENV, batch)
    return quick_jit(jax.value_and_grad(function, has_aux=True))


# --- slow references ------------------------------------------------------------------------------
def slow_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    advantage = np.zeros(reward.shape)
    for index in np.ndindex(reward.shape[1:]):
        following = 0.0
        for t in reversed(range(len(reward))):
            bootstrap = 0.0 if terminated[t][index] else gamma * next_value[t][index]
            if terminated[t][index] or truncated[t][index]:
                following = 0.0
            following = reward[t][index] + bootstrap - value[t][index] + gamma * gae_lambda * following
            advantage[t][index] = following
    return advantage


def slow_linear(layer, x):
    return np.asarray(layer.weight, np.float64) @ x + np.asarray(layer.bias, np.float64)


def slow_trunk(trunk, x):
    for layer in trunk.layers:
        x = np.tanh(slow_linear(layer, x))
    return x


def slow_value(critic, critic_input):
    """[..., C] -> [...]"""
    return np.apply_along_axis(lambda x: slow_linear(critic.head, slow_trunk(critic.trunk, x)).item(), -1, critic_input)


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def slow_joint(policy, observation, action_mask):
    """Joint probability of skill and goal in ENV, where the five goals are the moves; [O], [5] -> [3, 5]"""
    hidden = slow_trunk(policy.trunk, observation)
    nearest, weakest = (np.asarray(x) for x in ENV.teammate_offsets(jnp.asarray(observation, jnp.float32)))
    safe = nearest[2] == 1 and max(abs(nearest[:2])) < ENV.comm_r
    disperse = slow_linear(policy.executor_head, hidden)
    flock = -10 * np.abs(MOVES - weakest[:2]).sum(1) * weakest[2]
    hold = -10 * np.abs(MOVES - (0 if safe else nearest[:2])).sum(1)
    goals = [softmax(np.where(action_mask, scores, -np.inf)) for scores in (disperse, flock, hold)]
    return softmax(slow_linear(policy.selector_head, hidden))[:, None] * goals


# --- skills ---------------------------------------------------------------------------------------
def test_stencil_by_hand():
    five = [[0, 0], [-1, 0], [0, 1], [1, 0], [0, -1]]
    nine = [*five, [-1, 1], [1, 1], [1, -1], [-1, -1]]
    np.testing.assert_array_equal(merl.make_stencil(merl.Config(n_goals=5)), five)
    np.testing.assert_array_equal(merl.make_stencil(merl.Config(n_goals=9)), nine)
    np.testing.assert_array_equal(merl.make_stencil(merl.Config(n_goals=9, stride=2)), 2 * np.array(nine))


ALL_MASKS = np.array([[True, *(bool(i >> bit & 1) for bit in range(4))] for i in range(16)])  # staying is allowed


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("n_goals", [5, 9])
def test_goals_are_allowed_and_approached_by_allowed_moves_only(n_goals, stride):
    stencil = merl.make_stencil(merl.Config(n_goals=n_goals, stride=stride))
    _, north, east, south, west = ALL_MASKS.T
    diagonals = np.stack([north | east, south | east, south | west, north | west], 1)
    allowed = jax.vmap(partial(merl.goal_mask, stencil))(ALL_MASKS)
    np.testing.assert_array_equal(allowed, np.concatenate([ALL_MASKS, diagonals], 1)[:, :n_goals])

    controller = jax.vmap(jax.vmap(partial(merl.controller, stencil), (0, None)), (None, 0))
    for mask, moves in zip(ALL_MASKS, controller(np.arange(n_goals), ALL_MASKS), strict=True):
        for goal, move in zip(stencil, np.asarray(moves), strict=True):
            distance = np.where(mask, np.abs(goal - MOVES).sum(1), 99)
            assert distance[move] == distance.min() < 99
        if (n_goals, stride) == (5, 1):
            np.testing.assert_array_equal(moves[mask], np.arange(5)[mask])  # the goals are the moves


@pytest.mark.parametrize(
    ("position", "heard", "flock", "hold"),
    [
        ([(5, 5), (5, 6), (2, 5)], None, (-3, 0), (0, 0)),  # the weakest link is the farther one; a neighbour is near
        ([(5, 5), (8, 5), (0, 0)], None, (3, 0), (3, 0)),  # the only link is at the limit of the range
        ([(5, 5), (5, 9), (0, 0)], None, None, (0, 4)),  # nobody in range: to where the nearest was last heard of
        ([(5, 5), (9, 9), (0, 0)], [(5, 5), (5, 7), (0, 0)], None, (0, 2)),  # even if that is near
    ],
)
def test_scripted_skills_score_goals_by_their_distance(fresh, position, heard, flock, hold):
    env, empty = Coverage(grid=12, n_agents=3, comm_r=3, view_r=1), np.zeros((12, 12), bool)
    state = CoverageState(
        position=np.array(position),
        last_move=np.zeros((3, 2), int),
        owner=empty - 1,
        wall=empty,
        belief=np.tile(empty, (3, 1, 1)),
        heard=np.tile(heard or position, (3, 1, 1)),
        heard_time=np.zeros((3, 3), int),
        time=np.array(0),
    )
    time_step, _ = quick_jit(env.step)(key(), jax.tree.map(jnp.asarray, state), jnp.zeros(3, int))
    hidden = jnp.linspace(-1, 1, 8)
    scores = merl.skill_scores(CONFIG, env, fresh.policy, hidden, time_step.observation.observation[0])
    towards = lambda goal: -10.0 * np.abs(MOVES - goal).sum(1)
    np.testing.assert_allclose(scores[0], slow_linear(fresh.policy.executor_head, np.asarray(hidden)), rtol=1e-5)
    np.testing.assert_array_equal(scores[1], towards(flock) if flock else np.zeros(5))
    np.testing.assert_array_equal(scores[2], towards(hold))


def test_draws_follow_the_reported_probabilities_and_the_mask(fresh, rows):
    observation, mask = rows.transition.observation.observation[0, 0], np.array([True, True, False, True, False])
    team = AgentObservation(jnp.tile(observation, (3, 1)), action_mask=jnp.tile(mask, (3, 1)))
    draw = quick_jit(jax.vmap(lambda key: jax.tree.map(lambda x: x[1], merl.act(CONFIG, ENV, fresh.policy, team, key))))
    action, choice = to_numpy(draw(jax.random.split(key(), 20_000)))
    joint = slow_joint(fresh.policy, np.asarray(observation), mask)
    frequency = np.zeros((3, 5))
    np.add.at(frequency, (choice.skill, choice.goal), 1 / 20_000)
    np.testing.assert_array_equal(frequency[:, ~mask], 0)
    np.testing.assert_allclose(frequency, joint, atol=0.02)
    np.testing.assert_allclose(choice.log_prob, np.log(joint[choice.skill, choice.goal]), atol=1e-4)
    np.testing.assert_array_equal(action, choice.goal)  # the goals are the moves

    skill = joint.sum(1).argmax()  # the likeliest skill, then its likeliest goal
    modes = merl.select_action(CONFIG, ENV, fresh, team, key(), deterministic=True)
    np.testing.assert_array_equal(modes, np.full(3, joint[skill].argmax()))
    sampled = merl.select_action(CONFIG, ENV, fresh, team, key(), deterministic=False)
    np.testing.assert_array_equal(sampled, merl.act(CONFIG, ENV, fresh.policy, team, key())[0])


def test_one_allowed_goal_leaves_no_entropy_and_a_finite_gradient(fresh, rows):
    observation, only_stay = rows.transition.observation.observation[0, 0], jnp.arange(5) == 0

    def entropy(policy):
        _, log_prob = merl.choice_log_probs(CONFIG, ENV, policy, observation, only_stay)
        return -(jnp.exp(log_prob) * log_prob).sum(), log_prob

    (value, log_prob), gradient = quick_jit(jax.value_and_grad(entropy, has_aux=True))(fresh.policy)
    assert value == 0 and np.isfinite(log_prob).all()
    np.testing.assert_array_equal(log_prob[:, 0], 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_congestion_charges_each_teammate_in_range_with_the_same_skill(collected, fresh):
    transition, _, info = to_numpy(collected)
    skill = transition.choice.skill
    np.testing.assert_array_equal(transition.reward, info["reward"])  # without the charge
    count = np.zeros(skill.shape, int)
    for t, e, i, j in np.ndindex(8, 4, 3, 3):
        distance = abs(info["position"][t, e, i] - info["position"][t, e, j]).max()
        count[t, e, i] += i != j and distance <= 2 and skill[t, e, i] == skill[t, e, j]
    assert set(count.ravel()) == {0, 1, 2}
    np.testing.assert_allclose(transition.charge, 0.01 * count, atol=1e-6)
    config = dataclasses.replace(CONFIG, congestion="off")
    transition, _, _ = quick_jit(lambda policy: merl.collect(config, ENV, policy, key(6)))(fresh.policy)
    assert not transition.charge.any()


# --- advantages -----------------------------------------------------------------------------------
def test_gae_equals_slow_loop():
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(3, 64, 3, 2)).astype(np.float32)
    terminated, truncated = rng.random((2, 64, 3, 1)) < 0.05  # the agents end together
    assert terminated[:-1].any() and truncated[:-1].any()
    advantage, target = merl.compute_gae(reward, value, next_value, terminated, truncated, 0.97, 0.9)
    ends = (np.broadcast_to(end, reward.shape) for end in (terminated, truncated))
    expected = slow_gae(reward, value, next_value, *ends, 0.97, 0.9)
    np.testing.assert_allclose(advantage, expected, atol=1e-5)
    np.testing.assert_allclose(target, expected + value, atol=1e-5)


@pytest.mark.parametrize(
    ("reward", "value", "next_value", "terminated", "truncated", "gamma", "gae_lambda", "expected"),
    [
        ([1, 1, 1], [0, 0, 0], [0, 10, 0], [0, 0, 0], [0, 1, 0], 0.9, 0.8, [8.2, 10.0, 1.0]),  # the clock ran out
        ([1, 1, 1], [0, 0, 0], [0, 10, 0], [0, 1, 0], [0, 0, 0], 0.9, 0.8, [1.72, 1.0, 1.0]),  # nothing follows
        ([1, 2, 3], [0.5, 0.25, 0.125], [0.25, 4, 8], [0, 0, 1], [0, 1, 0], 0.99, 0.95, [6.117755, 5.71, 2.875]),
        ([1], [3], [10], [0], [1], 0.9, 0.95, [10 - 3]),  # bootstraps from the next value, not from its own
        ([7], [2], [100], [1], [0], 0.9, 0.95, [7 - 2]),
    ],
)
def test_gae_by_hand(reward, value, next_value, terminated, truncated, gamma, gae_lambda, expected):
    numbers = (np.array(x, np.float32) for x in (reward, value, next_value))
    flags = (np.array(x, bool) for x in (terminated, truncated))
    advantage, target = merl.compute_gae(*numbers, *flags, gamma, gae_lambda)
    np.testing.assert_allclose(advantage, expected, rtol=1e-6)
    np.testing.assert_allclose(target, np.add(expected, value), rtol=1e-6)


# --- PPO ------------------------------------------------------------------------------------------
def test_stored_log_prob_is_that_of_skill_and_goal(fresh, collected):
    transition = to_numpy(collected[0])
    seen, choice = transition.observation, transition.choice
    for index in np.ndindex(8, 4, 3):
        joint = slow_joint(fresh.policy, seen.observation[index], seen.action_mask[index])
        expected = np.log(joint[choice.skill[index], choice.goal[index]])
        np.testing.assert_allclose(choice.log_prob[index], expected, atol=1e-4)


def test_loss_equals_slow_recomputation(fresh, rows, loss):
    (total, metrics), _ = loss((fresh.policy, fresh.critic), rows)
    transition, advantage, target = to_numpy(rows)
    seen, choice = transition.observation, transition.choice
    advantage = (advantage - advantage.mean()) / advantage.std()
    surrogate, entropy = np.zeros((2, 10, 3))
    clipped = 0
    for index in np.ndindex(10, 3):
        joint = slow_joint(fresh.policy, seen.observation[index], seen.action_mask[index])
        ratio = joint[choice.skill[index], choice.goal[index]] / np.exp(choice.log_prob[index])
        bounded = min(max(ratio, 0.8), 1.2)
        clipped += bounded != ratio
        surrogate[index] = min(ratio * advantage[index], bounded * advantage[index])
        entropy[index] = -sum(p * np.log(p) for p in joint.ravel() if p > 0)
    assert 5 < clipped < 25
    value_loss = np.mean((slow_value(fresh.critic, seen.critic_observation) - target) ** 2)
    expected = -surrogate.mean(), value_loss, entropy.mean()
    np.testing.assert_allclose([metrics[x] for x in ("policy_loss", "value_loss", "entropy")], expected, rtol=1e-4)
    np.testing.assert_allclose(total, expected[0] + 0.5 * expected[1] - 0.01 * expected[2], rtol=1e-4)


@pytest.mark.parametrize("constant", [0.1, -3.0, 0.0])
def test_constant_advantages_and_a_single_row_stay_finite(fresh, rows, loss, constant):
    one_row = jax.tree.map(lambda leaf: leaf[(slice(1),) * min(leaf.ndim, 2)], rows)
    for batch in (one_row, rows._replace(advantage=jnp.full_like(rows.advantage, constant))):
        (total, _), gradient = loss((fresh.policy, fresh.critic), batch)
        assert np.isfinite(total) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.fixture(scope="module")
def ppo_step(fresh):
    return quick_jit(partial(merl.ppo_step, CONFIG, ENV))(fresh, key(6))


def test_gradient_moves_every_network_and_leaves_the_search_alone(fresh, ppo_step):
    state, _ = ppo_step
    networks = fresh.policy, fresh.critic
    assert len(changed_leaves(networks, (state.policy, state.critic))) == len(jax.tree.leaves(networks))
    assert state.sigma == fresh.sigma


def test_ppo_step_learns_from_its_own_episodes(fresh, collected, ppo_step):
    """With one epoch of one minibatch the reported losses are those of the networks that collected."""
    transition, final, info = to_numpy(collected)
    value = slow_value(fresh.critic, transition.observation.critic_observation)
    following = np.concatenate([value[1:], slow_value(fresh.critic, final.critic_observation)[None]])
    reward = transition.reward - transition.charge - 0.7 * transition.cost[..., None]
    ends = (np.broadcast_to(end[..., None], reward.shape) for end in (transition.terminated, transition.truncated))
    advantage = slow_gae(reward, value, following, *ends, 0.97, 0.95)
    cost = transition.cost.mean()
    assert cost > 0.03
    expected = {
        "value_loss": np.mean(advantage**2),  # target = advantage + value
        "explained_variance": 1 - advantage.var() / (advantage + value).var(),
        "policy_loss": 0.0,  # minus the mean of normalised advantages: every ratio is 1
        "episode_return": transition.reward.sum(0).mean(),
        "cost": cost,
        "lagrange_multiplier": 0.7 + 0.1 * (cost - 0.03),
        "grad_cov": 100 * info["coverage"][-1].mean(),
        "grad_conn5": 100 * info["connected"].mean(),
        "grad_conn_weak": 100 * info["connected_weak"].mean(),
    }
    metrics = {name: ppo_step[1][name] for name in expected}
    np.testing.assert_allclose(list(metrics.values()), list(expected.values()), rtol=1e-4, atol=1e-5)


def test_learning_rate_falls_to_a_tenth_at_the_last_optimizer_step():
    """Adam moves by lr g / (g + eps) where the gradient is always g."""
    config = merl.Config(outer=5, grad_steps=1, num_epochs=4, num_minibatches=4, lr=0.02)
    optimizer, g = merl.make_optimizer(config), jnp.asarray(0.1)

    def step(state, _):
        update, state = optimizer.update(g, state)
        return state, -update * (g + 1e-5) / g

    assert config.optimizer_steps == 80
    _, lr = jax.lax.scan(step, optimizer.init(g), length=100)
    np.testing.assert_allclose(lr, np.interp(np.arange(100), [0, 80], [0.02, 0.002]), rtol=1e-3)


def test_gradient_is_clipped_to_its_largest_norm():
    """Against Adam in NumPy, with gradients below and far above 0.5."""
    config = merl.Config(outer=5, lr=0.02)
    optimizer = merl.make_optimizer(config)
    state, first, second = optimizer.init(jnp.zeros(2)), np.zeros(2), np.zeros(2)
    for t in range(1, 9):
        gradient = (5.0 if t % 2 else 0.1) * np.array([0.6, -0.8])
        update, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state)
        gradient *= min(1, 0.5 / np.linalg.norm(gradient))
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        step = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-5)
        lr = np.interp(t - 1, [0, config.optimizer_steps], [0.02, 0.002])
        np.testing.assert_allclose(update, -lr * step, rtol=1e-4)


# --- evolution ------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=[0, 3])
def evolve(request):
    return quick_jit(partial(merl.evolve_selector, dataclasses.replace(CONFIG, eval_batch=request.param), ENV))


@pytest.fixture(scope="module")
def slow_fitness(fresh):
    """Mean over episodes of the team's return less the price of its cost, from a selector [D] and a key."""

    @quick_jit
    def step(policy, observation, env_state, keys):
        action, _ = merl.act(CONFIG, ENV, policy, observation, keys[0])
        return ENV.step(keys[1], env_state, action)

    def fitness(theta, episode_key):
        head = es.set_module_theta(fresh.policy.selector_head, theta)
        policy = eqx.tree_at(lambda policy: policy.selector_head, fresh.policy, head)
        keys, total = jax.random.split(episode_key, (1 + 8, 2, 4)), 0.0
        for e in range(4):
            observation, env_state = reset(keys[0, 0, e])
            for t in range(1, 9):
                time_step, env_state = step(policy, observation, env_state, keys[t, :, e])
                observation = time_step.observation
                total += np.mean(time_step.reward) - 0.7 * time_step.cost
                costs.append(float(time_step.cost))
        assert max(costs) > 0
        return total / 4

    reset, costs = quick_jit(ENV.reset), []

    return fitness


def test_evolution_is_one_generation_from_the_learners_selector(fresh, evolve, slow_fitness):
    state, metrics = evolve(fresh, key(3))
    assert changed_leaves(fresh, state) == {".policy.selector_head.weight", ".policy.selector_head.bias"}

    search_key, episode_key = jax.random.split(key(3))
    theta = np.asarray(es.module_theta(fresh.policy.selector_head))
    population = np.asarray(es.ask(theta, CONFIG.es_config, search_key))
    fitness = np.array([slow_fitness(member, episode_key) for member in population])
    assert len(set(fitness)) == 4
    np.testing.assert_allclose([metrics["best"], metrics["mean"]], [fitness.max(), fitness.mean()], rtol=1e-5)
    step = (fitness.argsort().argsort() / 3 - 0.5) @ (population - theta) / 0.5
    np.testing.assert_allclose(es.module_theta(state.policy.selector_head), theta + 0.01 / (4 * 0.5) * step, atol=1e-6)


def test_equal_members_have_equal_fitness(fresh, evolve, slow_fitness):
    """All members play the same episodes; four equal numbers are their mean exactly."""
    _, metrics = evolve(fresh._replace(sigma=jnp.zeros(())), key(3))
    assert metrics["best"] == metrics["mean"]
    expected = slow_fitness(es.module_theta(fresh.policy.selector_head), jax.random.split(key(3))[1])
    np.testing.assert_allclose(metrics["best"], expected, rtol=1e-5)


# --- one run --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run():
    """The learning run in one scan, the program for its last two rounds, and what the host was told."""
    logged, saved = [], {}

    def log(i, metrics):
        logged.append((int(i), jax.tree.map(float, metrics)))

    def save(i, state):
        saved[int(i)] = jax.tree.map(np.array, state)

    start = quick_jit(partial(merl.init_state, LEARNING, EASY))(key(1))
    lower = partial(merl.train.lower, LEARNING, EASY, start, key(), log_fn=log, save_fn=save, save_every=2)
    whole, last_two = side_by_side(lambda first: lower(start=first, stop=12).compile(QUICK | DEFAULT), (0, 10))
    end, metrics = whole(start, key())
    jax.effects_barrier()
    return SimpleNamespace(
        start=start, end=end, metrics=metrics, logged=logged[:], saved=saved.copy(), whole=whole, last_two=last_two
    )


def test_training_teaches_the_team_to_cover_the_map(run):
    """Untrained teams cover about 39 % of the map, trained ones 97 %."""
    untrained, trained = (merl.evaluate(LEARNING, EASY, state, key(2), 100)[0] for state in (run.start, run.end))
    assert untrained["coverage"].mean() < 55
    assert trained["coverage"].mean() > 85


def test_run_that_is_resumed_ends_bit_for_bit_where_one_scan_does(run):
    end, metrics = run.last_two(run.saved[9], key())
    assert_trees_equal(end, run.end)
    assert_trees_equal(metrics, {name: column[10:] for name, column in run.metrics.items()})


def test_one_seed_repeats_and_two_differ(run):
    again, other = (run.last_two(run.saved[9], key(seed))[0] for seed in (0, 1))
    assert_trees_equal(again, run.end)
    networks = other.policy, other.critic
    assert len(changed_leaves(networks, (again.policy, again.critic))) == len(jax.tree.leaves(networks))


def test_host_hears_of_every_round_in_order(run):
    assert [i for i, _ in run.logged] == list(range(12))
    for name, column in run.metrics.items():
        np.testing.assert_array_equal(column, np.float32([metrics[name] for _, metrics in run.logged]))
    assert list(run.saved) == [1, 3, 5, 7, 9, 11]
    assert_trees_equal(run.saved[11], run.end)


def test_only_the_metrics_grow_with_the_rounds(run):
    assert {column.shape for column in run.metrics.values()} == {(12,)}
    long, short = (program.memory_analysis() for program in (run.whole, run.last_two))
    assert long.output_size_in_bytes - short.output_size_in_bytes == 10 * 4 * len(run.metrics)
    assert abs(long.temp_size_in_bytes - short.temp_size_in_bytes) < 1000  # a copy of the networks has 90 kB


def test_optimizer_counts_the_steps_of_the_schedule(run):
    counts = optax.tree_utils.tree_get_all_with_path(run.end.optimizer_state, "count")
    assert [int(count) for _, count in counts] == [12 * 3 * 4 * 4] * 2 == [LEARNING.optimizer_steps] * 2


def test_dual_variable_falls_while_the_constraint_holds_and_stops_at_zero(run):
    """The robots are never apart, so that each of the three steps of a round takes lagrange_lr * cost_limit."""
    np.testing.assert_array_equal(run.metrics["cost"], 0)
    expected = np.maximum(1 - 3 * 2.0 * 0.03 * np.arange(1, 13), 0)
    np.testing.assert_allclose(run.metrics["lagrange_multiplier"], expected, atol=1e-5)
    assert expected[-1] == run.metrics["lagrange_multiplier"][-1] == 0


def test_learned_flock_cem_and_a_violated_constraint():
    """A robot on its own has lambda_2 = 1, half of this target: the cost of every step is 1/2."""
    env = Coverage(grid=4, n_agents=1, horizon=6, target_fiedler=2.0)
    config = dataclasses.replace(CONFIG, flock="learned", n_goals=9, outer=9, grad_steps=9)
    es_config = es.ESConfig(pop_size=4, sigma=0.2, kind="cem", elite_frac=0.5, eval_batch=2)
    state, history = merl.merl_train(env, config, key=key(), n_outer=2, grad_steps=1, es_config=es_config)

    assert [row["outer"] for row in history] == [0, 1]
    for i, row in enumerate(history):
        assert all(type(value) is float for name, value in row.items() if name != "outer")
        assert row["best"] >= row["mean"] and 0 < row["grad_cov"] <= 100
        expected = (100, 1 + (i + 1) * 0.1 * (0.5 - 0.03))
        np.testing.assert_allclose((row["grad_conn5"], row["lagrange_multiplier"]), expected, rtol=1e-6)

    before = merl.init_state(config, env, jax.random.split(key())[0]).policy
    assert state.policy.flock_head.weight.shape == (9, 8)
    assert len(changed_leaves(before, state.policy)) == len(jax.tree.leaves(before))  # the flock head as well
    assert len({0.2, *(row["sigma"] for row in history)}) == 3 and state.sigma == history[1]["sigma"]


# --- programs -------------------------------------------------------------------------------------
def test_no_key_is_used_twice(fresh):
    with jax.debug_key_reuse(True):  # raises when the program is built
        merl.init_state.lower(CONFIG, ENV, key())
        merl.train.lower(CONFIG, ENV, fresh, key())
        merl.evaluate.lower(CONFIG, ENV, fresh, key(), 2)


def test_compiler_gets_many_rows_right(fresh, collected, optimized):
    """Some compilers returned wrong numbers in large batches only, from 16,385 or 32,769 rows on.

    Operation by operation on few rows, against programs at the default level and at the one that the scripts ask for.
    """

    def forward(row):
        log_probs = merl.choice_log_probs(CONFIG, ENV, fresh.policy, row.observation, row.action_mask)
        return *log_probs, jnp.square(fresh.critic(row.critic_input) - 1)

    few = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), collected[0].observation)
    many = jax.tree.map(lambda leaf: jnp.tile(leaf, (417, 1)), few)
    for options in (DEFAULT, DEFAULT | {"xla_backend_optimization_level": 1}):
        program = jax.jit(jax.vmap(forward), compiler_options=options)
        for one, all_rows in zip(jax.vmap(forward)(few), program(many), strict=True):
            assert len(all_rows) == 417 * len(one) > 40_000
            np.testing.assert_allclose(all_rows, np.tile(one.T, 417).T, rtol=1e-4, atol=1e-5)

    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=(n, 3)).astype(np.float32) for n in (3, 40_000))
    norm = jax.jit(jax.vmap(lambda x: jnp.sum((w @ x) ** 2)), compiler_options=DEFAULT)(x)
    np.testing.assert_allclose(norm, np.square(x @ w.T).sum(1), rtol=1e-4, atol=1e-5)


def test_settings_reach_the_strategy():
    config = merl.Config(pop=6, sigma=0.1, es_lr=0.2, es_kind="cem", elite_frac=0.5, weight_decay=0.3, eval_batch=4)
    assert config.es_config == es.ESConfig(
        pop_size=6, sigma=0.1, lr=0.2, kind="cem", elite_frac=0.5, weight_decay=0.3, eval_batch=4
    )


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="--pop must be even and at least 2, got 7"):
        merl.Config(pop=7)
    with pytest.raises(ValueError, match="--num-minibatches must be a divisor of --horizon x --rollouts = 32, got 5"):
        merl.init_state(dataclasses.replace(CONFIG, num_minibatches=5), ENV, key())


# --- checkpoints ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def checkpoint(run, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    recorder = merl.Recorder(LEARNING, EASY, merl.Run(run_dir=folder), {})
    recorder.save(np.asarray(11), jax.tree.map(lambda x: x[None], run.end))  # of one seed
    return folder


def test_checkpoint_holds_every_leaf_bit_for_bit(run, checkpoint):
    header, state = merl.load_checkpoint(checkpoint)
    assert (header["iteration"], header["config"]["num_seeds"]) == (12, 1)
    assert_trees_equal(jax.tree.map(lambda x: x[0], state), run.end)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.end)} == {"float32", "int32"}


def test_warm_start_takes_the_networks_to_another_map_and_team(run, checkpoint):
    env = Coverage(grid=9, n_agents=4, horizon=20)
    other = merl.init_state(LEARNING, env, key(3))
    warm = merl.init_state_from_checkpoint(LEARNING, env, key(3), checkpoint)
    assert_trees_equal((warm.policy, warm.critic), (run.end.policy, run.end.critic))
    assert_trees_equal(warm[2:], other[2:])  # optimizer, multiplier and sigma start afresh


def test_warm_start_refuses_another_architecture(run, checkpoint):
    with pytest.raises(ValueError, match="same architecture") as error:
        merl.init_state_from_checkpoint(dataclasses.replace(LEARNING, hidden=8), EASY, key(3), checkpoint)
    size = run.end.policy.trunk.layers[0].weight.shape[1]
    assert f".trunk.layers.0.weight (32, {size}) instead of (8, {size})" in str(error.value)
    assert ".selector_head.weight (3, 32) instead of (3, 8)" in str(error.value)
    assert "selector_head.bias" not in str(error.value)  # it fits
