"""envs.py against closed forms, hand-drawn maps, and slow NumPy versions written from its docstrings."""

import re
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import (
    AgentObservation,
    Coverage,
    CoverageState,
    Rendezvous,
    RendezvousState,
    Spread,
    TimeStep,
    fiedler_value,
    init_normalizer,
    normalize,
    step_autoreset,
    track_episode,
    update_normalizer,
    zero_sums,
)

STAY, NORTH, EAST, SOUTH, WEST = range(5)
STEP = np.array([(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1)])  # (row, column), rows count southwards
KEY = jax.random.key(0)

reset, step = (jax.jit(method, static_argnums=0) for method in (Coverage.reset, Coverage.step))
autoreset = jax.jit(step_autoreset, static_argnums=0)


def draw(text, **settings):
    """(env, state at time 0) from a map: `.` free, `#` wall, `o` covered by the last robot, digits the robots."""
    cell = np.array([list(line) for line in text.split()])
    n_agents = np.char.isdigit(cell).sum()
    position = np.array([np.argwhere(cell == str(i))[0] for i in range(n_agents)])
    owner = np.where(cell == "o", n_agents - 1, -1)
    owner[tuple(position.T)] = np.arange(n_agents)
    belief = owner == np.arange(n_agents)[:, None, None]
    heard, heard_time = np.tile(position, (n_agents, 1, 1)), np.zeros((n_agents, n_agents), int)
    rest, start = np.zeros_like(position), np.zeros((), int)
    state = CoverageState(position, rest, owner, cell == "#", belief, heard, heard_time, start)
    return Coverage(grid=len(cell), n_agents=int(n_agents), **settings), jax.tree.map(jnp.asarray, state)


def play(env, state, *joint_actions):
    """The (time_step, state) after each joint action, as NumPy."""
    record = []
    for action in joint_actions:
        time_step, state = step(env, KEY, state, np.array(action))
        record.append(jax.device_get((time_step, state)))
    return record


def assert_trees_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected, atol=1e-6):
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=atol)


# --- 1. normalizing observations ------------------------------------------------------------------
@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 900], list(range(100, 1000, 100))])
def test_normalizer_equals_numpy_on_any_split(cuts):
    rows = np.random.default_rng(0).normal(5.0, [[1.0, 1000.0]], (1000, 2)).astype(np.float32)
    normalizer = init_normalizer(AgentObservation(rows, rows[:, :1]))
    for part in np.split(rows, cuts):
        normalizer = update_normalizer(normalizer, AgentObservation(jnp.array(part), jnp.array(part[:, :1])))
    assert normalizer.count == 1000
    np.testing.assert_allclose(normalizer.mean.observation, rows.mean(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(normalizer.variance.observation, rows.var(0), rtol=1e-4)
    np.testing.assert_allclose(normalizer.variance.critic_observation, rows[:, :1].var(0), rtol=1e-4)


def test_normalizer_stays_finite_on_constant_huge_and_infinite_features():
    normalizer = init_normalizer(AgentObservation(jnp.zeros((1, 3))))
    for _ in range(100):
        rows = jnp.stack([jnp.full(50, 2.0), jnp.full(50, 1e30), jnp.arange(50.0)], -1)
        normalizer = update_normalizer(normalizer, AgentObservation(rows))
    before = normalizer
    normalizer = update_normalizer(normalizer, AgentObservation(rows.at[0, 2].set(jnp.inf)))
    np.testing.assert_array_equal(normalizer.mean.observation[2], before.mean.observation[2])
    shown = normalize(normalizer, AgentObservation(jnp.array([2.001, 1e30, 1e9])))
    assert np.isfinite(shown.observation).all()
    assert np.abs(shown.observation).max() <= 10


def test_normalizer_carries_a_billion_rows_in_float32():
    normalizer = init_normalizer(AgentObservation(jnp.zeros((1, 1))))._replace(count=jnp.asarray(1e9))
    normalizer = normalizer._replace(mean=AgentObservation(jnp.ones(1)), variance=AgentObservation(4 * jnp.ones(1)))
    rows = jnp.array([[-1.0], [3.0]] * 5000)  # mean 1, variance 4: nothing may drift
    update = jax.jit(lambda n: jax.lax.fori_loop(0, 1000, lambda _, n: update_normalizer(n, AgentObservation(rows)), n))
    normalizer = update(normalizer)
    np.testing.assert_allclose(normalizer.count, 1e9 + 1e7, rtol=1e-3)
    np.testing.assert_allclose(normalizer.mean.observation, 1.0, rtol=1e-3)
    np.testing.assert_allclose(normalizer.variance.observation, 4.0, rtol=1e-3)


# --- 2. graphs ------------------------------------------------------------------------------------
def path(n, closed=0):
    weight = np.eye(n, k=1)
    weight[0, -1] = closed
    return weight + weight.T


GRAPHS = {
    **{f"complete {n}": (np.ones((n, n)), n) for n in (2, 3, 6)},
    **{f"path {n}": (path(n), 2 - 2 * np.cos(np.pi / n)) for n in (3, 6)},
    "cycle": (path(6, closed=1), 2 - 2 * np.cos(2 * np.pi / 6)),
    "star": (np.array([[0, 1, 1, 1, 1, 1]] + [[1, 0, 0, 0, 0, 0]] * 5), 1),
    "two components": (np.kron(np.eye(2), np.ones((3, 3))), 0),
    "weights scale it": (0.25 * path(6), 0.25 * (2 - 2 * np.cos(np.pi / 6))),
    "the diagonal is ignored": (path(6) + np.diag(np.arange(6)), 2 - 2 * np.cos(np.pi / 6)),
    "single node": (np.zeros((1, 1)), 1),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_fiedler_value_of_known_graphs(name):
    weight, expected = GRAPHS[name]
    assert_close(fiedler_value(jnp.asarray(weight, jnp.float32)), expected)


def slow_fiedler(weight):
    laplacian = -np.array(weight)
    np.fill_diagonal(laplacian, 0)
    np.fill_diagonal(laplacian, -laplacian.sum(1))
    return np.sort(np.linalg.eigvalsh(laplacian))[1] if len(laplacian) > 1 else 1.0


def slow_link(env, a, b):
    return 1 / (1 + np.exp(-2.0 * (env.comm_r - np.abs(a - b).max())))


def slow_connectivity(env, position):
    return slow_fiedler([[slow_link(env, a, b) for b in position] for a in position])


def test_fiedler_value_of_a_weighted_graph_and_of_a_line_of_robots():
    weight = np.random.default_rng(0).uniform(size=(6, 6))
    weight += weight.T
    assert_close(fiedler_value(jnp.asarray(weight, jnp.float32)), slow_fiedler(weight), atol=1e-5)
    line = np.array([(3, 0), (3, 4), (3, 8), (3, 12)])
    assert_close(Coverage(comm_r=5).fiedler(jnp.asarray(line)), slow_connectivity(Coverage(comm_r=5), line))
    assert 0.5200 < slow_connectivity(Coverage(comm_r=5), line) < 0.5203  # the links of 8 cells add 0.004 to the path


# --- 3. moves, reward and cost on hand-drawn maps -------------------------------------------------
def test_action_mask_closes_edges_walls_and_occupied_cells_but_never_staying():
    [(time_step, _)] = play(*draw("01... 2#... ..#.. .34#. ....."), [STAY] * 5)
    expected = np.zeros((5, 5), bool)
    for robot, actions in enumerate([[STAY], [STAY, EAST], [STAY, SOUTH], [STAY, NORTH, SOUTH, WEST], [STAY, SOUTH]]):
        expected[robot, actions] = True
    assert_trees_equal(time_step.observation.action_mask, expected)


MOVES = {  # before, joint action, after
    "directions": ("..... ..1.. .402. ..3.. .....", range(5), "..1.. ..... 4.0.2 ..... ..3.."),
    "the lower index gets the cell, from the west": ("0.1. .... .... ...2", [EAST, WEST, STAY], ".01. .... .... ...2"),
    "the lower index gets the cell, from the east": ("1.0. .... .... ...2", [WEST, EAST, STAY], "10.. .... .... ...2"),
    "of three claims one is granted": (".2.. 0.1. .... ....", [EAST, WEST, SOUTH], ".2.. .01. .... ...."),
    "a cell that is being left is occupied": ("012. .... .... ....", [EAST] * 3, "01.2 .... .... ...."),
    "the loser of a claim keeps its cell": ("21.0 .... .... ....", [WEST, EAST, EAST], "210. .... .... ...."),
    "robots do not swap": ("01.. .... .... ...2", [EAST, WEST, STAY], "01.. .... .... ...2"),
    "masked: wall and edges": ("0#.. ...1 .... 2...", [EAST, EAST, SOUTH], "0#.. ...1 .... 2..."),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_on_a_hand_drawn_map(name):
    before, action, after = MOVES[name]
    [(_, state)] = play(*draw(before), action)
    assert_trees_equal(state.position, draw(after)[1].position)


def test_only_the_first_visitor_is_rewarded():
    env, state = draw("0..o #..1 .... 2...")
    record = play(env, state, [EAST, NORTH, NORTH], [EAST, SOUTH, SOUTH], [WEST, WEST, EAST], [EAST, WEST, STAY])
    first = np.array([(1, 0, 1), (1, 0, 0), (0, 1, 1), (0, 1, 0)])  # robot 1 enters the old cell, 0 and 2 go back
    coverage = (4 + first.sum(1).cumsum()) / 15
    for (time_step, _), own, share in zip(record, first, coverage, strict=True):
        assert_close(time_step.reward, (own + own.sum() / 3) / 2)
        assert_close(time_step.info["coverage"], share)
    assert_trees_equal(record[-1][1].owner, np.array([(0, 0, 0, 2), (-1, 1, 1, 1), (2, -1, -1, -1), (2, 2, -1, -1)]))


TRIANGLES = {  # map, link weights: of robot 1 to the two others, between the others; connected, weakly connected
    "far above the target": ("0.1........ 2..........", 6, 8, 1, 1),
    "just connected": ("0....1....2 ...........", 0, -10, 1, 1),
    "not connected": ("0.....1.... 2..........", -2, 8, 0, 1),
    "just weakly connected": ("0........1. 2..........", -8, 8, 0, 1),
    "not even weakly connected": ("0.........1 2..........", -10, 8, 0, 0),
}


@pytest.mark.parametrize("name", TRIANGLES)
def test_cost_and_connectivity_of_three_robots_in_closed_form(name):
    """With link weights w, w, v lambda_2 is min(3 w, w + 2 v); the bars are 0.5 and 1e-3, and only the higher pays."""
    text, *logits, connected, weak = TRIANGLES[name]
    [(time_step, _)] = play(*draw(text + " ..........." * 9, w_connectivity=0.25), [STAY] * 3)
    w, v = 1 / (1 + np.exp(-np.array(logits)))
    fiedler = min(3 * w, w + 2 * v)
    assert_close(time_step.info["fiedler"], fiedler, atol=2e-6)
    assert_close(time_step.cost, max(0, 0.6 - fiedler) / 0.6, atol=2e-6)
    assert (time_step.cost == 0) == (fiedler > 0.6)
    assert (time_step.info["connected"], time_step.info["connected_weak"]) == (connected, weak)
    assert_close(time_step.reward, [0.25 * connected] * 3)


# --- 4. whole episodes against slow loops ---------------------------------------------------------
EPISODES = {  # grid, robots, share of walls, steps, settings
    "4 scattered": (12, 4, 0.0, 40, {"comm_r": 3, "horizon": 40, "local_ratio": 0.0}),
    "7 crowded": (7, 7, 0.25, 200, {"comm_r": 2, "view_r": 1, "n_nearest": 3, "local_ratio": 1.0}),
    "2 far-sighted": (30, 2, 0.1, 40, {"comm_r": 4, "view_r": 5, "local_ratio": 0.2, "w_connectivity": 0.5}),
    "1 alone": (4, 1, 0.0, 20, {"critic_observation": False}),
}


@cache
def episode(name):
    """(env, [(state, action, time_step, next_state)]) under random joint actions, many of them masked."""
    grid, n_agents, wall_share, n_steps, settings = EPISODES[name]
    rng = np.random.default_rng(0)
    cell = np.where(rng.random((grid, grid)) < wall_share, "#", ".")
    start = rng.choice(16, n_agents, replace=False)
    cell[start // 4, start % 4] = np.arange(n_agents)
    env, state = draw(" ".join(map("".join, cell)), **settings)
    drift = np.arange(n_agents) % 4 + 1  # each robot prefers a direction of its own, so that the team falls apart
    action = np.where(rng.random((n_steps, n_agents)) < 0.3, drift, rng.integers(0, 5, (n_steps, n_agents)))
    time_steps, next_states = zip(*play(env, state, *action), strict=True)
    states = (jax.device_get(state), *next_states[:-1])
    return env, list(zip(states, action, time_steps, next_states, strict=True))


def slow_target(env, state, i, action):
    """The cell that robot i reaches if no other claims it."""
    row, column = state.position[i] + STEP[action]
    inside = 0 <= row < env.grid and 0 <= column < env.grid
    free = inside and not state.wall[row, column] and (row, column) not in set(map(tuple, state.position))
    return (row, column) if free else tuple(state.position[i])


def slow_step(env, state, action):
    """(next state, [N] cells that each robot covered first), one robot after the other."""
    robots, position = range(env.n_agents), []
    for i in robots:
        target = slow_target(env, state, i, action[i])
        position.append(tuple(state.position[i]) if target in position else target)
    owner, belief, heard, heard_time = (np.copy(x) for x in (state.owner, state.belief, state.heard, state.heard_time))
    position, first = np.array(position), np.zeros(env.n_agents)
    for i, cell in enumerate(map(tuple, position)):
        if owner[cell] < 0:
            owner[cell], first[i] = i, 1
        near = [j for j in robots if np.abs(position[i] - position[j]).max() <= env.comm_r]
        for j in near:
            belief[i] |= state.belief[j]
            for k in robots:
                if state.heard_time[j, k] > heard_time[i, k]:
                    heard[i, k], heard_time[i, k] = state.heard[j, k], state.heard_time[j, k]
        heard[i, near], heard_time[i, near] = position[near], state.time + 1
        belief[i][cell] = True
    move = position - state.position
    return CoverageState(position, move, owner, state.wall, belief, heard, heard_time, state.time + 1), first


@pytest.mark.parametrize("name", EPISODES)
def test_every_transition_matches_a_slow_loop(name):
    env, record = episode(name)
    for state, action, time_step, next_state in record:
        expected, first = slow_step(env, state, action)
        assert_trees_equal(next_state, expected)
        fiedler = slow_connectivity(env, expected.position)
        team_share = (1 - env.local_ratio) * first.mean() + env.w_connectivity * (fiedler > 0.5)
        assert_close(time_step.reward, env.local_ratio * first + team_share)
        assert_close(time_step.cost, max(0, env.target_fiedler - fiedler) / env.target_fiedler, atol=1e-5)
        assert_close(time_step.info["fiedler"], fiedler, atol=1e-5)
        assert time_step.info["connected"] == (fiedler > 0.5)
        assert_close(time_step.info["coverage"], (expected.owner >= 0).sum() / (~state.wall).sum())


@pytest.mark.parametrize("name", ["7 crowded", "1 alone"])
def test_robots_never_share_a_cell_or_enter_a_wall(name):
    env, record = episode(name)
    for *_, state in record:
        assert ((state.position >= 0) & (state.position < env.grid)).all()
        assert len(set(map(tuple, state.position))) == env.n_agents
        assert not state.wall[tuple(state.position.T)].any()


def test_news_travels_one_hop_per_step_and_never_out_of_range():
    """Robots 0 1 2 3 are a chain with gaps of exactly comm_r, robot 4 hears nobody; robot 3 walks south."""
    env, state = draw(" ".join(["0....1....2....3", *["." * 16] * 14, "....4..........."]), comm_r=5)
    for time, (_, now) in enumerate(play(env, state, *[[STAY, STAY, STAY, SOUTH, STAY]] * 5), start=1):
        for listener, hops in ((2, 1), (1, 2), (0, 3)):
            news = max(0, time - hops + 1)  # a robot in range is heard at once, then one step a hop
            assert (now.heard_time[listener, 3], *now.heard[listener, 3]) == (news, news, 15)
            known = np.flatnonzero(now.belief[listener, :, 15])  # step t covers row t and is known `hops` steps later
            assert known.tolist() == list(range(time - hops + 1))
        assert np.argwhere(now.belief[4]).tolist() == [[15, 4]]
        assert now.heard_time[4].tolist() == [0, 0, 0, 0, time]
        assert_trees_equal(now.heard[4], np.asarray(state.position))


# --- 5. observations ------------------------------------------------------------------------------
def slow_observation(env, state, i):
    """(observation, nearest teammate, weakest link) of robot i, cell by cell and teammate by teammate."""
    here, robots = state.position[i], set(map(tuple, state.position))
    floor = set(map(tuple, np.argwhere(~state.wall)))
    unknown = floor - set(map(tuple, np.argwhere(state.belief[i])))
    window = [tuple(here + offset - env.view_r) for offset in np.ndindex(2 * env.view_r + 1, 2 * env.view_r + 1)]
    view = [cell in unknown for cell in window] + [cell not in floor for cell in window]
    view += [cell in robots for cell in window]

    for side in (3, 9, 27):  # 3 x 3 boxes of this side, the middle one centred on the robot
        count = np.zeros((3, 3))
        for cell in unknown:
            row, column = (cell - here + side // 2) // side + 1
            if 0 <= row <= 2 and 0 <= column <= 2:
                count[row, column] += 1
        around = np.delete(count, 4)
        view += [*(around / side**2), *(around > 0)]

    distance = {j: np.abs(state.heard[i, j] - here).max() for j in range(env.n_agents) if j != i}
    in_range = [j for j in distance if np.abs(state.position[j] - here).max() <= env.comm_r]
    listed = sorted(distance, key=lambda j: (j not in in_range, distance[j]))
    listed += [None] * env.n_nearest
    farthest = max(in_range, key=distance.get, default=None)
    for j in [*listed[: env.n_nearest], farthest]:
        age = 0 if j is None else state.time - state.heard_time[i, j]
        view += [0, 0, 0] if j is None else [*(state.heard[i, j] - here) / env.comm_r, 1 / (1 + age)]
        view += [*state.last_move[j]] if j in in_range else [0, 0]
    view += [sum(slow_link(env, here, state.position[j]) for j in distance) / 4]
    view += [*state.last_move[i], 1 - state.time / env.horizon]
    offsets = [(0, 0, 0) if j is None else (*state.heard[i, j] - here, j in in_range) for j in (listed[0], farthest)]
    return view, *offsets


def slow_observations(env, state):
    rows = [slow_observation(env, state, i) for i in range(env.n_agents)]
    return [np.array(part, float) for part in zip(*rows, strict=True)]


@pytest.mark.parametrize("name", EPISODES)
def test_observations_match_a_slow_loop_over_cells_and_teammates(name):
    env, record = episode(name)
    for _, _, time_step, state in record[::7]:
        actual, (expected, nearest, weakest) = time_step.observation, slow_observations(env, state)
        assert_close(actual.observation, expected)
        assert_trees_equal(env.teammate_offsets(actual.observation), (nearest, weakest))
        for i, here in enumerate(map(tuple, state.position)):
            moves = [slow_target(env, state, i, action) != here for action in (NORTH, EAST, SOUTH, WEST)]
            assert actual.action_mask[i].tolist() == [True, *moves]
        if env.critic_observation:
            coverage = (state.owner >= 0).sum() / (~state.wall).sum()
            truth = [*expected.mean(0), slow_connectivity(env, state.position), coverage]
            assert_close(actual.critic_input, np.hstack([expected, [truth] * env.n_agents]), atol=1e-5)
        else:
            assert actual.critic_observation is None and actual.critic_input is actual.observation


def test_the_observation_depends_on_the_local_scene_only():
    """The same scene elsewhere on a larger grid, with walls around it: bit-equal."""
    env, record = episode("7 crowded")
    *_, state = record[20]  # some ground is unknown, some news stale
    assert (~state.belief & ~state.wall).any((1, 2)).all() and (state.heard_time < state.time).any()
    shift, border = np.array((4, 9)), ((4, 7), (9, 2))
    there = state._replace(
        position=state.position + shift,
        heard=state.heard + shift,
        wall=np.pad(state.wall, border, constant_values=True),
        owner=np.pad(state.owner, border, constant_values=-1),
        belief=np.pad(state.belief, ((0, 0), *border)),
    )
    [(expected, _)] = play(env, state, [STAY] * 7)
    [(actual, _)] = play(replace(env, grid=18), there, [STAY] * 7)
    assert_trees_equal(actual.observation.observation, expected.observation.observation)


def test_observation_sizes_depend_on_neither_grid_nor_team():
    size = 3 * 7 * 7 + 3 * 16 + (4 + 1) * 5 + 1 + 2 + 1
    for grid, n_agents in ((2, 1), (10, 4), (32, 10)):
        observation, _ = jax.eval_shape(Coverage(grid=grid, n_agents=n_agents).reset, KEY)
        assert observation.observation.shape == (n_agents, size)
        assert observation.critic_observation.shape == (n_agents, 2 * size + 2)


# --- 6. the start of an episode -------------------------------------------------------------------
OPEN = Coverage(grid=6, n_agents=9, spawn_r=1, horizon=3)  # as many robots as the spawn area has cells
WALLED = Coverage(grid=7, n_agents=16, obstacle_density=0.5)  # as many as it has cells between all its walls
APART = Coverage(grid=9, n_agents=5, comm_r=2, spawn_r=3)  # not all start in range
KEYS = jax.random.split(KEY, 2000)


@cache
def starts(env):
    return jax.device_get(jax.jit(jax.vmap(lambda key: env.reset(key)[1]))(KEYS))


@pytest.mark.parametrize("env", [OPEN, WALLED, APART])
def test_robots_start_close_together_on_free_cells_of_their_own_and_know_where_the_others_are(env):
    state, robots = starts(env), np.arange(env.n_agents)
    assert ((state.position >= 0) & (state.position < env.grid)).all()
    assert (np.ptp(state.position, axis=1) <= 2 * env.spawn_r).all()
    owner = np.full(state.owner.shape, -1)
    owner[np.arange(2000)[:, None], state.position[..., 0], state.position[..., 1]] = robots
    assert ((owner >= 0).sum((1, 2)) == env.n_agents).all()  # cells of their own
    assert not (state.wall & (owner >= 0)).any()
    belief = owner[:, None] == robots[:, None, None]
    heard = np.repeat(state.position[:, None], env.n_agents, axis=1)
    rest, time = np.zeros_like(state.position), np.zeros_like(state.time)
    distance = np.abs(state.position[:, :, None] - state.position[:, None]).max(-1)
    heard_time = np.where(distance > env.comm_r, -1, 0).astype(np.int32)  # old news from the start, if out of range
    expected = CoverageState(state.position, rest, owner, state.wall, belief, heard, heard_time, time)
    assert_trees_equal(state, expected)


def test_the_spawn_area_surrounds_a_uniform_anchor_as_far_as_the_grid_allows():
    position = starts(OPEN).position
    corner = position.min(1, keepdims=True)
    cell = (position - corner) @ (3, 1)
    share = np.zeros((4, 4))
    np.add.at(share, tuple(corner[:, 0].T), 1 / 2000)
    expected = np.outer([2, 1, 1, 2], [2, 1, 1, 2]) / 36  # anchors 0..5 give the corners 0 0 1 2 3 3
    assert (np.abs(share - expected) < 4 * np.sqrt(expected / 2000)).all()
    share = (cell[:, :, None] == np.arange(9)).mean(0)  # [robot, cell]: who stands where is random too
    assert (np.abs(share - 1 / 9) < 4.5 * np.sqrt(1 / 9 / 2000)).all()


def test_walls_stand_on_odd_rows_and_columns_only_and_cut_nothing_off():
    wall = starts(WALLED).wall
    site = np.zeros((7, 7), bool)
    site[1::2, 1::2] = True
    assert not wall[:, ~site].any()
    assert (np.abs(wall[:, site].mean(0) - 0.5) < 0.05).all()
    flooded = np.zeros((2000, 9, 9), bool)
    flooded[:, 1, 1] = True
    for _ in range(49):
        near = flooded[:, :-2, 1:-1] | flooded[:, 2:, 1:-1] | flooded[:, 1:-1, :-2] | flooded[:, 1:-1, 2:]
        flooded[:, 1:-1, 1:-1] |= near & ~wall
    assert_trees_equal(flooded[:, 1:-1, 1:-1], ~wall)


def test_an_episode_is_a_function_of_its_key_alone_or_in_a_batch():
    batch, action = jax.tree.map(lambda leaf: leaf[:2], starts(OPEN)), np.arange(9) % 5
    together = jax.jit(jax.vmap(OPEN.step, in_axes=(0, 0, None)))(KEYS[:2], batch, action)
    for i in range(2):
        observation, state = reset(OPEN, KEYS[i])
        assert_trees_equal(state, jax.tree.map(lambda leaf, i=i: leaf[i], batch))
        assert_close(observation.observation, slow_observations(OPEN, jax.device_get(state))[0])
        alone = step(OPEN, KEYS[i], state, action)
        jax.tree.map(lambda leaf, expected, i=i: assert_close(leaf[i], expected), together, alone)
    assert (batch.position[0] != batch.position[1]).any()


# --- 7. the end of an episode ---------------------------------------------------------------------
def test_the_clock_truncates_exactly_at_the_horizon_and_step_never_resets():
    action = np.arange(9) % 5
    time_step, state = zip(*play(OPEN, reset(OPEN, KEY)[1], *[action] * 4), strict=True)
    assert [bool(x.truncated) for x in time_step] == [False, False, True, True]
    assert not any(x.terminated for x in time_step)
    assert_trees_equal(state[3], slow_step(OPEN, state[2], action)[0])
    flags = (time_step[0].terminated, time_step[0].truncated)
    assert all(leaf.shape == () for leaf in (*flags, time_step[0].cost, *time_step[0].info.values()))
    assert all(flag.dtype == bool for flag in flags) and time_step[0].reward.shape == (9,)


def test_autoreset_returns_the_final_observation_and_a_fresh_episode_to_act_from():
    action, (_, state) = np.arange(9) % 5, reset(OPEN, KEY)
    for time, key in enumerate(KEYS[:7], start=1):
        stepped, stepped_state = step(OPEN, KEY, state, action)
        fresh_observation, fresh_state = reset(OPEN, jax.random.split(key)[1])
        time_step, state, observation = autoreset(OPEN, key, state, action)
        assert_trees_equal(time_step, stepped)
        assert_trees_equal(state, fresh_state if time % 3 == 0 else stepped_state)
        assert_trees_equal(observation, fresh_observation if time % 3 == 0 else stepped.observation)


@dataclass(frozen=True)
class Counter:
    """Two agents count to five; the rewards of a step are 1 and 3, its cost is 1."""

    ending: str
    horizon: ClassVar = 8

    def reset(self, key):
        return AgentObservation(jnp.zeros((2, 1), int)), jnp.zeros((), int)

    def sample_action(self, key):
        return jnp.zeros(2, int)

    def step(self, key, count, action):
        count = count + 1
        ends = {name: (count >= 5) & (name == self.ending) for name in ("terminated", "truncated")}
        observation, reward = AgentObservation(jnp.full((2, 1), count)), jnp.array([1.0, 3.0])
        return TimeStep(
            observation, reward, jnp.ones(()), info={"count": 1.0 * count, "late": count > 3}, **ends
        ), count

    def episode_summary(self, mean, last):
        return {"mean": mean["count"], "last": last["count"], "late": mean["late"]}


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_three_episodes_of_five_steps_are_exactly_fifteen_transitions(ending):
    env = Counter(ending)

    def transition(carry, key):
        observation, count, sums = carry
        time_step, count, next_observation = step_autoreset(env, key, count, env.sample_action(key))
        done, figures, sums = jax.vmap(partial(track_episode, env))(sums, jax.tree.map(lambda x: x[None], time_step))
        return (next_observation, count, sums), (observation.observation, time_step, done, figures)

    carry = (*env.reset(KEY), zero_sums(env, 1))
    _, (acted_from, time_step, done, figures) = jax.lax.scan(transition, carry, jax.random.split(KEY, 15))
    assert acted_from[:, 0, 0].tolist() == [0, 1, 2, 3, 4] * 3  # never from the final observation
    assert time_step.observation.observation[:, 0, 0].tolist() == [1, 2, 3, 4, 5] * 3
    assert time_step.reward.sum(0).tolist() == [15, 45]
    assert done[:, 0].tolist() == getattr(time_step, ending).tolist() == ([False] * 4 + [True]) * 3
    late = [0, 0, 0, 1 / 4, 2 / 5]
    running = [np.arange(1, 6), (1 + np.arange(1, 6)) / 2, late, 2.0 * np.arange(1, 6)]  # each starts from zero
    for name, expected in zip(("last", "mean", "late", "episode_return"), running, strict=True):
        assert_close(figures[name][:, 0], np.tile(expected, 3))


def test_running_episodes_do_not_touch_the_figures_of_finished_ones():
    done, value = np.array([[True, False], [False, True]]), np.array([[4, np.nan], [np.inf, 2]])
    with jax.disable_jit():  # a compiler may turn a product with zero into zero
        assert envs.finished_episodes(jnp.asarray(done), {"x": jnp.asarray(value)}) == {"x": 3, "episodes": 2}


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_evaluation_counts_no_step_after_the_end_of_an_episode(ending):
    env = Counter(ending)
    figures, trajectory = envs.play(env, lambda observation, key: env.sample_action(key), KEY, 2)
    assert trajectory.tolist() == list(range(1, 9))
    expected = {"last": 5, "mean": 3, "late": 2 / 5, "episode_return": 10, "episode_cost": 5}
    for name in figures | expected:
        assert_close(figures[name], [expected[name]] * 2)


@pytest.mark.parametrize("env", [Coverage(obstacle_density=0.5), Rendezvous()])
@pytest.mark.parametrize("x64", [False, True])
def test_step_and_autoreset_keep_the_types_that_reset_starts_with(env, x64):
    with jax.enable_x64(x64):
        action = jax.eval_shape(env.sample_action, KEY)
        observation, state = jax.eval_shape(env.reset, KEY)
        time_step, next_state = jax.eval_shape(env.step, KEY, state, action)
        assert (time_step.observation, next_state) == (observation, state)
        assert jax.eval_shape(partial(step_autoreset, env), KEY, state, action)[1:] == (state, observation)


# --- 8. Rendezvous --------------------------------------------------------------------------------
def test_rendezvous_moves_left_stays_moves_right_and_pays_minus_the_spread():
    env, start = Rendezvous(n_agents=3, max_steps=4, speed=0.25), jnp.array([-0.9, 0.5, 0.8])
    time_step, state = env.step(KEY, RendezvousState(start, jnp.int32(2)), jnp.array([0, 1, 2]))
    assert_close(state.position, [-1, 0.5, 1])  # the ends of the line
    assert_close(time_step.observation.observation, [(-1, 0.25), (0.5, 0.25), (1, 0.25)])  # position, time left
    assert_close(time_step.observation.critic_input[1], [0.5, 0.25, -1, 0.5, 1])
    assert_close(time_step.reward, [-2] * 3)
    last, state = env.step(KEY, state, jnp.array([2, 0, 0]))
    assert_close(state.position, [-0.75, 0.25, 0.75])
    assert_close(env.episode_summary({"distance": 9.0}, last.info)["distance"], 1.5)
    assert (time_step.truncated, last.truncated, last.terminated, last.cost) == (False, True, False, 0)
    trajectory = jax.tree.map(lambda x: x[None], state)
    assert env.text_map(trajectory) == "." * 5 + "1" + "." * 19 + "1" + "." * 9 + "1" + "." * 5
    blind, _ = jax.eval_shape(replace(env, critic_observation=False).reset, KEY)
    assert blind.critic_observation is None and blind.observation.shape == (3, 2)


def test_continuous_rendezvous_moves_by_a_share_of_the_speed():
    env = Rendezvous(n_agents=3, speed=0.25, continuous_actions=True)
    start = RendezvousState(jnp.array([-0.9, 0.0, 0.5]), jnp.int32(0))
    _, state = env.step(KEY, start, jnp.array([[-1.0], [0.5], [7.0]]))  # clipped to 1
    assert_close(state.position, [-1, 0.125, 0.75])


def test_rendezvous_starts_uniformly_on_the_line():
    env = Rendezvous(n_agents=2)
    position = np.asarray(starts(env).position)
    assert_close(np.sort(position, axis=0), np.linspace([-1, -1], [1, 1], 2000), atol=0.08)  # the quantiles
    assert abs(np.corrcoef(position.T)[0, 1]) < 0.1


@pytest.mark.parametrize("env", [Rendezvous(n_agents=3, continuous_actions=True), Spread()])
def test_sampled_pushes_are_uniform_for_every_agent(env):
    action = np.asarray(jax.vmap(env.sample_action)(KEYS))
    assert action.shape == (len(KEYS), 3, env.action_size)
    quantile = np.quantile(action, [0, 0.25, 0.5, 1], axis=0)
    assert_close(quantile, np.broadcast_to(np.array([-1, -0.5, 0, 1])[:, None, None], quantile.shape), atol=0.08)


@pytest.mark.parametrize("env", [OPEN, Rendezvous(n_agents=9), Spread(n_agents=9, continuous_actions=False)])
def test_sampled_actions_are_uniform_for_every_agent(env):
    action = np.asarray(jax.jit(jax.vmap(env.sample_action))(KEYS))
    share = (action[:, :, None] == np.arange(env.action_size)).mean(0)
    assert_close(share, np.full((9, env.action_size), 1 / env.action_size), atol=0.05)


# --- 9. figures, maps and settings ----------------------------------------------------------------
def test_episode_summary_takes_the_last_coverage_and_the_mean_connectivity():
    mean = {"coverage": 0.5, "connected": 0.25, "connected_weak": 0.75}
    last = {"coverage": 1.0, "connected": 0.0, "connected_weak": 0.0}
    assert Coverage().episode_summary(mean, last) == {"coverage": 100, "connected": 25, "connected_weak": 75}


def test_text_map_shows_owners_walls_and_robots():
    env, state = draw("0.o .#. o1o")
    state = state._replace(owner=state.owner.at[0, 2].set(10).at[2, 0].set(35))
    assert env.text_map(jax.tree.map(lambda x: x[None], state)) == "0*. a\n. # .\nz 1*1"


def test_text_map_counts_the_agents_in_a_place_up_to_nine():
    position = np.array([[-1.0] * 12 + [0.0] * 2])
    line = Rendezvous(n_agents=14).text_map(RendezvousState(position, np.array([3])))
    assert line == "9" + 19 * "." + "2" + 20 * "."


NAN, INF = float("nan"), float("inf")
BAD_SETTINGS = [
    (Coverage, "grid n_agents comm_r horizon view_r n_nearest", [0, -2], "at least 1"),
    (Coverage, "spawn_r", [-1], "at least 0"),
    (partial(Coverage, obstacle_density=0.1), "spawn_r", [0, -1], "at least 1"),
    (Coverage, "obstacle_density local_ratio", [-0.1, 1.1, NAN], "in [0, 1]"),
    (Coverage, "w_connectivity", [-0.1, NAN, INF], "finite and at least 0"),
    (Coverage, "target_fiedler", [0.0, NAN, INF], "finite and above 0"),
    (Rendezvous, "n_agents max_steps", [0, -2], "at least 1"),
    (Spread, "n_agents max_steps", [0, -2], "at least 1"),
    (Spread, "local_ratio", [-0.1, 1.1, NAN], "in [0, 1]"),
    (Rendezvous, "speed", [0.0, 2.1, NAN], "in (0, 2]"),
]


@pytest.mark.parametrize("env, names, values, allowed", BAD_SETTINGS)
def test_bad_settings_are_refused_by_the_name_of_their_flag(env, names, values, allowed):
    for name, value in product(names.split(), values):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ValueError, match=re.escape(f"{flag} must be {allowed}, got {value}")):
            env(**{name: value})


@pytest.mark.parametrize(
    ("fields", "room"),
    [
        ({"spawn_r": 2}, 25),
        ({"obstacle_density": 0.1}, 16),  # of 5 rows up to 3 may be odd ones
        ({"grid": 2}, 4),
        ({"grid": 3, "obstacle_density": 1.0}, 8),  # the only wall is in the middle
        ({"grid": 1, "obstacle_density": 1.0}, 1),
    ],
)
def test_a_team_may_fill_the_spawn_area_but_no_more(fields, room):
    env = Coverage(n_agents=room, **fields)
    _, state = jax.jit(env.reset)(KEY)
    assert not state.wall[tuple(state.position.T)].any() and len(np.unique(state.position, axis=0)) == room
    with pytest.raises(ValueError, match=f"--n-agents must be at most {room}, .* got {room + 1}"):
        Coverage(n_agents=room + 1, **fields)
