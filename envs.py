"""Cooperative multi-agent environments in JAX, and the contract between them and the algorithms.

    env.reset(key)                    -> (AgentObservation, env_state)
    env.step(key, env_state, action)  -> (TimeStep, env_state)        never resets
    step_autoreset(env, key, ...)     -> (TimeStep, env_state, AgentObservation)

An environment is a frozen (hashable) dataclass whose fields are its sizes and coefficients; each becomes a flag, the
comment behind it the help text. It decides what the critic sees: an algorithm only asks for
`AgentObservation.critic_input`. Everything is pure, of static shape, and for one episode: the caller vmaps. All agents
end together: `terminated` cuts bootstrapping, `truncated` (the clock) does not. Actions: [N] int in
0..action_size - 1, or with `continuous_actions` [N, action_size] float, clipped to [-1, 1] by the environment.

Beside `reset` and `step` it has `n_agents`, `horizon` (steps after which any episode is over), `action_size`,
`continuous_actions` and `sample_action(key)`; `episode_summary(mean, last)`, a dict of figures from the mean and the
last value of each info of an episode; `figure_names`, those to print (`track_episode` and `play` add `episode_return`);
`text_map(trajectory)` and, for --render, `draw(trajectory, path)`, from the env_states [T, ...] of an episode.

Axes: N agents, O observation, C critic observation, A actions, H x W grid cells (row, column), V window side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


# --- 1. the contract ------------------------------------------------------------------------------
class AgentObservation(NamedTuple):
    """What the agents perceive. The leading axis is always the agents."""

    observation: Array  # [N, O] what the actor sees
    critic_observation: Array | None = None  # [N, C] what the critic sees instead; None: it sees `observation`
    action_mask: Array | None = None  # [N, A] True = allowed; discrete actions only

    @property
    def critic_input(self) -> Array:
        """[N, C], or [N, O] where the environment offers nothing else."""
        return self.observation if self.critic_observation is None else self.critic_observation


class TimeStep(NamedTuple):
    """The outcome of one step."""

    observation: AgentObservation  # after the step and before any reset
    reward: Array  # [N]
    cost: Array  # [] constraint violation of this step, 0 where there is no constraint
    terminated: Array  # [] bool, the task is over: nothing follows
    truncated: Array  # [] bool, the clock ran out: the future still has a value
    info: dict[str, Array]  # scalars


def step_autoreset(env, key: Array, env_state, action: Array) -> tuple[TimeStep, Any, AgentObservation]:
    """Step, and start a fresh episode where this one ended.

    Returns the true outcome (`time_step.observation` is the final observation, never the reset one), then the state and
    the observation to act from next.
    """
    step_key, reset_key = jax.random.split(key)
    time_step, next_state = env.step(step_key, env_state, action)
    fresh = env.reset(reset_key)
    done = time_step.terminated | time_step.truncated
    observation, env_state = jax.tree.map(
        lambda reset, stepped: jnp.where(done, reset, stepped), fresh, (time_step.observation, next_state)
    )
    return time_step, env_state, observation


class EpisodeSums(NamedTuple):
    """Sums over the steps of a running episode."""

    steps: Array  # []
    reward: Array  # [N]
    info: dict[str, Array]  # scalars


def zero_sums(env, episodes: int) -> EpisodeSums:
    """The sums before the first step, [E, ...]."""
    step = lambda keys: env.step(keys[0], env.reset(keys[1])[1], env.sample_action(keys[2]))[0]
    time_step = jax.eval_shape(step, jax.random.split(jax.random.key(0), 3))
    zeros = partial(jax.tree.map, lambda x: jnp.zeros((episodes, *x.shape)))
    return EpisodeSums(jnp.zeros(episodes, jnp.int32), zeros(time_step.reward), zeros(time_step.info))


def track_episode(env, sums: EpisodeSums, time_step: TimeStep) -> tuple[Array, dict[str, Array], EpisodeSums]:
    """Add a step; -> (done, the figures of the episode so far, sums that start again after the last step)."""
    sums = jax.tree.map(jnp.add, sums, EpisodeSums(1, time_step.reward, time_step.info))
    mean_info = jax.tree.map(lambda x: x / sums.steps, sums.info)
    figures = env.episode_summary(mean_info, time_step.info) | {"episode_return": sums.reward.mean()}
    done = time_step.terminated | time_step.truncated
    return done, figures, jax.tree.map(lambda x: jnp.where(done, jnp.zeros_like(x), x), sums)


def finished_episodes(done: Array, figures: dict[str, Array]) -> dict[str, Array]:
    """Mean figures of the episodes that ended, NaN if none did, and their number `episodes`. done and figures [...]"""
    means = {name: value.mean(where=done) for name, value in figures.items()}
    return means | {"episodes": done.sum()}


def play(env, policy: Callable[[AgentObservation, Array], Array], key: Array, episodes: int) -> tuple[dict, Any]:
    """Fresh episodes of a policy (observation, key) -> action of one team.

    Returns (figures [E] of the episodes with their `episode_return` and `episode_cost`, the env_states [T, ...] of the
    first one, T = horizon).
    """
    keys = jax.random.split(key, (1 + env.horizon, 2, episodes))  # the first row resets
    observation, env_state = jax.vmap(env.reset)(keys[0, 0])

    def step(carry, keys):
        observation, env_state, over = carry
        act_key, env_key = keys
        action = jax.vmap(policy)(observation, act_key)
        time_step, env_state = jax.vmap(env.step)(env_key, env_state, action)
        first = jax.tree.map(lambda x: x[0], env_state)
        outcome = time_step.reward.mean(-1), time_step.cost, time_step.info, ~over, first
        return (time_step.observation, env_state, over | time_step.terminated | time_step.truncated), outcome

    start = observation, env_state, jnp.zeros(episodes, bool)
    _, (reward, cost, info, running, trajectory) = jax.lax.scan(step, start, keys[1:])
    steps = running.sum(0)  # [E]
    total = lambda x: jnp.where(running, x, 0).sum(0)
    mean = jax.tree.map(lambda x: total(x) / steps, info)
    last = jax.tree.map(lambda x: jnp.take_along_axis(x, steps[None] - 1, 0)[0], info)
    sums = {"episode_return": total(reward), "episode_cost": total(cost)}
    return env.episode_summary(mean, last) | sums, trajectory


def check_range(settings, names: str, allowed: str, test: Callable[[Any], bool]) -> None:
    """Raise a one-line ValueError for the first of the named fields that fails the test; fields are named as flags."""
    for name in names.split():
        value = getattr(settings, name)
        if not test(value):
            raise ValueError(f"--{name.replace('_', '-')} must be {allowed}, got {value}")


def save_drawing(figure, draw_step: Callable[[int], None], steps: int, path: str) -> None:
    """Write a matplotlib figure: as .gif all steps, 10 a second, as anything else the last one."""
    from matplotlib.animation import FuncAnimation, PillowWriter

    if path.endswith(".gif"):
        FuncAnimation(figure, draw_step, steps).save(path, PillowWriter(fps=10))
    else:
        draw_step(steps - 1)
        figure.savefig(path)


# --- 2. normalizing observations ------------------------------------------------------------------
class Normalizer(NamedTuple):
    """Running statistics of the raw observations, one pytree: [O] for the actor, [C] for the critic."""

    count: Array  # [] observations of single agents so far
    mean: AgentObservation
    variance: AgentObservation


def init_normalizer(observation: AgentObservation) -> Normalizer:
    """The identity on [-10, 10] (up to epsilon), for observations [..., N, O] or shapes of them."""
    without_mask = observation._replace(action_mask=None)
    mean = jax.tree.map(lambda x: jnp.zeros(x.shape[-1]), without_mask)
    return Normalizer(jnp.zeros(()), mean, jax.tree.map(jnp.ones_like, mean))


def update_normalizer(normalizer: Normalizer, observation: AgentObservation) -> Normalizer:
    """Merge the rows of a batch [..., O]. (Chan et al. 1979)

    Means and variances instead of sums, so that float32 carries 1e9 rows. A feature with a non-finite moment keeps its
    statistics, which then count for these rows as well.
    """
    rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), observation._replace(action_mask=None))
    count = normalizer.count + rows.observation.shape[0]
    weight = rows.observation.shape[0] / count
    shift = jax.tree.map(lambda x, mean: x.mean(0) - mean, rows, normalizer.mean)
    mean = jax.tree.map(lambda mean, shift: mean + weight * shift, normalizer.mean, shift)
    variance = jax.tree.map(
        lambda old, x, shift: (1 - weight) * old + weight * x.var(0) + (jnp.sqrt(weight * (1 - weight)) * shift) ** 2,
        normalizer.variance,
        rows,
        shift,
    )
    finite = jax.tree.map(lambda mean, variance: jnp.isfinite(mean) & jnp.isfinite(variance), mean, variance)
    keep = partial(jax.tree.map, jnp.where, finite)
    return Normalizer(count, keep(mean, normalizer.mean), keep(variance, normalizer.variance))


def normalize(normalizer: Normalizer, observation: AgentObservation) -> AgentObservation:
    """Zero mean, unit variance, clipped to [-10, 10]; leaves the mask alone."""

    def scale(mean, variance, x):
        return jnp.clip((x - mean) / jnp.sqrt(variance + 1e-8), -10, 10)

    scaled = jax.tree.map(scale, normalizer.mean, normalizer.variance, observation._replace(action_mask=None))
    return scaled._replace(action_mask=observation.action_mask)


# --- 3. graphs ------------------------------------------------------------------------------------
def chebyshev_distance(position: Array) -> Array:
    """Pairwise king's-move distance, [..., N, 2] -> [..., N, N]."""
    return jnp.abs(position[..., :, None, :] - position[..., None, :, :]).max(-1)


def fiedler_value(weight: Array) -> Array:
    """Algebraic connectivity lambda_2: the second-smallest eigenvalue of the graph Laplacian (Fiedler 1973).

    weight [N, N]: symmetric edge weights; the diagonal is ignored. Complete graph K_N: N. Star: 1. Path of N nodes:
    2 - 2 cos(pi / N). Two components: 0. A single node counts as K_1: 1.
    """
    n = weight.shape[0]
    if n == 1:
        return jnp.ones((), weight.dtype)
    weight = jnp.where(jnp.eye(n, dtype=bool), 0.0, weight)
    return jnp.linalg.eigvalsh(jnp.diag(weight.sum(-1)) - weight)[1]


# --- 4. Coverage ----------------------------------------------------------------------------------
MOVES = np.array([(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1)])  # stay, north, east, south, west as (row, column)
ZOOM_SCALES = (3, 9, 27)  # box sides in cells of the far field: each level surrounds the one before


class CoverageState(NamedTuple):
    position: Array  # [N, 2] row, column
    last_move: Array  # [N, 2] change of position in the last step
    owner: Array  # [H, W] index of the robot that covered the cell first, -1: not covered
    wall: Array  # [H, W] bool
    belief: Array  # [N, H, W] bool, the cells that a robot knows to be covered
    heard: Array  # [N, N, 2] where the first robot last knew the second to be
    heard_time: Array  # [N, N] the step at which that was true
    time: Array  # [] steps taken


@dataclass(frozen=True)
class Coverage:
    """N robots visit every free cell of a grid within `horizon` steps while their radio graph stays connected.

    Actions: stay, north, east, south, west. A move into a wall or into a cell that is occupied is masked; if two robots
    claim one free cell, the lower index gets it and the other stays. A robot covers the cell it stands on. It knows the
    floor plan, the robots in range or in its window, the cells it covered itself, and what the robots in range knew one
    step ago of covered cells and of the whereabouts of the others (gossip). An episode always takes `horizon` steps,
    since the graph has to hold after the last cell as well, and ends truncated.

    Reward: local_ratio x (cells this robot covered first) + (1 - local_ratio) x (their mean over the team)
    + w_connectivity x (lambda_2 > 0.5). Cost: the shortfall of lambda_2 below `target_fiedler`, as a share of it.
    lambda_2 is the Fiedler value under the edge weights sigmoid(2 (comm_r - distance)), distances in king's moves.

    The size of the observation depends on neither the grid nor N, so that weights move from one size to another.
    """

    figure_names: ClassVar = ("coverage", "connected", "connected_weak", "episode_return")  # the first three in percent
    continuous_actions: ClassVar = False
    grid: int = 16  # cells per side, H = W
    n_agents: int = 4  # robots
    comm_r: int = 5  # radio range in king's moves
    horizon: int = 100  # steps per episode
    spawn_r: int = 2  # the robots start in a random square of 2 spawn_r + 1 cells a side
    view_r: int = 3  # a robot sees a window of 2 view_r + 1 cells a side
    n_nearest: int = 4  # teammates listed in an observation
    obstacle_density: float = 0.0  # chance of a wall where row and column are odd: never cuts the map in two
    local_ratio: float = 0.5  # share of a robot's own cells in its reward; the rest is the team mean
    w_connectivity: float = 0.0  # reward per step with lambda_2 > 0.5; above 0 it makes robots huddle
    target_fiedler: float = 0.6  # lambda_2 from which the cost is zero
    critic_observation: bool = True  # let the critic see the true state of the team

    def __post_init__(self):
        check_range(self, "grid n_agents comm_r horizon view_r n_nearest", "at least 1", lambda value: value >= 1)
        check_range(self, "obstacle_density local_ratio", "in [0, 1]", lambda value: 0 <= value <= 1)
        least = int(self.obstacle_density > 0)  # a spawn area of one cell may be a wall
        check_range(self, "spawn_r", f"at least {least}", lambda value: value >= least)
        check_range(self, "w_connectivity", "finite and at least 0", lambda value: 0 <= value < np.inf)
        check_range(self, "target_fiedler", "finite and above 0", lambda value: 0 < value < np.inf)
        odd = min((self.spawn_side + 1) // 2, self.grid // 2)  # rows of the spawn area that may hold walls, at most
        walls = odd**2 if self.obstacle_density > 0 else 0
        room = self.spawn_side**2 - walls
        allowed = f"at most {room}, the cells of the spawn area that are surely free"
        check_range(self, "n_agents", allowed, lambda value: value <= room)

    @property
    def spawn_side(self) -> int:
        """Side of the spawn area in cells."""
        return min(2 * self.spawn_r + 1, self.grid)

    def reset(self, key: Array) -> tuple[AgentObservation, CoverageState]:
        """A fresh episode: every robot on a cell of its own, in a random square."""
        wall = jnp.zeros((self.grid, self.grid), bool)
        if self.obstacle_density > 0:
            wall_key, key = jax.random.split(key)
            odd = np.arange(self.grid) % 2 == 1
            wall = (odd[:, None] & odd) & jax.random.bernoulli(wall_key, self.obstacle_density, wall.shape)

        draw = jax.random.uniform(key, (2 + self.spawn_side**2,))
        anchor = (draw[:2] * self.grid).astype(jnp.int32)
        corner = jnp.clip(anchor - self.spawn_r, 0, self.grid - self.spawn_side)  # the whole area lies on the grid
        blocked = jax.lax.dynamic_slice(wall, corner, (self.spawn_side, self.spawn_side)).reshape(-1)
        order = jnp.argsort(draw[2:] + blocked)  # random, walls last
        position = corner + jnp.stack(jnp.divmod(order[: self.n_agents], self.spawn_side), -1)

        robot = jnp.arange(self.n_agents)
        row, column = position.T
        state = CoverageState(
            position=position,
            last_move=jnp.zeros_like(position),
            owner=jnp.full(wall.shape, -1).at[row, column].set(robot),
            wall=wall,
            belief=jnp.zeros((self.n_agents, *wall.shape), bool).at[robot, row, column].set(True),
            heard=jnp.broadcast_to(position, (self.n_agents, self.n_agents, 2)),
            heard_time=-(chebyshev_distance(position) > self.comm_r).astype(jnp.int32),  # -1: seen before the start
            time=jnp.zeros((), jnp.int32),
        )
        return self._observe(state, self.fiedler(position)), state

    def step(self, key: Array, state: CoverageState, action: Array) -> tuple[TimeStep, CoverageState]:
        """Move all robots at once, action [N] in 0..4 (see MOVES). Deterministic: the key is part of the contract."""
        position = self._move(state, action)
        robot = jnp.arange(self.n_agents)
        row, column = position.T
        first = state.owner[row, column] < 0
        belief, heard, heard_time = self._gossip(state, position)
        state = CoverageState(
            position=position,
            last_move=position - state.position,
            owner=state.owner.at[row, column].max(jnp.where(first, robot, -1)),
            wall=state.wall,
            belief=belief.at[robot, row, column].set(True),
            heard=heard,
            heard_time=heard_time,
            time=state.time + 1,
        )

        fiedler = self.fiedler(position)
        connected = (fiedler > 0.5).astype(jnp.float32)
        own = first.astype(jnp.float32)
        time_step = TimeStep(
            observation=self._observe(state, fiedler),
            reward=self.local_ratio * own + (1 - self.local_ratio) * own.mean() + self.w_connectivity * connected,
            cost=jnp.maximum(self.target_fiedler - fiedler, 0.0) / self.target_fiedler,
            terminated=jnp.zeros((), bool),
            truncated=state.time >= self.horizon,
            info={
                "coverage": self._coverage(state),
                "fiedler": fiedler,
                "connected": connected,
                "connected_weak": (fiedler > 1e-3).astype(jnp.float32),
            },
        )
        return time_step, state

    def episode_summary(self, mean: dict[str, Array], last: dict[str, Array]) -> dict[str, Array]:
        """Figures of an episode in percent, from the mean and the last value of its info."""
        return {
            "coverage": 100 * last["coverage"],
            "connected": 100 * mean["connected"],
            "connected_weak": 100 * mean["connected_weak"],
        }

    @property
    def action_size(self) -> int:
        return len(MOVES)

    def sample_action(self, key: Array) -> Array:
        """Uniformly random moves, [N]; some may be masked."""
        return jax.random.randint(key, (self.n_agents,), 0, self.action_size)

    def action_mask(self, state: CoverageState) -> Array:
        """[N, 5] True where the cell is on the grid, free, and nobody stands on it. Staying is always allowed."""
        blocked = state.wall.at[state.position[:, 0], state.position[:, 1]].set(True)
        target = jnp.clip(state.position[:, None] + MOVES, 0, self.grid - 1)  # off the grid: the own cell, so blocked
        return (~blocked[target[..., 0], target[..., 1]]).at[:, 0].set(True)

    def fiedler(self, position: Array) -> Array:
        """lambda_2 of the soft radio graph, [N, 2] -> []."""
        return fiedler_value(self._link_weight(position))

    def teammate_offsets(self, observation: Array) -> tuple[Array, Array]:
        """Read from observations [..., O]: (nearest teammate, weakest link), each [..., 3] as (row, column, in range).

        Offsets in cells. The nearest one is where it was last heard of if nobody is in range; the weakest link is the
        farthest teammate in range, zeros if there is none.
        """
        start = 3 * (2 * self.view_r + 1) ** 2 + 16 * len(ZOOM_SCALES)
        slot = observation[..., start : start + 5 * self.n_nearest + 5]
        in_cells = jnp.array([self.comm_r, self.comm_r, 1])
        nearest, weakest = jnp.round(in_cells * slot[..., :3]), jnp.round(in_cells * slot[..., -5:-2])
        return nearest.at[..., 2].set(slot[..., 2] == 1), weakest

    def text_map(self, trajectory: CoverageState) -> str:
        """The map at the end: which robot covered a cell first, `.` missed, `#` wall; `*` behind a cell: a robot."""
        last = jax.tree.map(lambda leaf: np.asarray(leaf[-1]), trajectory)
        owner, wall, position = last.owner, last.wall, last.position
        symbol = np.array(list(".0123456789abcdefghijklmnopqrstuvwxyz"))
        cell = np.where(wall, "#", symbol[1 + owner % 36 * (owner >= 0) - (owner < 0)])
        standing = np.full(wall.shape, " ")
        standing[position[:, 0], position[:, 1]] = "*"
        return "\n".join("".join(np.char.add(*row)).rstrip() for row in zip(cell, standing, strict=True))

    def draw(self, trajectory: CoverageState, path: str) -> None:
        """Picture (.png) or film (.gif): who covered a cell first, the robots and their links; lambda_2 over time."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4.5), layout="constrained")
        grid, graph = figure.subplots(1, 2)
        fiedler = np.asarray(jax.vmap(self.fiedler)(trajectory.position))
        covered = np.asarray(jax.vmap(self._coverage)(trajectory))

        def draw_step(t):
            grid.clear(), graph.clear()
            row, column = trajectory.position[t].T
            owner = np.ma.masked_less(trajectory.owner[t], 0)
            grid.imshow(trajectory.wall[t], cmap="Greys", vmin=0, vmax=1)
            grid.imshow(owner % 20, cmap="tab20", vmin=0, vmax=19, alpha=0.6)
            linked = np.argwhere(np.triu(chebyshev_distance(trajectory.position[t]) <= self.comm_r, 1))
            for pair in linked:
                grid.plot(column[pair], row[pair], color="black", linewidth=1)
            grid.scatter(
                column, row, c=np.arange(self.n_agents) % 20, cmap="tab20", vmin=0, vmax=19, edgecolors="black"
            )
            grid.set(xticks=[], yticks=[], title=f"step {t + 1}, covered {100 * covered[t]:.0f} %")
            graph.plot(np.arange(1, t + 2), fiedler[: t + 1])
            graph.axhline(0.5, color="grey", linestyle="--")
            graph.set(xlim=(0, len(fiedler)), ylim=(0, 1.05 * fiedler.max() + 0.01), xlabel="step", title="lambda_2")

        save_drawing(figure, draw_step, len(fiedler), path)

    def _move(self, state: CoverageState, action: Array) -> Array:
        """Positions after the claims are settled, [N, 2]."""
        allowed = jnp.take_along_axis(self.action_mask(state), action[:, None], 1)
        target = state.position + allowed * jnp.asarray(MOVES)[action]
        same_cell = (target[:, None] == target[None]).all(-1)
        lost = jnp.tril(same_cell, -1).any(1)  # a lower index claims the same cell
        return jnp.where(lost[:, None], state.position, target)

    def _gossip(self, state: CoverageState, position: Array) -> tuple[Array, Array, Array]:
        """What the robots know after hearing what those in range knew one step ago: (belief, heard, heard_time)."""
        in_range = chebyshev_distance(position) <= self.comm_r  # [N, N], itself included
        belief = (in_range[:, :, None, None] & state.belief).any(1)
        told_time = jnp.where(in_range[:, :, None], state.heard_time, -2)  # [listener, speaker, subject]
        told = state.heard[told_time.argmax(1), jnp.arange(self.n_agents)]  # the freshest word on each subject
        heard = jnp.where(in_range[:, :, None], position, told)
        return belief, heard, jnp.where(in_range, state.time + 1, told_time.max(1))

    def _link_weight(self, position: Array) -> Array:
        """Soft edge weights of the radio graph, [N, N]."""
        return jax.nn.sigmoid(2.0 * (self.comm_r - chebyshev_distance(position)))

    def _coverage(self, state: CoverageState) -> Array:
        return (state.owner >= 0).sum() / (~state.wall).sum()

    def _observe(self, state: CoverageState, fiedler: Array) -> AgentObservation:
        unknown = ~state.belief & ~state.wall
        time_left = jnp.broadcast_to(1.0 - state.time / self.horizon, (self.n_agents, 1))
        view = (
            self._window(state, unknown),
            self._far_field(state.position, unknown),
            self._teammates(state),
            state.last_move.astype(jnp.float32),
            time_left,
        )
        observation = jnp.concatenate(view, -1)
        critic_observation = None
        if self.critic_observation:
            truth = jnp.concatenate([observation.mean(0), fiedler[None], self._coverage(state)[None]])
            critic_observation = jnp.concatenate([observation, jnp.tile(truth, (self.n_agents, 1))], -1)
        return AgentObservation(observation, critic_observation, self.action_mask(state))

    def _window(self, state: CoverageState, unknown: Array) -> Array:
        """Egocentric view, three layers: unknown, wall or outside, robot. [N, 3 V V]"""
        r, side = self.view_r, 2 * self.view_r + 1
        plan = jnp.pad(state.wall, r, constant_values=True).astype(jnp.uint8)
        plan = plan.at[state.position[:, 0] + r, state.position[:, 1] + r].add(2)
        code = plan + 4 * jnp.pad(unknown, ((0, 0), (r, r), (r, r))).astype(jnp.uint8)  # three layers in one look-up
        cut = jax.vmap(lambda plane, corner: jax.lax.dynamic_slice(plane, corner, (side, side)))
        window = cut(code, state.position).reshape(self.n_agents, 1, side * side)
        layer = (window & jnp.array([4, 1, 2], jnp.uint8)[:, None]) > 0
        return layer.reshape(self.n_agents, -1).astype(jnp.float32)

    def _far_field(self, position: Array, unknown: Array) -> Array:
        """Unknown ground in 8 boxes around a robot, at each zoom level the share and whether any. [N, 16 levels]

        It ends 40 cells away. One product of the unknown map with 0/1 membership vectors: what a robot pays beyond the
        map update is constant.
        """
        edge = np.stack([-(3 * scale - 1) // 2 + scale * np.arange(4) for scale in ZOOM_SCALES])  # [Z, 4]
        offset = np.arange(self.grid) - position[:, :, None, None, None]  # [N, 2, 1, 1, cell]
        inside = (offset >= edge[:, :3, None]) & (offset < edge[:, 1:, None])
        member = inside.astype(jnp.float32)  # [N, 2, Z, 3, cell]
        strip = jnp.einsum("nzrh,nhw->nzrw", member[:, 0], unknown.astype(jnp.float32))
        box = jnp.einsum("nzrw,nzcw->nzrc", strip, member[:, 1]).reshape(self.n_agents, -1, 9)
        around = jnp.delete(box, 4, axis=2, assume_unique_indices=True)
        share = around / np.square(ZOOM_SCALES)[:, None]
        return jnp.concatenate([share, around > 0], -1).reshape(self.n_agents, -1)

    def _teammates(self, state: CoverageState) -> Array:
        """The nearest teammates, then the weakest link, then the own soft degree. [N, 5 n_nearest + 6]

        A listed teammate is (row offset / comm_r, column offset / comm_r, 1 / (1 + age of the news), row and column of
        its last move); the third is 1 for one in range, those come first, and only their moves are known. The weakest
        link is the farthest teammate in range. Zeros where there is none. The degree is the strength of all signals
        received, which fades with distance and does not end at comm_r.
        """
        itself = jnp.eye(self.n_agents, dtype=bool)
        age = state.time - state.heard_time
        offset = (state.heard - state.position[:, None]) / self.comm_r
        distance = jnp.abs(offset).max(-1)
        last_move = jnp.where(age[..., None] > 0, 0, state.last_move)
        teammate = jnp.concatenate([offset, 1 / (1 + age)[..., None], last_move], -1) * ~itself[..., None]

        order = jnp.argsort(jnp.where(itself, jnp.inf, distance + 1e3 * (age > 0)), axis=1)[:, : self.n_nearest]
        nearest = jnp.take_along_axis(teammate, order[..., None], 1).reshape(self.n_agents, -1)
        nearest = jnp.pad(nearest, ((0, 0), (0, 5 * self.n_nearest - nearest.shape[1])))
        farthest = jnp.where(itself | (age > 0), -1.0, distance).argmax(1)
        link = jnp.take_along_axis(teammate, farthest[:, None, None], 1)[:, 0]
        link = link * (link[:, 2:3] == 1)  # with nobody in range the maximum fell on a stale entry
        degree = (self._link_weight(state.position) * ~itself).sum(1, keepdims=True)
        return jnp.concatenate([nearest, link, degree / 4], -1)


# --- 5. Spread ------------------------------------------------------------------------------------
# The particle world of mpe2's simple_spread_v3. Units are those of its square [-1, 1]^2, time units are 10 steps.
TIME_STEP, DAMPING, FORCE_GAIN = 0.1, 0.25, 5.0
CONTACT_DISTANCE, CONTACT_STIFFNESS, CONTACT_SOFTNESS = 0.3, 100.0, 1e-3
DIRECTIONS = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])  # none, -x, +x, -y, +y


class SpreadState(NamedTuple):
    position: Array  # [N, 2] x, y
    velocity: Array  # [N, 2]
    landmark: Array  # [N, 2]
    time: Array  # [] steps taken


def safe_norm(x: Array) -> Array:
    """Euclidean length over the last axis, [..., 2] -> [...]; at zero its gradient is zero instead of NaN."""
    square = jnp.square(x).sum(-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


@dataclass(frozen=True)
class Spread:
    """N agents cover N landmarks without running into each other: simple_spread, equal step for step to mpe2 1.1.1.

    Continuous actions push along x and y. They relate to the five entries (none, -x, +x, -y, +y) of the reference by
    action = (e2 - e1, e4 - e3), each entry clipped to [0, 1]. Discrete actions are those five directions. A push moves
    an agent from the next step on, since positions are integrated with the old velocities. Ends truncated after
    `max_steps`, without resetting; two agents on one point exert no force on each other (the reference: NaN).

    Reward: (1 - local_ratio) x minus the distances of all landmarks to their nearest agents - local_ratio x the number
    of agents this one touches. The critic sees the joint observation, its own agent first and the others by index.
    """

    figure_names: ClassVar = ("episode_return", "collisions", "covered")  # covered: percent of landmarks, at the end
    n_agents: int = 3  # agents, and as many landmarks
    max_steps: int = 25  # steps per episode
    local_ratio: float = 0.5  # weight of collisions in the reward; the rest is for the landmarks
    continuous_actions: bool = True  # push by a vector, or in one of four directions or not at all
    critic_observation: bool = True  # let the critic see the joint observation

    def __post_init__(self):
        check_range(self, "n_agents max_steps", "at least 1", lambda value: value >= 1)
        check_range(self, "local_ratio", "in [0, 1]", lambda value: 0 <= value <= 1)

    @property
    def horizon(self) -> int:
        return self.max_steps

    @property
    def action_size(self) -> int:
        return 2 if self.continuous_actions else len(DIRECTIONS)

    def sample_action(self, key: Array) -> Array:
        """Uniformly random pushes, [N, 2] or [N]."""
        if self.continuous_actions:
            return jax.random.uniform(key, (self.n_agents, 2), minval=-1.0)
        return jax.random.randint(key, (self.n_agents,), 0, self.action_size)

    def reset(self, key: Array) -> tuple[AgentObservation, SpreadState]:
        """Agents and landmarks uniform on the square, at rest."""
        position_key, landmark_key = jax.random.split(key)
        state = SpreadState(
            position=jax.random.uniform(position_key, (self.n_agents, 2), minval=-1.0),
            velocity=jnp.zeros((self.n_agents, 2)),
            landmark=jax.random.uniform(landmark_key, (self.n_agents, 2), minval=-1.0),
            time=jnp.zeros((), jnp.int32),
        )
        return self._observe(state), state

    def step(self, key: Array, state: SpreadState, action: Array) -> tuple[TimeStep, SpreadState]:
        """Push all agents at once, action [N, 2] clipped to [-1, 1] or [N] in 0..4. Deterministic."""
        command = jnp.clip(action, -1.0, 1.0) if self.continuous_actions else jnp.asarray(DIRECTIONS)[action]
        force = FORCE_GAIN * command + self._contact_force(state.position)
        state = SpreadState(
            position=state.position + TIME_STEP * state.velocity,
            velocity=(1 - DAMPING) * state.velocity + TIME_STEP * force,
            landmark=state.landmark,
            time=state.time + 1,
        )
        touching = safe_norm(state.position[:, None] - state.position) < CONTACT_DISTANCE
        collisions = touching.sum(-1) - 1.0  # without itself
        nearest = safe_norm(state.landmark[:, None] - state.position).min(-1)  # [N] of each landmark
        time_step = TimeStep(
            observation=self._observe(state),
            reward=-(1 - self.local_ratio) * nearest.sum() - self.local_ratio * collisions,
            cost=jnp.zeros(()),
            terminated=jnp.zeros((), bool),
            truncated=state.time >= self.max_steps,
            info={"collisions": collisions.mean(), "covered": (nearest < 0.1).mean()},
        )
        return time_step, state

    def episode_summary(self, mean: dict[str, Array], last: dict[str, Array]) -> dict[str, Array]:
        """Contacts per agent over the episode, and the share of landmarks with an agent within 0.1 at its end."""
        return {"collisions": self.max_steps * mean["collisions"], "covered": 100 * last["covered"]}

    def text_map(self, trajectory: SpreadState) -> str:
        """The square [-1.2, 1.2]^2: `x` landmarks, `.` the tracks, digits where the agents ended."""
        position, landmark = np.asarray(trajectory.position), np.asarray(trajectory.landmark)
        symbol = np.full((25, 49), " ")
        layers = [(position.reshape(-1, 2), "."), (landmark[-1], "x")]
        layers += [(position[-1, n : n + 1], str(n % 10)) for n in range(self.n_agents)]
        for place, character in layers:
            column, row = np.round((np.clip(place, -1.2, 1.2) + 1.2) * (20, 10)).astype(int).T
            symbol[24 - row, column] = character
        return "\n".join("".join(line).rstrip() for line in symbol)

    def draw(self, trajectory: SpreadState, path: str) -> None:
        """Picture (.png) or film (.gif): landmarks, tracks, and the agents at the size at which they touch."""
        from matplotlib.figure import Figure
        from matplotlib.patches import Circle

        figure = Figure(figsize=(5, 5), layout="constrained")
        square = figure.subplots()
        position, extent = trajectory.position, max(1.2, 0.2 + np.abs(trajectory.position).max())

        def draw_step(t):
            square.clear()
            square.scatter(*trajectory.landmark[t].T, marker="x", color="black")
            for n in range(self.n_agents):
                (track,) = square.plot(*position[: t + 1, n].T)
                square.add_patch(Circle(position[t, n], CONTACT_DISTANCE / 2, color=track.get_color(), alpha=0.4))
            square.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", title=f"step {t + 1}")

        save_drawing(figure, draw_step, len(position), path)

    def _contact_force(self, position: Array) -> Array:
        """Sum of the repulsions, a smooth maximum of zero and the overlap along the line between two. [N, 2]"""
        offset = position[:, None] - position
        distance = safe_norm(offset)
        overlap = CONTACT_SOFTNESS * jnp.logaddexp(0.0, (CONTACT_DISTANCE - distance) / CONTACT_SOFTNESS)
        direction = offset / jnp.where(distance > 0, distance, 1.0)[..., None]  # zero for the agent itself
        return CONTACT_STIFFNESS * (overlap[..., None] * direction).sum(1)

    def _observe(self, state: SpreadState) -> AgentObservation:
        """Velocity, position, offsets of landmarks and of the others by index, their silent channels (zeros)."""
        n = self.n_agents
        other = np.array([[k for k in range(n) if k != i] for i in range(n)], int)  # [N, N - 1]
        view = (
            state.velocity,
            state.position,
            (state.landmark - state.position[:, None]).reshape(n, -1),
            (state.position[other] - state.position[:, None]).reshape(n, -1),
            jnp.zeros((n, 2 * (n - 1))),
        )
        observation = jnp.concatenate(view, -1)
        if not self.critic_observation:
            return AgentObservation(observation)
        joint = jnp.concatenate([observation, observation[other].reshape(n, -1)], -1)
        return AgentObservation(observation, joint)


# --- 6. Rendezvous --------------------------------------------------------------------------------
class RendezvousState(NamedTuple):
    position: Array  # [N] in [-1, 1]
    time: Array  # [] steps taken


@dataclass(frozen=True)
class Rendezvous:
    """N agents on a line meet. Each sees only itself; the critic sees where everybody is.

    Actions: left, stay, right by `speed`, or by any share of it. Reward of every agent: minus the distance between the
    outermost two. Ends truncated after `max_steps`. The smallest task in which the input of the critic matters.
    """

    figure_names: ClassVar = ("distance", "episode_return")  # distance of the outermost two at the end
    n_agents: int = 2  # agents
    max_steps: int = 10  # steps per episode
    speed: float = 0.1  # distance per step; the line runs from -1 to 1
    continuous_actions: bool = False  # any share of the speed, or left, stay, right
    critic_observation: bool = True  # let the critic see all positions

    def __post_init__(self):
        check_range(self, "n_agents max_steps", "at least 1", lambda value: value >= 1)
        check_range(self, "speed", "in (0, 2]", lambda value: 0 < value <= 2)

    @property
    def horizon(self) -> int:
        return self.max_steps

    @property
    def action_size(self) -> int:
        return 1 if self.continuous_actions else 3

    def sample_action(self, key: Array) -> Array:
        """Uniformly random moves, [N, 1] or [N]."""
        if self.continuous_actions:
            return jax.random.uniform(key, (self.n_agents, 1), minval=-1.0)
        return jax.random.randint(key, (self.n_agents,), 0, self.action_size)

    def reset(self, key: Array) -> tuple[AgentObservation, RendezvousState]:
        """Positions uniform on the line."""
        state = RendezvousState(jax.random.uniform(key, (self.n_agents,), minval=-1.0), jnp.zeros((), jnp.int32))
        return self._observe(state), state

    def step(self, key: Array, state: RendezvousState, action: Array) -> tuple[TimeStep, RendezvousState]:
        """Move all agents at once, action [N, 1] clipped to [-1, 1] or [N] in 0..2. Deterministic."""
        move = jnp.clip(action[:, 0], -1.0, 1.0) if self.continuous_actions else action - 1
        position = jnp.clip(state.position + self.speed * move, -1.0, 1.0)
        state = RendezvousState(position, state.time + 1)
        distance = position.max() - position.min()
        time_step = TimeStep(
            observation=self._observe(state),
            reward=jnp.full(self.n_agents, -distance),
            cost=jnp.zeros(()),
            terminated=jnp.zeros((), bool),
            truncated=state.time >= self.max_steps,
            info={"distance": distance},
        )
        return time_step, state

    def episode_summary(self, mean: dict[str, Array], last: dict[str, Array]) -> dict[str, Array]:
        """Distance between the outermost agents at the end of an episode."""
        return {"distance": last["distance"]}

    def text_map(self, trajectory: RendezvousState) -> str:
        """The line from -1 to 1 at the end; a digit is the number of agents in that place, 9 also for more."""
        place = np.round((np.asarray(trajectory.position[-1]) + 1) * 20).astype(int)
        count = np.bincount(place, minlength=41)
        return "".join(np.where(count > 0, np.minimum(count, 9).astype(str), "."))

    def draw(self, trajectory: RendezvousState, path: str) -> None:
        """Picture (.png) or film (.gif): the positions over time."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 4), layout="constrained")
        line = figure.subplots()

        def draw_step(t):
            line.clear()
            line.plot(np.arange(1, t + 2), trajectory.position[: t + 1], marker=".")
            line.set(xlim=(0, len(trajectory.time)), ylim=(-1.05, 1.05), xlabel="step", title="position")

        save_drawing(figure, draw_step, len(trajectory.time), path)

    def _observe(self, state: RendezvousState) -> AgentObservation:
        time_left = jnp.full((self.n_agents, 1), 1.0 - state.time / self.max_steps)
        observation = jnp.concatenate([state.position[:, None], time_left], -1)
        if not self.critic_observation:
            return AgentObservation(observation)
        everybody = jnp.tile(state.position, (self.n_agents, 1))
        return AgentObservation(observation, jnp.concatenate([observation, everybody], -1))
