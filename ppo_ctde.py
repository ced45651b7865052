# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.1,!=0.10.2", "jaxlib>=0.10.1,!=0.10.2", "equinox>=0.13", "optax>=0.2.5", "numpy>=2.0"]
# ///
"""PPO with centralized training and decentralized execution (CTDE), and a price on the constraint.

All agents share one actor, which sees `observation`; the critic sees `critic_input`, the environment's choice. With
--no-critic-observation the environment offers nothing more, and this becomes independent PPO with parameter sharing.
One iteration:

    collect num_steps steps in num_envs environments
    reward <- reward - lagrange_multiplier * cost
    advantage, target <- GAE; termination cuts the bootstrap, truncation takes the value of the final observation
    num_epochs x num_minibatches gradient steps on the clipped surrogate, the value error and the entropy bonus
    normalizer <- statistics of the raw observations
    lagrange_multiplier <- max(0, lagrange_multiplier + lagrange_lr (mean cost - cost_limit))    (dual ascent)

Papers: Schulman et al. 2017 (PPO), Yu et al. 2022 (MAPPO), Ray et al. 2019 (PPO-Lagrangian). Deviations from MAPPO: no
value normalization or clipping, squared error instead of the Huber loss, no recurrence, advantages normalized per
minibatch, one Adam and one gradient norm for both networks.

Axes: S seeds, T steps, E environments, N agents, B batch, O/C/A sizes of observation, critic observation and action.

    python ppo_ctde.py --grid 16 --n-agents 4
"""

import argparse
import dataclasses
import datetime
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.experimental import io_callback
from jax.tree_util import keystr, tree_leaves_with_path

from envs import (
    AgentObservation,
    Coverage,
    EpisodeSums,
    Normalizer,
    Rendezvous,
    Spread,
    check_range,
    finished_episodes,
    init_normalizer,
    normalize,
    play,
    step_autoreset,
    track_episode,
    update_normalizer,
    zero_sums,
)

# What --init-from takes over. Statistics without their count: after an iteration, those of the new task replace them.
NETWORKS = ("actor", "critic", "normalizer.mean", "normalizer.variance")
LENGTH = "total_timesteps"  # the setting that --resume may raise
EVAL_EPISODES, EVAL_DETERMINISTIC = 200, False


# --- 1. configuration -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Hyperparameters; each field is a flag, its comment the help text."""

    total_timesteps: int = 1_600_000  # env steps of the whole run, rounded down to whole iterations
    num_envs: int = 32  # environments side by side
    num_steps: int = 100  # steps per iteration in each environment
    hidden: int = 64  # width of the two hidden layers
    lr: float = 1e-3  # Adam step size, falls linearly to a tenth
    gamma: float = 0.97  # discount
    gae_lambda: float = 0.95  # advantage estimation, 0 = one step, 1 = Monte Carlo
    num_epochs: int = 4  # passes over a rollout
    num_minibatches: int = 8  # slices of a pass
    clip_eps: float = 0.2  # range of the probability ratio
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are scaled down to this global norm
    normalize: bool = True  # scale observations by their running mean and variance
    cost_limit: float = 0.03  # mean cost per step that the multiplier tolerates
    lagrange_lr: float = 0.1  # step size of dual ascent
    lagrange_init: float = 1.0  # multiplier at the start

    def __post_init__(self):
        counts = "num_envs num_steps hidden num_epochs num_minibatches"
        check_range(self, counts, "at least 1", lambda value: value >= 1)
        check_range(self, "lr clip_eps max_grad_norm", "finite and above 0", lambda value: 0 < value < np.inf)
        weights = "ent_coef vf_coef cost_limit lagrange_lr lagrange_init"
        check_range(self, weights, "finite and at least 0", lambda value: 0 <= value < np.inf)
        check_range(self, "gamma gae_lambda", "in [0, 1]", lambda value: 0 <= value <= 1)
        rows = self.num_envs * self.num_steps
        allowed = f"at least --num-envs x --num-steps = {rows}"
        check_range(self, "total_timesteps", allowed, lambda value: value >= rows)
        allowed = f"a divisor of --num-envs x --num-steps = {rows}"
        check_range(self, "num_minibatches", allowed, lambda value: rows % value == 0)

    @property
    def iterations(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)

    @property
    def optimizer_steps(self) -> int:
        return self.iterations * self.num_epochs * self.num_minibatches


# --- 2. networks ----------------------------------------------------------------------------------
class Trunk(eqx.Module):
    """Two hidden tanh layers, [..., I] -> [..., hidden]."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear]

    def __init__(self, size: int, hidden: int, *, key: Array):
        first_key, second_key = jax.random.split(key)
        self.layers = eqx.nn.Linear(size, hidden, key=first_key), eqx.nn.Linear(hidden, hidden, key=second_key)

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = jnp.tanh(linear(layer, x))
        return x


class Categorical(NamedTuple):
    """Distribution of discrete actions."""

    log_probs: Array  # [..., A]

    def sample(self, key: Array) -> Array:
        return jax.random.categorical(key, self.log_probs)

    def mode(self) -> Array:
        return self.log_probs.argmax(-1)

    def log_prob(self, action: Array) -> Array:
        return jnp.take_along_axis(self.log_probs, action[..., None], -1)[..., 0]

    def entropy(self) -> Array:
        return -(jnp.exp(self.log_probs) * self.log_probs).sum(-1)


class Gaussian(NamedTuple):
    """Distribution of continuous actions, with independent entries. Not squashed: the environment clips."""

    mean: Array  # [..., A]
    log_std: Array  # [A], the same in every state

    def sample(self, key: Array) -> Array:
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape)

    def mode(self) -> Array:
        return self.mean

    def log_prob(self, action: Array) -> Array:
        standard = (action - self.mean) / jnp.exp(self.log_std)
        return -(0.5 * jnp.square(standard) + self.log_std + 0.5 * jnp.log(2 * jnp.pi)).sum(-1)

    def entropy(self) -> Array:
        return (self.log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum(-1)


class Actor(eqx.Module):
    """Distribution of the actions, [..., O], [..., A] mask -> Categorical or Gaussian."""

    trunk: Trunk
    head: eqx.nn.Linear
    log_std: Array | None  # [A] of continuous actions

    def __init__(self, config: Config, env, size: int, *, key: Array):
        trunk_key, head_key = jax.random.split(key)
        self.trunk = Trunk(size, config.hidden, key=trunk_key)
        self.head = small_linear(config.hidden, env.action_size, key=head_key)
        self.log_std = jnp.full(env.action_size, -0.5) if env.continuous_actions else None

    def __call__(self, observation: Array, action_mask: Array | None = None) -> Categorical | Gaussian:
        output = linear(self.head, self.trunk(observation))
        if self.log_std is not None:
            return Gaussian(output, self.log_std)
        logits = output if action_mask is None else jnp.where(action_mask, output, -1e9)
        return Categorical(jax.nn.log_softmax(logits))


class Critic(eqx.Module):
    """State value, [..., C] -> [...]."""

    trunk: Trunk
    head: eqx.nn.Linear

    def __init__(self, config: Config, size: int, *, key: Array):
        trunk_key, head_key = jax.random.split(key)
        self.trunk = Trunk(size, config.hidden, key=trunk_key)
        self.head = eqx.nn.Linear(config.hidden, 1, key=head_key)

    def __call__(self, x: Array) -> Array:
        return linear(self.head, self.trunk(x))[..., 0]


def linear(layer: eqx.nn.Linear, x: Array) -> Array:
    """A layer on any number of rows, [..., I] -> [..., O], as one matrix product; layer(x) takes a single row."""
    return x @ layer.weight.T + layer.bias


def small_linear(in_size: int, out_size: int, *, key: Array) -> eqx.nn.Linear:
    """A last layer that starts near zero: every choice is equally likely at first."""
    return jax.tree.map(lambda leaf: 0.01 * leaf, eqx.nn.Linear(in_size, out_size, key=key))


# --- 3. rollout -----------------------------------------------------------------------------------
class Transition(NamedTuple):
    """One step of a team; [T, E, ...] in a rollout."""

    observation: AgentObservation  # [N, ...] acted on, raw
    action: Array  # [N] or [N, A]
    log_prob: Array  # [N]
    value: Array  # [N]
    next_value: Array  # [N] of the true outcome, before any reset
    reward: Array  # [N]
    cost: Array  # []
    terminated: Array  # []
    truncated: Array  # []


class TrainState(NamedTuple):
    """Everything that training changes."""

    actor: Actor
    critic: Critic
    optimizer_state: optax.OptState
    normalizer: Normalizer
    lagrange_multiplier: Array  # [] price of a unit of cost
    observation: AgentObservation  # [E, N, ...] to act on next
    env_state: Any  # [E, ...]
    episode: EpisodeSums  # [E, ...] of the running episodes


def perceive(config: Config, state: TrainState, observation: AgentObservation) -> AgentObservation:
    """What the networks see of an observation."""
    return normalize(state.normalizer, observation) if config.normalize else observation


def act(
    config: Config, state: TrainState, observation: AgentObservation, key: Array, deterministic: bool = False
) -> tuple[Array, Array]:
    """The actions of one team, sampled or the modes; -> (action [N] or [N, A], log_prob [N])"""
    seen = perceive(config, state, observation)
    distribution = state.actor(seen.observation, seen.action_mask)
    action = distribution.mode() if deterministic else distribution.sample(key)
    return action, distribution.log_prob(action)


def select_action(
    config: Config, env, state: TrainState, observation: AgentObservation, key: Array, deterministic: bool
) -> Array:
    """Actions of a team in evaluation."""
    return act(config, state, observation, key, deterministic)[0]


def critic_value(config: Config, state: TrainState, observation: AgentObservation) -> Array:
    """The critic's value for each agent of one team, [N]."""
    return state.critic(perceive(config, state, observation).critic_input)


def interact(config: Config, env, state: TrainState, carry: tuple, keys: Array):
    """One step of a team; carry = (AgentObservation, env_state, EpisodeSums). -> carry, (Transition, done, figures)

    keys [2]: one to act, one for the environment.
    """
    observation, env_state, episode = carry
    act_key, step_key = keys
    action, log_prob = act(config, state, observation, act_key)
    time_step, env_state, next_observation = step_autoreset(env, step_key, env_state, action)
    transition = Transition(
        observation=observation,
        action=action,
        log_prob=log_prob,
        value=critic_value(config, state, observation),
        next_value=critic_value(config, state, time_step.observation),
        reward=time_step.reward,
        cost=time_step.cost,
        terminated=time_step.terminated,
        truncated=time_step.truncated,
    )
    done, figures, episode = track_episode(env, episode, time_step)
    return (next_observation, env_state, episode), (transition, done, figures)


def collect(config: Config, env, state: TrainState, key: Array) -> tuple[TrainState, Transition, dict]:
    """num_steps from where the state stands; -> (state, Transition [T, E, ...], mean figures of finished episodes)"""
    each_team = jax.vmap(partial(interact, config, env, state))
    start = state.observation, state.env_state, state.episode
    keys = jax.random.split(key, (config.num_steps, config.num_envs, 2))
    (observation, env_state, episode), (transition, done, figures) = jax.lax.scan(each_team, start, keys)
    state = state._replace(observation=observation, env_state=env_state, episode=episode)
    return state, transition, finished_episodes(done, figures)


# --- 4. PPO ---------------------------------------------------------------------------------------
def compute_gae(
    reward, value, next_value, terminated, truncated, gamma: float, gae_lambda: float
) -> tuple[Array, Array]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16). All arrays [T, ...]; -> (advantage, target).

    `next_value` belongs to the observation that the step led to, before any reset.
    """
    delta = reward + gamma * next_value * (1 - terminated) - value  # only termination cuts bootstrapping
    decay = gamma * gae_lambda * (1 - (terminated | truncated))  # the sum over steps stops at either end

    def backward(following, step):
        delta, decay = step
        advantage = delta + decay * following
        return advantage, advantage

    _, advantage = jax.lax.scan(backward, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)
    return advantage, advantage + value


class Batch(NamedTuple):
    """What the networks learn from, [T, E, ...] or rows [B, ...]."""

    observation: AgentObservation  # [N, ...] as the networks see it
    action: Array  # [N] or [N, A]
    log_prob: Array  # [N]
    advantage: Array  # [N]
    target: Array  # [N]


def ppo_loss(learner: tuple[Actor, Critic], config: Config, batch: Batch) -> tuple[Array, dict]:
    """Clipped surrogate, value error and entropy bonus (Schulman et al. 2017, eq. 9) over rows [B, N].

    Advantages are normalized over the rows and agents of the minibatch.
    """
    actor, critic = learner
    observation = batch.observation
    distribution = actor(observation.observation, observation.action_mask)

    ratio = jnp.exp(distribution.log_prob(batch.action) - batch.log_prob)  # [B, N]
    clipped = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-5)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()

    value = critic(observation.critic_input)
    value_loss = jnp.square(value - batch.target).mean()

    entropy = distribution.entropy().mean()
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "ratio": ratio.mean()}


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Adam behind a global norm clip, on the parameters as one flat vector; the schedule counts optimizer steps."""
    schedule = optax.linear_schedule(config.lr, config.lr / 10, config.optimizer_steps)
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(schedule, eps=1e-5)))


def minibatch_rows(config: Config, rows: int, key: Array) -> Array:
    """Every row once per epoch, in random order. [num_epochs x num_minibatches, rows / num_minibatches]"""
    order = jax.random.uniform(key, (config.num_epochs, rows)).argsort(1)
    return order.reshape(config.num_epochs * config.num_minibatches, -1)


def update_minibatch(config: Config, batch: Batch, carry: tuple, row: Array) -> tuple[tuple, dict]:
    """One optimizer step on these rows of a batch; carry = ((actor, critic), optimizer_state)."""
    learner, optimizer_state = carry
    minibatch = jax.tree.map(lambda x: x[row], batch)
    (_, metrics), gradient = jax.value_and_grad(ppo_loss, has_aux=True)(learner, config, minibatch)
    update, optimizer_state = make_optimizer(config).update(gradient, optimizer_state)
    return (optax.apply_updates(learner, update), optimizer_state), metrics


def train_step(config: Config, env, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """One iteration: collect, estimate advantages, update the networks, the normalizer and the multiplier."""
    collect_key, update_key = jax.random.split(key)
    state, transition, finished = collect(config, env, state, collect_key)

    reward = transition.reward - state.lagrange_multiplier * transition.cost[..., None]
    terminated, truncated = transition.terminated[..., None], transition.truncated[..., None]
    advantage, target = compute_gae(
        reward, transition.value, transition.next_value, terminated, truncated, config.gamma, config.gae_lambda
    )

    seen = perceive(config, state, transition.observation)
    batch = Batch(seen, transition.action, transition.log_prob, advantage, target)
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [T E, ...]
    ((actor, critic), optimizer_state), losses = jax.lax.scan(
        partial(update_minibatch, config, batch),
        ((state.actor, state.critic), state.optimizer_state),
        minibatch_rows(config, batch.target.shape[0], update_key),
    )

    # Projected dual ascent: the price rises while the constraint is violated and is never negative.
    violation = transition.cost.mean() - config.cost_limit
    lagrange_multiplier = jnp.maximum(state.lagrange_multiplier + config.lagrange_lr * violation, 0.0)

    state = state._replace(
        actor=actor,
        critic=critic,
        optimizer_state=optimizer_state,
        normalizer=update_normalizer(state.normalizer, transition.observation),  # only now: the update read the old one
        lagrange_multiplier=lagrange_multiplier,
    )
    metrics = finished | {
        "cost": transition.cost.mean(),
        "lagrange_multiplier": lagrange_multiplier,
        "explained_variance": 1 - jnp.var(target - transition.value) / (jnp.var(target) + 1e-8),
    }
    return state, metrics | jax.tree.map(jnp.mean, losses)


# --- 5. training: one scan ------------------------------------------------------------------------
@partial(jax.jit, static_argnames=("config", "env"))
def init_state(config: Config, env, key: Array) -> TrainState:
    """Fresh networks, optimizer, normalizer and multiplier, and the first observations."""
    actor_key, critic_key, reset_key = jax.random.split(key, 3)
    observation, env_state = jax.vmap(env.reset)(jax.random.split(reset_key, config.num_envs))
    actor = Actor(config, env, observation.observation.shape[-1], key=actor_key)
    critic = Critic(config, observation.critic_input.shape[-1], key=critic_key)
    return TrainState(
        actor=actor,
        critic=critic,
        optimizer_state=make_optimizer(config).init((actor, critic)),
        normalizer=init_normalizer(observation),
        lagrange_multiplier=jnp.asarray(config.lagrange_init, float),
        observation=observation,
        env_state=env_state,
        episode=zero_sums(env, config.num_envs),
    )


@partial(jax.jit, static_argnames=("config", "env", "start", "stop", "log_fn", "save_fn", "save_every"))
def train(
    config: Config,
    env,
    state: TrainState,
    key: Array,
    start: int = 0,
    stop: int | None = None,
    log_fn: Callable[[Array, dict], None] | None = None,
    save_fn: Callable[[Array, TrainState], None] | None = None,
    save_every: int = 1,
) -> tuple[TrainState, dict]:
    """Iterations start..stop (default: to the end) in one scan; -> (state, metrics), a scalar per metric and iteration.

    With keys [S] and states [S, ...], S seeds train side by side. On the host, `log_fn(i, metrics)` is called after
    every iteration, with `finite` beside the metrics, a flag per leaf of `networks`; `save_fn(i, state)` after every
    `save_every` and after the last. They may use NumPy but must not call JAX, which is waiting for them.
    """
    stop = config.iterations if stop is None else stop

    def iteration(state, i):
        step = lambda state, key: train_step(config, env, state, jax.random.fold_in(key, i))
        state, metrics = each_seed(step, key.shape)(state, key)
        if log_fn is not None:
            finite = jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), networks(state))
            io_callback(log_fn, None, i, metrics | {"finite": finite}, ordered=True)
        if save_fn is not None:
            save = partial(io_callback, save_fn, None, i, state, ordered=True)
            jax.lax.cond(((i + 1) % save_every == 0) | (i + 1 == stop), save, lambda: None)
        return state, metrics

    return jax.lax.scan(iteration, state, jnp.arange(start, stop))


def each_seed(function: Callable, shape: tuple[int, ...]) -> Callable:
    """A function of one seed, for keys of `shape` () or (S,): then all arguments and results are [S, ...].

    Without vmap, a single seed takes less to compile.
    """
    if shape == (1,):
        return lambda *xs: jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], xs)))
    return jax.vmap(function) if shape else function


def networks(state: TrainState) -> dict[str, Any]:
    """What --init-from takes over from another run."""
    return {name: attrgetter(name)(state) for name in NETWORKS}


@partial(jax.jit, static_argnames=("config", "env", "episodes", "deterministic"))
def evaluate(
    config: Config, env, state: TrainState, key: Array, episodes: int, deterministic: bool = EVAL_DETERMINISTIC
) -> tuple[dict[str, Array], Any]:
    """Fresh episodes; -> (figures [E] of the episodes, the env_states [T, ...] of the first one)."""
    policy = partial(select_action, config, env, state, deterministic=deterministic)
    return play(env, policy, key, episodes)


def environments() -> dict[str, type]:
    """The environments to choose from with --env, the default first."""
    return {cls.__name__.lower(): cls for cls in (Coverage, Rendezvous, Spread)}


def env_steps_per_iteration(config: Config, env) -> int:
    return config.num_envs * config.num_steps


def columns(env) -> dict[str, str]:
    """The columns of the line per iteration: header and metric."""
    names = (*env.figure_names, "lagrange_multiplier", "explained_variance")
    return dict(zip(names, names, strict=True))


# --- 6. checkpoints -------------------------------------------------------------------------------
FORMAT = 2  # of a checkpoint
leaf_name = partial(keystr, simple=True, separator=".")


def save_checkpoint(path: Path, header: dict, state: TrainState) -> None:
    """A JSON line, then the leaves of the state [S, ...]. Written aside: always a complete file. Raises OSError."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        eqx.tree_serialise_leaves(file, jax.tree.map(np.asarray, state))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: str | Path, flag: str = "path") -> tuple[dict, TrainState]:
    """(header, state [S, ...]) of a checkpoint of this script, or of the one in a run folder. Raises ValueError."""
    script, path = Path(__file__).name, Path(path)
    try:
        path = path / "checkpoint.eqx" if path.is_dir() else path
        with path.open("rb") as file:
            header = json.loads(file.readline())
            if (header["script"], header["format"]) == (script, FORMAT):
                keys = jax.random.split(jax.random.key(0), header["config"]["num_seeds"])
                like = jax.eval_shape(jax.vmap(partial(init_state, *saved_task(header))), keys)
                return header, eqx.tree_deserialise_leaves(file, like)
    except OSError as error:
        raise ValueError(f"{flag} must be a checkpoint, {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, LookupError, AttributeError, TypeError, EOFError, RuntimeError):
        raise ValueError(f"{flag} must be a checkpoint, {path} is not a complete one of {script}") from None
    if header["script"] != script:
        raise ValueError(f"{flag} must be a checkpoint of {script}, {path} is one of {header['script']}")
    raise ValueError(f"{flag} must be of format {FORMAT}, {path} is of {header['format']}: use the code that wrote it")


def saved_task(header: dict) -> tuple[Config, Any]:
    """Config and environment of a checkpoint."""
    return from_flags(Config, header["config"]), from_flags(environments()[header["config"]["env"]], header["config"])


def load_policy(path: str | Path, index: int = 0) -> Callable[[Any, Array | None], Array]:
    """`policy(observation, key=None) -> action` from raw AgentObservations of one team; samples if it has a key.

    `index` counts the seeds of the run. Raises ValueError if there is no such seed, or no checkpoint of this script.
    """
    header, state = load_checkpoint(path)
    if not 0 <= index < header["config"]["num_seeds"]:
        raise ValueError(f"index must be in 0..{header['config']['num_seeds'] - 1}, a seed of {path}, got {index}")
    config, env = saved_task(header)
    state = jax.tree.map(lambda x: x[index], state)

    def policy(observation, key=None):
        return select_action(config, env, state, observation, key, deterministic=key is None)

    return policy


def init_state_from_checkpoint(config: Config, env, key: Array, path: str) -> TrainState:
    """A fresh state around the networks of a checkpoint of one seed, or of as many as there are keys. key: [] or [S]

    Raises ValueError if the architecture, the number of seeds or --normalize does not fit.
    """
    keys = key.reshape(-1)
    header, saved = load_checkpoint(path, "--init-from")
    num_seeds = header["config"]["num_seeds"]
    if num_seeds not in (1, keys.size):
        raise ValueError(f"--num-seeds must be {num_seeds} as in {path}, got {keys.size}")
    normalize = asdict(config).get("normalize")
    if normalize != header["config"].get("normalize"):
        raise ValueError(f"--normalize must be {not normalize} as in {path}, got {normalize}")
    init = jax.jit(each_seed(partial(init_state, config, env), keys.shape))
    check_architecture("--init-from", path, saved, jax.eval_shape(init, keys))
    state = init(keys)
    saved = jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), networks(saved), networks(state))
    state = eqx.tree_at(lambda state: jax.tree.leaves(networks(state)), state, jax.tree.leaves(saved))
    return state if key.ndim == 1 else jax.tree.map(lambda x: x[0], state)


def check_architecture(flag: str, path: str, saved: TrainState, wanted: TrainState) -> None:
    """Raise a ValueError that names the leaves [S, ...] in which the networks of two states differ, for any S."""
    leaves = (tree_leaves_with_path(networks(state)) for state in (saved, wanted))
    saved, wanted = ({leaf_name(keys): leaf.shape[1:] for keys, leaf in pairs} for pairs in leaves)
    differing = [name for name in saved | wanted if saved.get(name) != wanted.get(name)]
    if differing:
        leaves = ", ".join(f"{name} {saved.get(name)} instead of {wanted.get(name)}" for name in differing)
        raise ValueError(f"{flag} must have the same architecture, {path} has {leaves}")


# --- 7. flags -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """One run of the script; each field is a flag."""

    seed: int = 0  # first random seed
    num_seeds: int = 1  # seeds that train side by side: seed, seed + 1, ...
    run_dir: str = ""  # folder to write config.json, metrics.csv and checkpoint.eqx to
    save_every: int = 10  # iterations between checkpoints
    init_from: str = ""  # run folder or checkpoint whose networks to start from
    resume: str = ""  # run folder to continue, with the settings it was started with
    eval: str = ""  # run folder or checkpoint to evaluate instead of training
    episodes: int = EVAL_EPISODES  # episodes of the evaluation
    deterministic: bool = EVAL_DETERMINISTIC  # evaluate without sampling the actions
    render: str = ""  # .png or .gif file to draw an episode of the evaluation to; needs matplotlib

    def __post_init__(self):
        check_range(self, "seed", "at least 0", lambda value: value >= 0)
        check_range(self, "num_seeds save_every", "at least 1", lambda value: value >= 1)
        check_range(self, "episodes", "at least 2", lambda value: value >= 2)
        if self.render:
            path, allowed = Path(self.render), "a .png or .gif file in a folder that exists"
            check_range(self, "render", allowed, lambda _: path.suffix in (".png", ".gif") and path.parent.is_dir())
            if find_spec("matplotlib") is None:
                raise ValueError("--render needs matplotlib, which is not installed: pip install matplotlib")

    def keys(self) -> tuple[Array, Array, Array]:
        """For initialization, training and evaluation, [S] each; those of a seed do not depend on num_seeds."""
        keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), 3))(self.seed + jnp.arange(self.num_seeds))
        return keys[:, 0], keys[:, 1], keys[:, 2]


def parse_settings(argv: list[str] | None) -> tuple[Config, Any, Run, Any]:
    """Config, environment and run from the command line: a flag per field, the comment behind it is the help text.

    With --resume and --eval the defaults are those of the checkpoint, and most of them may not be changed; its (header,
    state) come fourth.
    """
    names, layout = list(environments()), argparse.ArgumentDefaultsHelpFormatter
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env", choices=names, default=names[0], help="environment, its fields are flags as well")
    add_flags(first, Run)
    parser = argparse.ArgumentParser(parents=[first], allow_abbrev=False, formatter_class=layout)
    first.error = parser.error = refuse
    known, _ = first.parse_known_args(argv)  # which other flags there are, and all defaults, depend on these

    resume, source, saved, checkpoint = known.resume, known.resume or known.eval, {}, None
    if source:
        flag = "--resume" if resume else "--eval"
        header, _ = checkpoint = load_checkpoint(source, flag)
        saved = header["config"] | {"run_dir": resume, "resume": resume, "eval": "" if resume else source, "render": ""}
    classes = Config, environments()[saved.get("env", known.env)], Run
    for cls in classes[:2]:
        add_flags(parser, cls)
    parser.set_defaults(**saved)
    values = vars(parser.parse_args(argv))
    free = {"episodes", "deterministic", "render"}
    free |= {"save_every"} if resume else {"seed", *classes[1].__dataclass_fields__}
    for name in [name for name in saved if name not in free]:
        may_rise = resume and name == LENGTH
        if values[name] != saved[name] and not (may_rise and values[name] > saved[name]):
            rule = f"--{name.replace('_', '-')} must be left out{' or raised' if may_rise else ''}"
            raise ValueError(f"{rule}, with {flag} {source} it is {saved[name]!r}; got {values[name]!r}")
    return *(from_flags(cls, values) for cls in classes), checkpoint


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """A flag for every field of a dataclass."""
    comment = dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(cls), re.MULTILINE))
    for field in dataclasses.fields(cls):
        kind = {"type": int32 if isinstance(field.default, int) else type(field.default)}
        kind |= {"choices": get_args(field.type) or None}
        kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else kind
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, default=field.default, help=comment.get(field.name), **kind)


def int32(text: str) -> int:
    """A whole number that the programs can hold; argparse says its name if it raises."""
    if abs(int(text)) >= 2**31:
        raise ValueError
    return int(text)


def from_flags(cls: type, values: dict[str, Any]) -> Any:
    """A dataclass from the values of its flags, among others."""
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


def refuse(message: str) -> NoReturn:
    """End with one line and exit code 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


# --- 8. recording: lines, metrics.csv, checkpoint.eqx ---------------------------------------------
NO_CHECKPOINT = "no checkpoint was written, see --run-dir"


class Recorder:
    """Prints a line and appends to metrics.csv per iteration, saves checkpoints; called from inside the scan."""

    def __init__(self, config: Config, env, run: Run, resumed: dict):
        """`resumed`: header of the checkpoint to go on from, or {}. Raises ValueError if --run-dir cannot be used."""
        self.config, self.env, self.run, self.folder, self.metrics_file = config, env, run, Path(run.run_dir), None
        self.start, self.seconds = resumed.get("iteration", 0), resumed.get("seconds", 0.0)
        values = {"env": type(env).__name__.lower()} | asdict(config) | asdict(env) | asdict(run)
        self.header = {"format": FORMAT, "script": Path(__file__).name, "config": values}
        self.saved = f"the checkpoint of iteration {self.start} is in {self.folder}" if resumed else NO_CHECKPOINT
        if run.run_dir:
            self.open_folder(resumed.get("metrics_size", 0))

    def open_folder(self, metrics_size: int) -> None:
        """Write config.json, and keep metrics_size bytes of metrics.csv: a resumed run writes later rows again."""
        command = "git describe --always --dirty --abbrev=40"  # in a shell: where there is no git, the answer is empty
        git = subprocess.run(command, shell=True, cwd=Path(__file__).resolve().parent, capture_output=True, text=True)
        about = {"command": sys.argv, "commit": git.stdout.strip(), "xla_flags": os.environ.get("XLA_FLAGS", "")}
        about["versions"] = {name: version(name) for name in ("jax", "jaxlib", "equinox", "optax", "numpy")}
        try:
            for name, advice in {"checkpoint.eqx": "see --resume", "metrics.csv": "delete it"}.items():
                if (self.folder / name).exists() and not self.run.resume:
                    raise ValueError(f"--run-dir must hold no run, {self.folder} has {name}: {advice}")
            self.folder.mkdir(parents=True, exist_ok=True)
            self.metrics_file = (self.folder / "metrics.csv").open("a+", newline="")
            self.metrics_file.seek(0)
            self.metrics_file.truncate(self.metrics_file.read(metrics_size).rfind("\n") + 1)  # whole lines
            self.metrics_file.seek(0, os.SEEK_END)
            (self.folder / "config.json").write_text(json.dumps(self.header | about, indent=2) + "\n")
        except OSError as error:
            flag = "--resume" if self.run.resume else "--run-dir"
            raise ValueError(f"{flag} must be a writable folder: {error}") from error

    def start_clock(self) -> None:
        """A resumed run goes on where its clock stood."""
        self.started = time.perf_counter() - self.seconds

    def log(self, i: Array, metrics: dict) -> None:
        """A line with mean and deviation over seeds, a row per seed. Raises if a loss or a network is not finite."""
        done, finite, steps = int(i) + 1, metrics.pop("finite"), env_steps_per_iteration(self.config, self.env)
        self.seconds = time.perf_counter() - self.started
        speed = done * steps * self.run.num_seeds / self.seconds
        metrics = {name: np.asarray(value, np.float64) for name, value in metrics.items()}  # [S]
        for s in range(self.run.num_seeds if self.metrics_file else 0):
            row = {"seed": self.run.seed + s, "iteration": done, "env_steps": done * steps}
            row |= {name: value[s] for name, value in metrics.items()}
            row |= {"env_steps_per_second": round(speed, 1), "seconds": round(self.seconds, 2)}
            if self.metrics_file.tell() == 0:
                print(*row, sep=",", file=self.metrics_file)
            print(*row.values(), sep=",", file=self.metrics_file, flush=True)
        left = datetime.timedelta(seconds=round(self.seconds / done * (self.config.iterations - done)))
        cells = {"iteration": f"{done}/{self.config.iterations}", "  env_steps": f"{done * steps:,}"}
        cells |= {"  steps/s": f"{speed:,.0f}"}
        for header, name in columns(self.env).items():
            spread = f" ± {metrics[name].std():.2f}" if self.run.num_seeds > 1 else ""
            cells[header.rjust(14 if spread else 8)] = f"{metrics[name].mean():.2f}{spread}"
        cells["time_left"] = str(left)
        if done == self.start + 1:
            print("  ".join(cells))
        print("  ".join(text.rjust(len(header)) for header, text in cells.items()), flush=True)
        broken = [leaf_name(path) for path, is_finite in tree_leaves_with_path(finite) if not is_finite]
        broken += [name for name, value in metrics.items() if name.endswith("loss") and not np.isfinite(value).all()]
        if broken:
            raise FloatingPointError(f"{broken[0]} is not finite")

    def save(self, i: Array, state: TrainState) -> None:
        """The checkpoint after iteration i, with how far metrics.csv and the clock have come."""
        progress = {"iteration": int(i) + 1, "seconds": self.seconds, "metrics_size": self.metrics_file.tell()}
        save_checkpoint(self.folder / "checkpoint.eqx", self.header | progress, state)
        self.saved = f"the checkpoint of iteration {int(i) + 1} is in {self.folder}"


# --- 9. running -----------------------------------------------------------------------------------
def prepare(argv: list[str] | None) -> tuple[Recorder, TrainState]:
    """Whatever can be refused, before training is compiled; -> (recorder, state [S, ...])"""
    try:
        config, env, run, checkpoint = parse_settings(argv)
        init_key, *_ = run.keys()
        init = jax.jit(each_seed(partial(init_state, config, env), init_key.shape))
        if checkpoint:
            header, state = checkpoint
            check_architecture("--eval", run.eval, state, jax.eval_shape(init, init_key))
        elif run.init_from:
            state = init_state_from_checkpoint(config, env, init_key, run.init_from)
        else:
            state = init(init_key)
        recorder = Recorder(config, env, run, header if run.resume else {})
        if run.resume and getattr(config, LENGTH) > header["config"][LENGTH]:
            lengths = f"from {header['config'][LENGTH]} to {getattr(config, LENGTH)}"
            print(f"{LENGTH} raised {lengths}: schedules stretch to the new total")
        return recorder, state
    except (ValueError, OverflowError) as error:
        refuse(str(error))


def train_and_evaluate(recorder: Recorder, state: TrainState) -> None:
    """Train, unless it is only to evaluate, then evaluate."""
    config, env, run, start = recorder.config, recorder.env, recorder.run, recorder.start
    _, train_key, eval_key = run.keys()
    if not run.eval:
        size = {name: sum(x.nbytes for x in jax.tree.leaves(part)) / 1e6 for name, part in state._asdict().items()}
        total = sum(size.values())
        parts = ", ".join(f"{name} {part:.1f}" for name, part in size.items() if part >= 0.01 * total)
        steps = f"{config.iterations} iterations of {env_steps_per_iteration(config, env):,} env steps"
        print(f"{steps}, state of {total:.1f} MB: {parts}", flush=True)
        started = time.perf_counter()
        save = {"save_fn": recorder.save, "save_every": run.save_every} if run.run_dir else {}
        compiled = train.lower(config, env, state, train_key, start=start, log_fn=recorder.log, **save).compile()
        print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
        recorder.start_clock()
        state, _ = jax.block_until_ready(compiled(state, train_key))
        jax.effects_barrier()

    evaluate_seed = partial(evaluate, config, env, episodes=run.episodes, deterministic=run.deterministic)
    figures, trajectory = jax.jit(each_seed(evaluate_seed, eval_key.shape))(state, eval_key)
    print(env)
    for s in range(run.num_seeds):
        value = {name: np.asarray(figures[name][s], np.float64) for name in env.figure_names}  # [E] each
        cells = [f"{name}={x.mean():.1f} {name}_se={x.std(ddof=1) / x.size**0.5:.1f}" for name, x in value.items()]
        print(f"evaluation seed={run.seed + s} episodes={run.episodes}", *cells)
    trajectory = jax.tree.map(lambda x: np.asarray(x[0]), trajectory)
    print(env.text_map(trajectory))
    if run.render:
        env.draw(trajectory, run.render)
        print(f"drawn to {run.render}")


def main(argv: list[str] | None = None) -> None:
    """Work in a worker thread: the main one waits in Python, where Ctrl-C reaches it, and not inside the scan."""
    if not any(map(find_spec, ("jax_plugins", "libtpu"))):  # on a CPU as fast and compiles quicker; a GPU refuses it
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)  # a failing callback is reported here, in a line
    worker, recorder = ThreadPoolExecutor(1), None
    try:
        recorder, state = worker.submit(prepare, argv).result()
        worker.submit(train_and_evaluate, recorder, state).result()
    except KeyboardInterrupt:
        print(f"interrupted: {recorder.saved if recorder else NO_CHECKPOINT}", file=sys.stderr, flush=True)
        os._exit(130)
    except (jax.errors.JaxRuntimeError, OSError, OverflowError) as error:  # the text ends with the cause
        sys.exit(f"stopped: {str(error).strip().splitlines()[-1]}; {recorder.saved if recorder else NO_CHECKPOINT}")


if __name__ == "__main__":
    main()
