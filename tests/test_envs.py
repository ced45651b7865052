"""envs.py against closed forms, hand-drawn maps, and slow NumPy versions written from its docstrings."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs import AgentObservation, Coverage, CoverageState, TimeStep, chebyshev_distance, fiedler_value, step_autoreset

STAY, NORTH, EAST, SOUTH, WEST = range(5)
STEP = {STAY: (0, 0), NORTH: (-1, 0), EAST: (0, 1), SOUTH: (1, 0), WEST: (0, -1)}
KEY = jax.random.key(0)

reset = jax.jit(Coverage.reset, static_argnums=0)
step = jax.jit(Coverage.step, static_argnums=0)
mask_of = jax.jit(Coverage.action_mask, static_argnums=0)
autoreset = jax.jit(step_autoreset, static_argnums=0)


def draw(text, **settings):
    """(env, state at time 0) from a map: `.` free, `#` wall, `o` covered by the last robot, digits the robots."""
    cell = np.array([list(line) for line in text.split()])
    robot = np.arange(np.char.isdigit(cell).sum())
    position = np.array([np.argwhere(cell == str(i))[0] for i in robot])
    owner = np.where(cell == "o", robot[-1], -1)
    owner[tuple(position.T)] = robot
    state = CoverageState(
        position=position,
        owner=owner,
        wall=cell == "#",
        belief=owner == robot[:, None, None],
        heard=np.tile(position, (len(robot), 1, 1)),
        heard_time=np.zeros((len(robot), len(robot)), int),
        time=np.zeros((), int),
    )
    return Coverage(grid=len(cell), n_agents=len(robot), **settings), jax.tree.map(jnp.asarray, state)


def play(env, state, *joint_actions):
    """All (time_step, state) pairs that follow, as NumPy."""
    record = []
    for action in joint_actions:
        time_step, state = step(env, KEY, state, np.array(action))
        record.append(jax.device_get((time_step, state)))
    return record


def assert_equal_trees(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def king(a, b):
    return max(abs(int(a[0]) - int(b[0])), abs(int(a[1]) - int(b[1])))


# --- 1. lambda_2 ----------------------------------------------------------------------------------
def ring(n, closed):
    weight = np.eye(n, k=1)
    weight[0, -1] = closed
    return weight + weight.T


GRAPHS = {
    **{f"complete {n}": (np.ones((n, n)), n) for n in (2, 3, 10)},
    "star": (np.array([[0, 1, 1, 1, 1]] + [[1, 0, 0, 0, 0]] * 4), 1),
    **{f"path {n}": (ring(n, 0), 2 - 2 * np.cos(np.pi / n)) for n in (3, 6)},
    **{f"cycle {n}": (ring(n, 1), 2 - 2 * np.cos(2 * np.pi / n)) for n in (4, 7)},
    "two components": (np.kron(np.eye(2), np.ones((3, 3))), 0),
    "weights scale it": (0.25 * ring(6, 0), 0.25 * (2 - 2 * np.cos(np.pi / 6))),
    "self-loops are ignored": (ring(6, 0) + np.diag(np.arange(6.0)), 2 - 2 * np.cos(np.pi / 6)),
    "single node": (np.zeros((1, 1)), 1),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_fiedler_value_of_known_graphs(name):
    weight, expected = GRAPHS[name]
    np.testing.assert_allclose(fiedler_value(jnp.asarray(weight, jnp.float32)), expected, atol=2e-6)


def test_fiedler_value_of_a_random_weighted_graph_matches_its_hand_built_laplacian():
    weight = np.random.default_rng(0).uniform(size=(7, 7))
    laplacian = np.zeros((7, 7))
    for i in range(7):
        for j in range(i):
            weight[i, j] = weight[j, i]
            edge = np.eye(7)[i] - np.eye(7)[j]
            laplacian += weight[i, j] * np.outer(edge, edge)
    expected = np.linalg.eigvalsh(laplacian)[1]
    np.testing.assert_allclose(fiedler_value(jnp.asarray(weight, jnp.float32)), expected, rtol=1e-5)


def test_chebyshev_distance_is_the_king_move_distance_within_each_batch_entry():
    position = np.array([[(0, 0), (3, -4), (5, 1)], [(2, 2), (2, 3), (0, 0)]])
    expected = [[[0, 4, 5], [4, 0, 5], [5, 5, 0]], [[0, 1, 2], [1, 0, 3], [2, 3, 0]]]
    np.testing.assert_array_equal(chebyshev_distance(jnp.asarray(position)), expected)


def slow_fiedler(env, position):
    if env.n_agents == 1:
        return 1.0
    weight = [[1 / (1 + np.exp(-2.0 * (env.comm_r - king(a, b)))) for b in position] for a in position]
    weight = np.array(weight) * (1 - np.eye(len(position)))
    return np.linalg.eigvalsh(np.diag(weight.sum(1)) - weight)[1]


def test_a_line_of_four_with_gaps_of_four_is_just_connected():
    env = Coverage(n_agents=4, comm_r=5)
    line = np.array([(3, column) for column in (0, 4, 8, 12)])
    assert 0.515 < slow_fiedler(env, line) < 0.517
    np.testing.assert_allclose(env.fiedler(jnp.asarray(line)), slow_fiedler(env, line), rtol=1e-5)


# --- 2. moves, reward, cost -----------------------------------------------------------------------
def test_action_mask_closes_walls_edges_and_occupied_cells_but_never_staying():
    env, state = draw("""
        01....
        2.....
        ..#...
        .34#..
        ......
        .....5""")
    expected = [  # stay, north, east, south, west
        [1, 0, 0, 0, 0],  # edges north and west, robots east and south
        [1, 0, 1, 1, 0],
        [1, 0, 1, 1, 0],
        [1, 1, 0, 1, 1],  # robot east
        [1, 0, 0, 1, 0],  # walls north and east, robot west
        [1, 1, 0, 0, 1],
    ]
    assert_equal_trees(mask_of(env, state), np.array(expected, bool))
    assert_equal_trees(play(env, state, [STAY] * 6)[0][0].observation.action_mask, np.array(expected, bool))


MOVE_CASES = {  # before, joint action, after
    "each action has its direction": (
        "..... ..1.. .402. ..3.. .....",
        [STAY, NORTH, EAST, SOUTH, WEST],
        "..1.. ..... 4.0.2 ..... ..3..",
    ),
    "the lower index gets a claimed cell from the west": ("0.1 ... ...", [EAST, WEST], ".01 ... ..."),
    "the lower index gets a claimed cell from the east": ("1.0 ... ...", [WEST, EAST], "10. ... ..."),
    "of three claims one is granted": (".2. 0.1 ...", [EAST, WEST, SOUTH], ".2. .01 ..."),
    "a cell that is being left is still occupied": ("012. .... .... ....", [EAST] * 3, "01.2 .... .... ...."),
    "nobody enters the cell of one who lost a claim": ("21.0 .... .... ....", [WEST, EAST, EAST], "210. .... .... ...."),
    "robots do not swap": ("01. ... ...", [EAST, WEST], "01. ... ..."),
    "a masked action leaves the robot in place": ("0#. ..1 2..", [EAST, EAST, SOUTH], "0#. ..1 2.."),
    "a masked action claims nothing": ("0.. ... 1..", [NORTH, NORTH], "0.. 1.. ..."),
}


@pytest.mark.parametrize("name", MOVE_CASES)
def test_moves_on_a_hand_drawn_map(name):
    before, action, after = MOVE_CASES[name]
    [(_, state)] = play(*draw(before), action)
    np.testing.assert_array_equal(state.position, draw(after)[1].position)


@pytest.mark.parametrize("local_ratio, w_connectivity", [(1.0, 0.0), (0.5, 0.0), (0.0, 0.0), (0.5, 0.25)])
def test_only_the_first_visitor_is_rewarded(local_ratio, w_connectivity):
    env, state = draw("0..o #..1 .... 2...", local_ratio=local_ratio, w_connectivity=w_connectivity)
    record = play(env, state, [EAST, NORTH, NORTH], [EAST, SOUTH, SOUTH], [WEST, WEST, EAST], [EAST, WEST, STAY])
    own = np.array([(1, 0, 1), (1, 0, 0), (0, 1, 1), (0, 1, 0)])  # the corner was covered before; robots 0 and 2 go back
    covered = 4 + own.sum(1).cumsum()
    for (time_step, _), own_cells, cells in zip(record, own, covered, strict=True):
        expected = local_ratio * own_cells + (1 - local_ratio) * own_cells.sum() / 3 + w_connectivity
        np.testing.assert_allclose(time_step.reward, expected, atol=1e-6)
        np.testing.assert_allclose(time_step.info["coverage"], cells / 15, rtol=1e-6)
    owner = [(0, 0, 0, 2), (-1, 1, 1, 1), (2, -1, -1, -1), (2, 2, -1, -1)]
    np.testing.assert_array_equal(record[-1][1].owner, owner)


@pytest.mark.parametrize("distance, connected, weak", [(5, 1, 1), (6, 0, 1), (8, 0, 1), (9, 0, 0)])
def test_cost_and_connectivity_of_two_robots_in_closed_form(distance, connected, weak):
    """K_2 with weight w has lambda_2 = 2 w; the bars are 0.5 and 1e-3, and only the higher one pays."""
    env, state = draw(" ".join(["0.........", *["." * 10] * 8, "." * distance + "1" + "." * (9 - distance)]))
    env = replace(env, w_connectivity=0.25)
    state = state._replace(position=state.position.at[1, 0].set(1))  # the same distance, one axis apart
    [(time_step, _)] = play(env, state, [STAY, STAY])
    fiedler = 2 / (1 + np.exp(2.0 * (distance - 5)))
    np.testing.assert_allclose(time_step.info["fiedler"], fiedler, rtol=1e-4, atol=1e-6)
    assert (time_step.info["connected"], time_step.info["connected_weak"]) == (connected, weak)
    np.testing.assert_allclose(time_step.cost, max(0, 0.6 - fiedler) / 0.6, atol=1e-6)
    assert distance > 5 or time_step.cost == 0  # above the target exactly zero
    np.testing.assert_allclose(time_step.reward, 0.25 * connected)


# --- 3. whole episodes against slow NumPy ---------------------------------------------------------
EPISODES = {
    "N=4 scattered": (Coverage(grid=12, n_agents=4, comm_r=3, horizon=40), 40),
    "N=7 crowded": (Coverage(grid=7, n_agents=7, comm_r=2, view_r=1, n_nearest=3, obstacle_density=0.6), 200),
    "N=2 far sight": (Coverage(grid=30, n_agents=2, comm_r=4, view_r=5, local_ratio=0.2, w_connectivity=0.5), 40),
    "N=1": (Coverage(grid=5, n_agents=1, critic_observation=False), 20),
}


@pytest.fixture(scope="module", params=EPISODES)
def episode(request):
    """(env, [(state, action, time_step, next_state)]) under random joint actions, many of them masked."""
    env, n_steps = EPISODES[request.param]
    rng = np.random.default_rng(0)
    state = jax.device_get(reset(env, KEY)[1])
    drift = rng.integers(1, 5, env.n_agents)  # every robot prefers a direction, so that the team also falls apart
    record = []
    for _ in range(n_steps):
        action = np.where(rng.random(env.n_agents) < 0.3, drift, rng.integers(0, 5, env.n_agents))
        [(time_step, next_state)] = play(env, state, action)
        record.append((state, action, time_step, next_state))
        state = next_state
    return env, record


def slow_move(env, wall, position, action):
    occupied, granted = {tuple(p) for p in position}, []
    for here, a in zip(position, action, strict=True):
        row, column = here[0] + STEP[a][0], here[1] + STEP[a][1]
        inside = 0 <= row < env.grid and 0 <= column < env.grid
        free = inside and not wall[row, column] and (row, column) not in occupied | set(granted)
        granted.append((row, column) if free else tuple(here))
    return np.array(granted)


def slow_gossip(env, before, position):
    belief, heard, heard_time = before.belief.copy(), before.heard.copy(), before.heard_time.copy()
    robots = range(env.n_agents)
    for i, j in ((i, j) for i in robots for j in robots if king(position[i], position[j]) <= env.comm_r):
        belief[i] |= before.belief[j]
        for k in robots:
            if king(position[i], position[k]) <= env.comm_r:
                heard[i, k], heard_time[i, k] = position[k], before.time + 1
            elif before.heard_time[j, k] > heard_time[i, k]:
                heard[i, k], heard_time[i, k] = before.heard[j, k], before.heard_time[j, k]
    for i in robots:
        belief[i, position[i][0], position[i][1]] = True
    return belief, heard, heard_time


def test_every_transition_matches_a_slow_loop(episode):
    env, record = episode
    for before, action, time_step, after in record:
        position = slow_move(env, before.wall, before.position, action)
        owner, own = before.owner.copy(), np.zeros(env.n_agents)
        for i, cell in enumerate(map(tuple, position)):
            if owner[cell] < 0:
                owner[cell], own[i] = i, 1
        belief, heard, heard_time = slow_gossip(env, before, position)
        assert_equal_trees(
            after, CoverageState(position, owner, before.wall, belief, heard, heard_time, before.time + 1)
        )

        fiedler = slow_fiedler(env, position)
        reward = env.local_ratio * own + (1 - env.local_ratio) * own.mean() + env.w_connectivity * (fiedler > 0.5)
        cost = max(0, env.target_fiedler - fiedler) / env.target_fiedler
        coverage = (owner >= 0).sum() / (~before.wall).sum()
        np.testing.assert_allclose(time_step.reward, reward, atol=1e-6)
        np.testing.assert_allclose(time_step.cost, cost, atol=1e-5)
        np.testing.assert_allclose(time_step.info["fiedler"], fiedler, atol=1e-5)
        np.testing.assert_allclose(time_step.info["coverage"], coverage, rtol=1e-6)


def test_robots_never_share_a_cell_or_enter_a_wall(episode):
    env, record = episode
    refused = 0
    for before, action, _, after in record:
        assert ((after.position >= 0) & (after.position < env.grid)).all()
        assert len({tuple(p) for p in after.position}) == env.n_agents
        assert not after.wall[tuple(after.position.T)].any()
        refused += ((action != STAY) & (after.position == before.position).all(1)).sum()
    assert refused > 0  # the episode did send moves that are not possible


# --- 4. gossip ------------------------------------------------------------------------------------
def test_news_travels_one_hop_per_step_and_never_out_of_range():
    """Robots 0 1 2 3 are a chain of gaps of exactly comm_r, robot 4 hears nobody. Robot 3 walks south, cell by cell."""
    env, state = draw(" ".join(["0....1....2....3", *["." * 16] * 14, "....4..........."]), comm_r=5)
    record = [(None, jax.device_get(state)), *play(env, state, *[[STAY, STAY, STAY, SOUTH, STAY]] * 5)]
    for time, (_, now) in enumerate(record):
        for listener, hops in ((2, 1), (1, 2), (0, 3)):
            known = [row for row in range(16) if now.belief[listener, row, 15]]
            assert known == list(range(max(0, time - hops + 1)))  # the cell of step t arrives at step t + hops
            news = max(0, time - hops + 1)  # positions: those in range are heard at once, then one step a hop
            assert now.heard_time[listener, 3] == news
            assert tuple(now.heard[listener, 3]) == (news, 15)
        assert np.argwhere(now.belief[4]).tolist() == [[15, 4]]
        assert now.heard_time[4].tolist() == [0, 0, 0, 0, time]
        assert_equal_trees(now.heard[4], record[0][1].position)


# --- 5. observations ------------------------------------------------------------------------------
def slow_observation(env, state, i):
    """What robot i perceives, cell by cell, teammate by teammate."""
    here, cells = state.position[i], range(env.grid)
    robots = {tuple(p) for p in state.position}
    unknown = {(r, c) for r in cells for c in cells if not state.wall[r, c] and not state.belief[i, r, c]}
    floor = {(r, c) for r in cells for c in cells if not state.wall[r, c]}
    reach = range(-env.view_r, env.view_r + 1)
    window = [(here[0] + r, here[1] + c) for r in reach for c in reach]
    view = [cell in unknown for cell in window] + [cell not in floor for cell in window]
    view += [cell in robots for cell in window]

    for side in (3, 9, 27):  # 3 x 3 boxes of this side, the middle one centred on the robot
        count = np.zeros((3, 3))
        for row, column in unknown:
            box = (row - here[0] + side // 2) // side + 1, (column - here[1] + side // 2) // side + 1
            if box in np.ndindex(3, 3):
                count[box] += 1
        around = [count[box] for box in np.ndindex(3, 3) if box != (1, 1)]
        view += [cells / side**2 for cells in around] + [cells > 0 for cells in around]

    def entry(j):
        age = state.time - state.heard_time[i, j]
        return [*(state.heard[i, j] - here) / env.comm_r, 1 / (1 + age)]

    distance = {j: king(state.heard[i, j], here) for j in range(env.n_agents) if j != i}
    in_range = [j for j in distance if king(state.position[j], here) <= env.comm_r]
    listed = sorted(distance, key=lambda j: (j not in in_range, distance[j]))[: env.n_nearest]
    for j in listed:
        view += entry(j)
    view += [0, 0, 0] * (env.n_nearest - len(listed))
    view += entry(max(in_range, key=distance.get)) if in_range else [0, 0, 0]
    view += [sum(1 / (1 + np.exp(2.0 * (king(state.position[j], here) - env.comm_r))) for j in distance) / 4]
    return [*view, 1 - state.time / env.horizon]


def test_observations_match_a_slow_loop_over_cells_and_teammates(episode):
    env, record = episode
    for _, _, time_step, state in record[::6]:
        expected = np.array([slow_observation(env, state, i) for i in range(env.n_agents)], float)
        actual = time_step.observation
        np.testing.assert_allclose(actual.observation, expected, atol=1e-6)
        mask = [[a == STAY or tuple(slow_move(env, state.wall, state.position, [a if j == i else STAY for j in range(env.n_agents)])[i]) != tuple(state.position[i]) for a in range(5)] for i in range(env.n_agents)]
        assert_equal_trees(actual.action_mask, np.array(mask))
        if env.critic_observation:
            truth = [*expected.mean(0), slow_fiedler(env, state.position), (state.owner >= 0).sum() / (~state.wall).sum()]
            critic = np.hstack([expected, np.tile(truth, (env.n_agents, 1))])
            np.testing.assert_allclose(actual.critic_observation, critic, atol=1e-5)
            assert actual.critic_input is actual.critic_observation
        else:
            assert actual.critic_observation is None and actual.critic_input is actual.observation
