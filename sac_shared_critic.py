# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.1,!=0.10.2", "jaxlib>=0.10.1,!=0.10.2", "equinox>=0.13", "optax>=0.2.5", "numpy>=2.0"]
# ///
"""Soft actor-critic (SAC) for homogeneous agents: one critic learned on the pooled batch of all, synced to each.

Every agent has an actor, a temperature, twin critics, target critics and the optimizer states of its own. After each
step in num_envs environments:

    batch <- batch_size rows of the replay buffer, [B, N, ...]
    critics and target critics of the first agent <- one SAC step on pool(batch), the rows of all agents in one batch
    every agent <- the critics, target critics and critic-optimizer state of the first one                       (sync)
    actor and temperature of every agent <- one SAC step on its own rows, against its copy of the critics

Agents with one body and one reward learn the same value function, so the shared one sees N times the experience; the
actors stay apart and can take on roles. --no-share-critic trains every agent's critics on its own rows: the ablation.
The critics see `critic_input`, the environment's choice, and the agent's own action.

Papers: Haarnoja et al. 2018 (SAC, with learned temperature), Lowe et al. 2017 (centralized critics). Deviations: the
critics take the action of their own agent only, observations are scaled by running statistics, the global gradient norm
is clipped, and the step size falls linearly.

Axes: S seeds, T steps, E environments, N agents, B batch, R buffer rows, O/C/A sizes of observation, critic
observation, action.

    python sac_shared_critic.py
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

# What --init-from takes over. Statistics without their count: they stand in for those of the random first steps.
NETWORKS = (
    *("team.actor", "team.log_alpha", "team.critics.critic", "team.critics.target_critic"),
    *("normalizer.mean", "normalizer.variance"),
)
LENGTH = "total_timesteps"  # the setting that --resume may raise
EVAL_EPISODES, EVAL_DETERMINISTIC = 1000, True


# --- 1. configuration -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Hyperparameters; each field is a flag, its comment the help text."""

    total_timesteps: int = 960_000  # env steps after learning_starts, rounded down to whole iterations
    num_envs: int = 16  # environments side by side
    num_steps: int = 1000  # steps per iteration in each environment, each followed by a gradient step
    learning_starts: int = 10_000  # env steps with random actions that fill the buffer before the first iteration
    buffer_size: int = 100_000  # env steps that the replay buffer holds
    batch_size: int = 128  # rows per agent in a gradient step
    hidden: int = 128  # width of the two hidden layers
    lr: float = 1e-3  # Adam step size, falls linearly to a tenth
    gamma: float = 0.7  # discount
    tau: float = 0.005  # share of the critics that their targets take over per gradient step
    alpha_init: float = 0.1  # temperature at the start
    max_grad_norm: float = 10.0  # gradients are scaled down to this global norm
    share_critic: bool = True  # learn one critic on the rows of all agents, or one per agent on its own rows
    normalize: bool = True  # scale observations by their running mean and variance

    def __post_init__(self):
        counts = "num_envs num_steps learning_starts batch_size hidden"
        check_range(self, counts, "at least 1", lambda value: value >= 1)
        check_range(self, "lr alpha_init max_grad_norm", "finite and above 0", lambda value: 0 < value < np.inf)
        check_range(self, "gamma tau", "in [0, 1]", lambda value: 0 <= value <= 1)
        rows = self.num_envs * self.num_steps
        allowed = f"at least --num-envs x --num-steps = {rows}"
        check_range(self, "total_timesteps", allowed, lambda value: value >= rows)
        allowed = f"at least --num-envs = {self.num_envs}"
        check_range(self, "buffer_size", allowed, lambda value: value >= self.num_envs)

    @property
    def iterations(self) -> int:
        return self.total_timesteps // (self.num_envs * self.num_steps)

    @property
    def optimizer_steps(self) -> int:
        return self.iterations * self.num_steps


# --- 2. networks ----------------------------------------------------------------------------------
class Network(eqx.Module):
    """Two hidden relu layers, [..., I] -> [..., size]."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear, eqx.nn.Linear]

    def __init__(self, in_size: int, hidden: int, size: int, *, key: Array):
        first_key, second_key, last_key = jax.random.split(key, 3)
        self.layers = (
            eqx.nn.Linear(in_size, hidden, key=first_key),
            eqx.nn.Linear(hidden, hidden, key=second_key),
            eqx.nn.Linear(hidden, size, key=last_key),
        )

    def __call__(self, x: Array) -> Array:
        *hidden_layers, last = self.layers
        for layer in hidden_layers:
            x = jax.nn.relu(linear(layer, x))
        return linear(last, x)


def linear(layer: eqx.nn.Linear, x: Array) -> Array:
    """A layer on any number of rows, [..., I] -> [..., O], as one matrix product; layer(x) takes a single row."""
    return x @ layer.weight.T + layer.bias


class Actor(eqx.Module):
    """Mean and log standard deviation of the action before tanh, [..., O] -> ([..., A], [..., A])."""

    network: Network

    def __init__(self, config: Config, size: int, action_size: int, *, key: Array):
        self.network = Network(size, config.hidden, 2 * action_size, key=key)

    def __call__(self, observation: Array) -> tuple[Array, Array]:
        mean, log_std = jnp.split(self.network(observation), 2, -1)
        return mean, -5 + 3.5 * (1 + jnp.tanh(log_std))  # in [-5, 2]


class Critic(eqx.Module):
    """Value of an action, [..., C], [..., A] -> [...]."""

    network: Network

    def __init__(self, config: Config, size: int, *, key: Array):
        self.network = Network(size, config.hidden, 1, key=key)

    def __call__(self, x: Array, action: Array) -> Array:
        return self.network(jnp.concatenate([x, action], -1))[..., 0]


def squashed_log_prob(u: Array, mean: Array, log_std: Array) -> Array:
    """Log-density of tanh(u), u ~ Normal(mean, exp(log_std)), [..., A] -> [...]. (Haarnoja et al. 2018, appendix C)

    log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)) stays exact where tanh has long rounded to 1.
    """
    log_normal = -0.5 * jnp.square((u - mean) / jnp.exp(log_std)) - log_std - 0.5 * jnp.log(2 * jnp.pi)
    return (log_normal - 2 * (jnp.log(2.0) - u - jax.nn.softplus(-2 * u))).sum(-1)


def squashed_sample(actor: Actor, observation: Array, noise: Array) -> tuple[Array, Array]:
    """An action in [-1, 1] and its log-density, reparametrized; [..., O], normal noise [..., A] -> [..., A], [...]."""
    mean, log_std = actor(observation)
    u = mean + jnp.exp(log_std) * noise
    return jnp.tanh(u), squashed_log_prob(u, mean, log_std)


def smaller_value(twins: Critic, critic_input: Array, action: Array) -> Array:
    """The minimum of twin critics (leaves [2, ...]), [..., C], [..., A] -> [...]. (Fujimoto et al. 2018)

    Not by `min`, whose gradient compares the values with the result: NaN if XLA computes and rounds them a second time.
    """
    first, second = jax.vmap(lambda critic: critic(critic_input, action))(twins)
    return jnp.where(first < second, first, second)


# --- 3. replay buffer -----------------------------------------------------------------------------
class Transition(NamedTuple):
    """One step of a team; every leaf has the agents in front, the flags are those of the team for each."""

    observation: AgentObservation  # [N, ...] raw
    action: Array  # [N, A]
    reward: Array  # [N]
    terminated: Array  # [N]
    truncated: Array  # [N]
    next_observation: AgentObservation  # [N, ...] the true outcome, before any reset


class ReplayBuffer(NamedTuple):
    """A ring of the last R transitions."""

    row: Transition  # [R, N, ...]
    position: Array  # [] where the next row goes
    size: Array  # [] rows written, at most R


def init_buffer(transition: Transition, buffer_size: int) -> ReplayBuffer:
    """An empty ring for transitions [E, N, ...] or shapes of them."""
    row = jax.tree.map(lambda x: jnp.zeros((buffer_size, *x.shape[1:]), x.dtype), transition)
    return ReplayBuffer(row, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def add(buffer: ReplayBuffer, transition: Transition) -> ReplayBuffer:
    """Write the rows [E, N, ...], E <= R, over the oldest ones."""
    capacity, count = (tree.reward.shape[0] for tree in (buffer.row, transition))
    place = (buffer.position + jnp.arange(count)) % capacity
    if count == 1:  # XLA would fuse a single write with the reads of `sample`, at the price of copying the whole buffer
        place, transition = jax.tree.map(lambda x: jnp.repeat(x, 2, 0), (place, transition))
    row = jax.tree.map(lambda old, new: old.at[place].set(new), buffer.row, transition)
    return ReplayBuffer(row, (buffer.position + count) % capacity, jnp.minimum(buffer.size + count, capacity))


def sample(buffer: ReplayBuffer, key: Array, batch_size: int) -> Transition:
    """Written rows, uniformly and with replacement, [B, N, ...]."""
    place = jax.random.randint(key, (batch_size,), 0, buffer.size)
    return jax.tree.map(lambda x: x[place], buffer.row)


# --- 4. the team ----------------------------------------------------------------------------------
class Critics(NamedTuple):
    """The twins of an agent; they differ, their targets start as copies."""

    critic: Critic  # [2, ...]
    target_critic: Critic  # [2, ...]
    optimizer_state: optax.OptState


class Team(NamedTuple):
    """All that the agents learn, [N, ...]."""

    actor: Actor
    log_alpha: Array  # logarithm of the temperature
    optimizer_state: optax.OptState  # of (actor, log_alpha)
    critics: Critics


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Adam behind a global norm clip, on the parameters as one flat vector; the schedule counts optimizer steps."""
    schedule = optax.linear_schedule(config.lr, config.lr / 10, config.optimizer_steps)
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(schedule, eps=1e-5)))


def init_team(config: Config, env, observation: AgentObservation, key: Array) -> Team:
    """Actors that differ, and critics that are equal if they are to be shared. observation: [E, N, ...]"""
    optimizer = make_optimizer(config)
    in_size = observation.critic_input.shape[-1] + env.action_size

    def init_agent(key):
        actor_key, critic_key = jax.random.split(key)
        actor = Actor(config, observation.observation.shape[-1], env.action_size, key=actor_key)
        critic = jax.vmap(lambda key: Critic(config, in_size, key=key))(jax.random.split(critic_key))
        log_alpha = jnp.log(jnp.asarray(config.alpha_init, float))
        critics = Critics(critic, critic, optimizer.init(critic))
        return Team(actor, log_alpha, optimizer.init((actor, log_alpha)), critics)

    team = jax.vmap(init_agent)(jax.random.split(key, env.n_agents))
    return sync(team) if config.share_critic else team


def pool(batch: Any) -> Any:
    """The rows of all agents as one batch: every leaf [B, N, ...] -> [B N, ...], in one order."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def sync(team: Team) -> Team:
    """Copy the first agent's critics, target critics and critic-optimizer state to every agent."""
    return team._replace(critics=jax.tree.map(lambda x: jnp.broadcast_to(x[0], x.shape), team.critics))


class CriticBatch(NamedTuple):
    """What the critics learn from, [B, N, ...] or pooled [B N, ...]."""

    transition: Transition
    next_action: Array  # [A] of the agent's own current actor
    entropy_bonus: Array  # [] -alpha log_prob of that action


def critic_loss(twins: Critic, config: Config, target_critic: Critic, batch: CriticBatch) -> tuple[Array, Array]:
    """Squared error of both twins against the soft Bellman target, over rows [B, ...]; -> (loss, mean value)

    (Haarnoja et al. 2018, eq. 5 and 6)
    """
    transition, next_critic_input = batch.transition, batch.transition.next_observation.critic_input
    next_value = smaller_value(target_critic, next_critic_input, batch.next_action) + batch.entropy_bonus
    bootstrap = config.gamma * (1 - transition.terminated)  # only termination cuts bootstrapping
    target = transition.reward + bootstrap * next_value
    critic_input = transition.observation.critic_input
    value = jax.vmap(lambda critic: critic(critic_input, transition.action))(twins)  # [2, B]
    return jnp.square(value - target).mean(1).sum(), value.mean()


def critic_step(config: Config, critics: Critics, batch: CriticBatch) -> tuple[Critics, dict]:
    """One optimizer step of an agent's twins, and of their targets the tau-average."""
    value_and_grad = jax.value_and_grad(critic_loss, has_aux=True)
    (loss, value), gradient = value_and_grad(critics.critic, config, critics.target_critic, batch)
    update, optimizer_state = make_optimizer(config).update(gradient, critics.optimizer_state)
    critic = optax.apply_updates(critics.critic, update)
    target_critic = optax.incremental_update(critic, critics.target_critic, config.tau)
    return Critics(critic, target_critic, optimizer_state), {"critic_loss": loss, "value": value}


def update_critics(config: Config, team: Team, key: Array, batch: Transition) -> tuple[Team, dict]:
    """A critic step of the first agent on the pooled batch; without sharing one of every agent on its own rows."""
    noise = jax.random.normal(key, batch.action.shape)
    each_agent = jax.vmap(squashed_sample, (0, 1, 1), 1)
    next_action, log_prob = each_agent(team.actor, batch.next_observation.observation, noise)
    batch = CriticBatch(batch, next_action, -jnp.exp(team.log_alpha) * log_prob)
    if config.share_critic:
        first, metrics = critic_step(config, jax.tree.map(lambda x: x[0], team.critics), pool(batch))
        critics = jax.tree.map(lambda x, updated: x.at[0].set(updated), team.critics, first)
    else:
        critics, metrics = jax.vmap(partial(critic_step, config), in_axes=(0, 1))(team.critics, batch)
    return team._replace(critics=critics), metrics


def actor_loss(learner: tuple[Actor, Array], twins: Critic, observation: AgentObservation, noise: Array) -> tuple:
    """Losses of one agent's actor and temperature, rows [B, ...], noise [B, A]. (Haarnoja et al. 2018, eq. 7, 18)"""
    actor, log_alpha = learner
    action, log_prob = squashed_sample(actor, observation.observation, noise)
    alpha = jnp.exp(log_alpha)
    value = smaller_value(twins, observation.critic_input, action)
    actor_loss = (jax.lax.stop_gradient(alpha) * log_prob - value).mean()
    target_entropy = -action.shape[-1]
    alpha_loss = -alpha * jax.lax.stop_gradient(log_prob + target_entropy).mean()
    return actor_loss + alpha_loss, {"actor_loss": actor_loss, "alpha": alpha, "entropy": -log_prob.mean()}


def actor_step(config: Config, agent: Team, observation: AgentObservation, noise: Array) -> tuple[Team, dict]:
    """One optimizer step of one agent's actor and temperature on its rows [B, ...]."""
    learner = agent.actor, agent.log_alpha
    gradient, metrics = jax.grad(actor_loss, has_aux=True)(learner, agent.critics.critic, observation, noise)
    update, optimizer_state = make_optimizer(config).update(gradient, agent.optimizer_state)
    actor, log_alpha = optax.apply_updates(learner, update)
    return agent._replace(actor=actor, log_alpha=log_alpha, optimizer_state=optimizer_state), metrics


def update_actors(config: Config, team: Team, key: Array, batch: Transition) -> tuple[Team, dict]:
    """An actor step of every agent on its own rows."""
    noise = jax.random.normal(key, batch.action.shape)
    return jax.vmap(partial(actor_step, config), in_axes=(0, 1, 1))(team, batch.observation, noise)


def update_team(config: Config, team: Team, key: Array, batch: Transition) -> tuple[Team, dict]:
    """One gradient step of everything on normalized rows [B, N, ...]."""
    critic_key, actor_key = jax.random.split(key)
    team, critic_metrics = update_critics(config, team, critic_key, batch)
    if config.share_critic:
        team = sync(team)
    team, actor_metrics = update_actors(config, team, actor_key, batch)
    return team, jax.tree.map(jnp.mean, critic_metrics | actor_metrics)


# --- 5. interaction -------------------------------------------------------------------------------
class TrainState(NamedTuple):
    """Everything that training changes."""

    team: Team
    normalizer: Normalizer
    buffer: ReplayBuffer
    observation: AgentObservation  # [E, N, ...] to act on next
    env_state: Any  # [E, ...]
    episode: EpisodeSums  # [E, ...] of the running episodes


def perceive(config: Config, state: TrainState, observation: AgentObservation) -> AgentObservation:
    """What the networks see of an observation."""
    return normalize(state.normalizer, observation) if config.normalize else observation


def select_action(
    config: Config, env, state: TrainState, observation: AgentObservation, key: Array, deterministic: bool
) -> Array:
    """The actions of one team, sampled or tanh of the means, [N, A]."""
    seen = perceive(config, state, observation)
    mean, log_std = jax.vmap(Actor.__call__)(state.team.actor, seen.observation)
    return jnp.tanh(mean if deterministic else mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape))


def interact(env, carry: tuple, action: Array, key: Array) -> tuple[tuple, tuple]:
    """One step of a team with action [N, A]; carry = (AgentObservation, env_state, EpisodeSums).

    Returns (carry, (Transition, done, figures)).
    """
    observation, env_state, episode = carry
    time_step, env_state, next_observation = step_autoreset(env, key, env_state, action)
    each_agent = partial(jnp.broadcast_to, shape=time_step.reward.shape)
    transition = Transition(
        observation=observation,
        action=action,
        reward=time_step.reward,
        terminated=each_agent(time_step.terminated),
        truncated=each_agent(time_step.truncated),
        next_observation=time_step.observation,
    )
    done, figures, episode = track_episode(env, episode, time_step)
    return (next_observation, env_state, episode), (transition, done, figures)


def collect(config: Config, env, state: TrainState, action: Array, key: Array) -> tuple[TrainState, tuple]:
    """One step of all environments with action [E, N, A] into the buffer; -> (state, (done, figures) [E])"""
    start = state.observation, state.env_state, state.episode
    each_team = jax.vmap(partial(interact, env))
    end, (transition, *outcome) = each_team(start, action, jax.random.split(key, config.num_envs))
    observation, env_state, episode = end
    state = state._replace(
        normalizer=update_normalizer(state.normalizer, transition.observation),
        buffer=add(state.buffer, transition),
        observation=observation,
        env_state=env_state,
        episode=episode,
    )
    return state, outcome


def collect_and_learn(config: Config, env, state: TrainState, key: Array) -> tuple[TrainState, tuple]:
    """One step of all environments, then one gradient step; -> (state, (done [E], figures [E], losses))"""
    act_key, collect_key, sample_key, update_key = jax.random.split(key, 4)
    each_team = jax.vmap(partial(select_action, config, env, state, deterministic=False))
    action = each_team(state.observation, jax.random.split(act_key, config.num_envs))
    state, outcome = collect(config, env, state, action, collect_key)

    batch = sample(state.buffer, sample_key, config.batch_size)
    seen, seen_next = (perceive(config, state, each) for each in (batch.observation, batch.next_observation))
    batch = batch._replace(observation=seen, next_observation=seen_next)
    team, losses = update_team(config, state.team, update_key, batch)
    return state._replace(team=team), (*outcome, losses)


# --- 6. training: one scan ------------------------------------------------------------------------
def train_step(config: Config, env, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """One iteration: num_steps steps of all environments with a gradient step after each."""
    keys = jax.random.split(key, config.num_steps)
    state, (done, figures, losses) = jax.lax.scan(partial(collect_and_learn, config, env), state, keys)
    return state, finished_episodes(done, figures) | jax.tree.map(jnp.mean, losses)


def check_agents(env) -> None:
    """Raise a ValueError unless the agents are homogeneous and their actions continuous."""
    if not env.continuous_actions:
        raise ValueError("--continuous-actions must be on, the actors of SAC draw from a density")
    key = jax.random.key(0)
    observation, action = jax.eval_shape(env.reset, key)[0], jax.eval_shape(env.sample_action, key)
    shapes = [getattr(part, "shape", ()) for part in (observation.observation, observation.critic_input, action)]
    if any(len(shape) != 2 or shape[0] != env.n_agents for shape in shapes):
        raise ValueError("--env must have homogeneous agents: one array [N, ...] of observations, one of actions")


@partial(jax.jit, static_argnames=("config", "env"))
def init_state(config: Config, env, key: Array) -> TrainState:
    """A fresh team, and `learning_starts` random env steps in the buffer. Raises ValueError if agents do not fit."""
    check_agents(env)
    team_key, reset_key, fill_key = jax.random.split(key, 3)
    reset_keys = jax.random.split(reset_key, config.num_envs)
    observation, env_state = jax.vmap(env.reset)(reset_keys)
    episode = zero_sums(env, config.num_envs)
    action = jnp.zeros((config.num_envs, env.n_agents, env.action_size))
    each_team = jax.vmap(partial(interact, env))
    _, (transition, *_) = jax.eval_shape(each_team, (observation, env_state, episode), action, reset_keys)
    state = TrainState(
        team=init_team(config, env, observation, team_key),
        normalizer=init_normalizer(observation),
        buffer=init_buffer(transition, config.buffer_size),
        observation=observation,
        env_state=env_state,
        episode=episode,
    )

    def step(state, key):
        action_key, collect_key = jax.random.split(key)
        action = jax.vmap(env.sample_action)(jax.random.split(action_key, config.num_envs))
        return collect(config, env, state, action, collect_key)[0], None

    steps = -(-config.learning_starts // config.num_envs)
    return jax.lax.scan(step, state, jax.random.split(fill_key, steps))[0]


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
    return {cls.__name__.lower(): cls for cls in (Spread, Rendezvous)}


def env_steps_per_iteration(config: Config, env) -> int:
    return config.num_envs * config.num_steps


def columns(env) -> dict[str, str]:
    """The columns of the line per iteration: header and metric."""
    names = (*env.figure_names, "critic_loss", "alpha", "entropy")
    return dict(zip(names, names, strict=True))


# --- 7. checkpoints -------------------------------------------------------------------------------
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


# --- 8. flags -------------------------------------------------------------------------------------
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


# --- 9. recording: lines, metrics.csv, checkpoint.eqx ---------------------------------------------
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


# --- 10. running -----------------------------------------------------------------------------------
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
