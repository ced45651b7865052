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
value normalization, no recurrence, one Adam for both networks.

Axes: T steps, E environments, N agents, B batch, O/C/A sizes of observation, critic observation and action.

    python ppo_ctde.py --grid 16 --n-agents 4
"""

import argparse
import csv
import dataclasses
import datetime
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.experimental import io_callback

from envs import (
    AgentObservation,
    Coverage,
    EpisodeSums,
    Rendezvous,
    check_range,
    step_autoreset,
    track_episode,
    zero_sums,
)

EVAL_EPISODES = 200


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
    max_grad_norm: float = 0.5  # global gradient norm
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
    """Two hidden tanh layers, [I] -> [hidden]."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear]

    def __init__(self, size: int, hidden: int, *, key: Array):
        first_key, second_key = jax.random.split(key)
        self.layers = eqx.nn.Linear(size, hidden, key=first_key), eqx.nn.Linear(hidden, hidden, key=second_key)

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class Actor(eqx.Module):
    """Logits of the discrete actions, [O] -> [A]."""

    trunk: Trunk
    head: eqx.nn.Linear

    def __init__(self, config: Config, size: int, n_actions: int, *, key: Array):
        trunk_key, head_key = jax.random.split(key)
        self.trunk = Trunk(size, config.hidden, key=trunk_key)
        self.head = small_linear(config.hidden, n_actions, key=head_key)

    def __call__(self, observation: Array) -> Array:
        return self.head(self.trunk(observation))


class Critic(eqx.Module):
    """State value, [C] -> []."""

    trunk: Trunk
    head: eqx.nn.Linear

    def __init__(self, config: Config, size: int, *, key: Array):
        trunk_key, head_key = jax.random.split(key)
        self.trunk = Trunk(size, config.hidden, key=trunk_key)
        self.head = eqx.nn.Linear(config.hidden, "scalar", key=head_key)

    def __call__(self, x: Array) -> Array:
        return self.head(self.trunk(x))


def small_linear(in_size: int, out_size: int, *, key: Array) -> eqx.nn.Linear:
    """A last layer that starts near zero: every choice is equally likely at first."""
    return jax.tree.map(lambda leaf: 0.01 * leaf, eqx.nn.Linear(in_size, out_size, key=key))


def action_log_probs(actor: Actor, observation: Array, action_mask: Array | None) -> Array:
    """Log-probabilities of the actions of one agent, [O], [A] -> [A]; of a masked one about -1e9."""
    logits = actor(observation)
    return jax.nn.log_softmax(logits if action_mask is None else jnp.where(action_mask, logits, -1e9))


# --- 3. normalizer --------------------------------------------------------------------------------
class Normalizer(NamedTuple):
    """Running statistics of the raw observations, one pytree: [O] for the actor, [C] for the critic."""

    count: Array  # [] observations of single agents so far
    mean: AgentObservation
    variance: AgentObservation


def init_normalizer(observation: AgentObservation) -> Normalizer:
    """The identity (up to epsilon), for observations [..., N, O] or shapes of them."""
    without_mask = observation._replace(action_mask=None)
    mean = jax.tree.map(lambda x: jnp.zeros(x.shape[-1]), without_mask)
    return Normalizer(jnp.zeros(()), mean, jax.tree.map(jnp.ones_like, mean))


def update_normalizer(normalizer: Normalizer, observation: AgentObservation) -> Normalizer:
    """Merge the rows of a batch [..., O] (Chan et al. 1979). A feature with a non-finite moment keeps its statistics.

    Means and variances instead of sums, so that float32 carries 1e9 rows.
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


# --- 4. rollout -----------------------------------------------------------------------------------
class Transition(NamedTuple):
    """One step of a team; [T, E, ...] in a rollout."""

    observation: AgentObservation  # [N, ...] acted on, raw
    action: Array  # [N]
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


def act(config: Config, state: TrainState, observation: AgentObservation, key: Array) -> tuple[Array, Array]:
    """Sample the actions of one team; -> (action [N], log_prob [N])"""
    seen = perceive(config, state, observation)
    log_prob = jax.vmap(partial(action_log_probs, state.actor))(seen.observation, seen.action_mask)
    action = jax.random.categorical(key, log_prob)
    return action, jnp.take_along_axis(log_prob, action[:, None], 1)[:, 0]


def evaluate_state(config: Config, state: TrainState, observation: AgentObservation) -> Array:
    """The critic's value for each agent of one team, [N]."""
    return jax.vmap(state.critic)(perceive(config, state, observation).critic_input)


def interact(config: Config, env, state: TrainState, carry: tuple, key: Array):
    """One step of a team; carry = (AgentObservation, env_state, EpisodeSums). -> carry, (Transition, done, figures)"""
    observation, env_state, episode = carry
    act_key, step_key = jax.random.split(key)
    action, log_prob = act(config, state, observation, act_key)
    time_step, env_state, next_observation = step_autoreset(env, step_key, env_state, action)
    transition = Transition(
        observation=observation,
        action=action,
        log_prob=log_prob,
        value=evaluate_state(config, state, observation),
        next_value=evaluate_state(config, state, time_step.observation),
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

    def step(carry, key):
        return each_team(carry, jax.random.split(key, config.num_envs))

    start = state.observation, state.env_state, state.episode
    (observation, env_state, episode), (transition, done, figures) = jax.lax.scan(
        step, start, jax.random.split(key, config.num_steps)
    )
    finished = {name: (value * done).sum() / done.sum() for name, value in figures.items()}  # NaN: none finished
    state = state._replace(observation=observation, env_state=env_state, episode=episode)
    return state, transition, finished


# --- 5. PPO ---------------------------------------------------------------------------------------
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
    action: Array  # [N]
    log_prob: Array  # [N]
    advantage: Array  # [N]
    target: Array  # [N]


def ppo_loss(networks: tuple[Actor, Critic], config: Config, batch: Batch) -> tuple[Array, dict]:
    """Clipped surrogate, value error and entropy bonus (Schulman et al. 2017, eq. 9) over rows [B, N]."""
    actor, critic = networks
    observation = batch.observation
    log_probs = jax.vmap(jax.vmap(partial(action_log_probs, actor)))(observation.observation, observation.action_mask)
    log_prob = jnp.take_along_axis(log_probs, batch.action[..., None], 2)[..., 0]  # [B, N]

    ratio = jnp.exp(log_prob - batch.log_prob)
    clipped = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-5)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()

    value = jax.vmap(jax.vmap(critic))(observation.critic_input)
    value_loss = jnp.square(value - batch.target).mean()

    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "ratio": ratio.mean()}


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Adam behind a global norm clip; one update per minibatch."""
    schedule = optax.linear_schedule(config.lr, config.lr / 10, config.optimizer_steps)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(schedule, eps=1e-5))


def update_minibatch(config: Config, carry: tuple, batch: Batch) -> tuple[tuple, dict]:
    """One optimizer step; carry = ((actor, critic), optimizer_state)."""
    networks, optimizer_state = carry
    (_, metrics), gradient = jax.value_and_grad(ppo_loss, has_aux=True)(networks, config, batch)
    update, optimizer_state = make_optimizer(config).update(gradient, optimizer_state)
    return (optax.apply_updates(networks, update), optimizer_state), metrics


def update_epoch(config: Config, batch: Batch, carry: tuple, key: Array) -> tuple[tuple, dict]:
    """One pass over the rows [B, ...] in random order."""
    order = jax.random.permutation(key, batch.target.shape[0])
    minibatches = jax.tree.map(lambda x: x[order].reshape(config.num_minibatches, -1, *x.shape[1:]), batch)
    return jax.lax.scan(partial(update_minibatch, config), carry, minibatches)


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
        partial(update_epoch, config, batch),
        ((state.actor, state.critic), state.optimizer_state),
        jax.random.split(update_key, config.num_epochs),
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


# --- 6. training: one scan ------------------------------------------------------------------------
@partial(jax.jit, static_argnames=("config", "env"))
def init_state(config: Config, env, key: Array) -> TrainState:
    """Fresh networks, optimizer, normalizer and multiplier, and the first observations."""
    actor_key, critic_key, reset_key = jax.random.split(key, 3)
    observation, env_state = jax.vmap(env.reset)(jax.random.split(reset_key, config.num_envs))
    actor = Actor(config, observation.observation.shape[-1], env.n_actions, key=actor_key)
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

    On the host, `log_fn(i, metrics)` is called after every iteration, `save_fn(i, state)` after every `save_every`.
    """

    def iteration(state, i):
        state, metrics = train_step(config, env, state, jax.random.fold_in(key, i))
        if log_fn is not None:
            io_callback(log_fn, None, i, metrics, ordered=True)
        if save_fn is not None:
            save = partial(io_callback, save_fn, None, i, state, ordered=True)
            jax.lax.cond((i + 1) % save_every == 0, save, lambda: None)
        return state, metrics

    return jax.lax.scan(iteration, state, jnp.arange(start, config.iterations if stop is None else stop))


def init_state_from_checkpoint(config: Config, env, key: Array, path: str) -> TrainState:
    """A fresh state around the networks and the normalizer of a checkpoint. Raises ValueError if shapes differ."""
    state, saved = init_state(config, env, key), load_checkpoint(path)
    kept = ("actor", "critic", "normalizer")
    check_same_shapes(path, *({name: getattr(each, name) for name in kept} for each in (saved, state)))
    return state._replace(**{name: getattr(saved, name) for name in kept})


def play(config: Config, env, state: TrainState, carry: tuple, key: Array) -> tuple[tuple, tuple]:
    """One step of one team, no reset; carry = (AgentObservation, env_state, EpisodeSums). -> carry, (done, figures)"""
    observation, env_state, episode = carry
    act_key, step_key = jax.random.split(key)
    action, _ = act(config, state, observation, act_key)
    time_step, env_state = env.step(step_key, env_state, action)
    done, figures, episode = track_episode(env, episode, time_step)
    return (time_step.observation, env_state, episode), (done, figures)


@partial(jax.jit, static_argnames=("config", "env", "episodes"))
def evaluate(config: Config, env, state: TrainState, key: Array, episodes: int) -> tuple[dict[str, Array], Any]:
    """Fresh episodes, sampled actions; -> (figures [E] of the episodes, the env_state in which the first one ended)."""
    reset_key, step_key = jax.random.split(key)
    each_team = jax.vmap(partial(play, config, env, state))

    def step(carry, key):
        return each_team(carry, jax.random.split(key, episodes))

    start = *jax.vmap(env.reset)(jax.random.split(reset_key, episodes)), zero_sums(env, episodes)
    (_, env_state, _), (done, figures) = jax.lax.scan(step, start, jax.random.split(step_key, env.horizon))
    end = done.argmax(0)[None]  # [1, E] the step in which an episode ended
    figures = jax.tree.map(lambda x: jnp.take_along_axis(x, end, 0)[0], figures)
    return figures, jax.tree.map(lambda x: x[0], env_state)


def environments() -> dict[str, type]:
    """The environments to choose from with --env, the default first."""
    return {"coverage": Coverage, "rendezvous": Rendezvous}


def env_steps_per_iteration(config: Config, env) -> int:
    return config.num_envs * config.num_steps


def columns(env) -> dict[str, str]:
    """The columns of the line per iteration: header and metric."""
    names = ("episode_return", *env.figures, "lagrange_multiplier", "explained_variance")
    return dict(zip(names, names, strict=True))


# --- 7. running: arguments, logging, saving --------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """One run of the script; each field is a flag."""

    seed: int = 0  # random seed
    run_dir: str = ""  # folder to write config.json, metrics.csv and checkpoint.eqx to
    save_every: int = 10  # iterations between checkpoints
    init_from: str = ""  # checkpoint, or folder with one, whose networks to start from

    def __post_init__(self):
        check_range(self, "seed", "in [0, 2**31)", lambda value: 0 <= value < 2**31)
        check_range(self, "save_every", "at least 1", lambda value: value >= 1)


def parse_settings(parser: argparse.ArgumentParser, argv: list[str] | None) -> tuple[Config, Any, Run]:
    """Config, environment and run from the command line: a flag per field, the comment behind it is the help text."""
    names = list(environments())
    env_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for each in (env_parser, parser):
        each.add_argument("--env", choices=names, default=names[0], help="environment, its fields are flags as well")
        each.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    classes = Config, environments()[env_parser.parse_known_args(argv)[0].env], Run
    for cls in classes:
        comment = dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(cls), re.MULTILINE))
        for field in dataclasses.fields(cls):
            kind = {"type": type(field.default), "choices": get_args(field.type) or None}
            kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else kind
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, default=field.default, help=comment[field.name], **kind)
    values = vars(parser.parse_args(argv))
    return tuple(cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)}) for cls in classes)


class Recorder:
    """Prints a line and appends a row of metrics.csv per iteration, saves checkpoints; called from inside the scan."""

    def __init__(self, run: Run, settings: dict, columns: dict[str, str], iterations: int, env_steps: int):
        self.run, self.settings, self.columns = run, settings, columns
        self.iterations, self.env_steps = iterations, env_steps
        self.folder, self.rows, self.started = Path(run.run_dir), None, 0.0
        if run.run_dir and any((self.folder / name).exists() for name in ("config.json", "metrics.csv")):
            raise ValueError(f"--run-dir must be a folder without a run, {run.run_dir} holds one")
        if run.run_dir:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.rows = (self.folder / "metrics.csv").open("w", newline="")
                (self.folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
            except OSError as error:
                raise ValueError(f"--run-dir must be a writable folder: {error}") from error

    def start(self) -> None:
        """Start the clock and print the header."""
        self.started = time.perf_counter()
        headers = ["iteration", "  env_steps", "  steps/s", *(header.rjust(8) for header in self.columns), "time_left"]
        print("  ".join(headers), flush=True)

    def log(self, i: Array, metrics: dict) -> None:
        seconds, done = time.perf_counter() - self.started, int(i) + 1
        metrics = {name: float(np.asarray(value)) for name, value in metrics.items()}
        env_steps, left = done * self.env_steps, seconds / done * (self.iterations - done)
        if self.rows:
            row = {"seed": self.run.seed, "iteration": done, "env_steps": env_steps} | metrics
            row |= {"env_steps_per_second": round(env_steps / seconds, 1), "seconds": round(seconds, 2)}
            csv.writer(self.rows).writerows([row, row.values()] if done == 1 else [row.values()])
            self.rows.flush()
        cells = [f"{done}/{self.iterations}".rjust(9), f"{env_steps:>11,}", f"{env_steps / seconds:>9,.0f}"]
        cells += [f"{metrics[name]:>{max(len(header), 8)}.2f}" for header, name in self.columns.items()]
        print("  ".join([*cells, f"{datetime.timedelta(seconds=round(left))}".rjust(9)]), flush=True)

    def save(self, i: Array, state: Any) -> None:
        """One JSON line, then the leaves of the state; written aside and renamed, so it is complete or not there."""
        header = self.settings | {"seed": self.run.seed, "iteration": int(i) + 1}
        temporary = self.folder / "checkpoint.tmp"
        with temporary.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            eqx.tree_serialise_leaves(file, jax.tree.map(np.asarray, state))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / "checkpoint.eqx")


def load_checkpoint(path: str | Path) -> TrainState:
    """The state in a checkpoint of this script, or in the folder of its run. Raises ValueError on any other file."""
    script, path = Path(__file__).name, Path(path)
    path = path / "checkpoint.eqx" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
            if header["script"] != script:
                raise ValueError(f"--init-from must be a checkpoint of {script}, {path} is one of {header['script']}")
            name, fields = header["env"].popitem()
            config, env = Config(**header["config"]), environments()[name.lower()](**fields)
            like = jax.eval_shape(partial(init_state, config, env), jax.random.key(0))
            return eqx.tree_deserialise_leaves(file, like)
    except OSError as error:
        raise ValueError(f"--init-from must be a checkpoint, {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, LookupError, AttributeError, TypeError, EOFError, RuntimeError):
        raise ValueError(f"--init-from must be a checkpoint, {path} is not a complete one of {script}") from None


def check_same_shapes(path: str, saved: Any, wanted: Any) -> None:
    """Raise a ValueError that names the leaves in which two pytrees differ."""
    saved, wanted = (
        {jax.tree_util.keystr(name): leaf.shape for name, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (saved, wanted)
    )
    differing = [name for name in saved | wanted if saved.get(name) != wanted.get(name)]
    if differing:
        leaves = ", ".join(f"{name} {saved.get(name)} instead of {wanted.get(name)}" for name in differing)
        raise ValueError(f"--init-from must have the same architecture, {path} has {leaves}")


def evaluation_line(seed: int, figures: dict[str, Array]) -> str:
    """Means and standard errors of figures [E] over episodes."""
    cells = []
    for name, value in figures.items():
        value = np.asarray(value, np.float64)
        cells.append(f"{name}={value.mean():.1f} {name}_se={value.std(ddof=1) / np.sqrt(value.size):.1f}")
    return f"evaluation seed={seed} episodes={value.size} {' '.join(cells)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    try:
        config, env, run = parse_settings(parser, argv)
        settings = {"script": Path(__file__).name, "config": asdict(config), "env": {type(env).__name__: asdict(env)}}
        settings["run"] = asdict(run)
        init_key, train_key, eval_key = jax.random.split(jax.random.key(run.seed), 3)
        start = partial(init_state_from_checkpoint, path=run.init_from) if run.init_from else init_state
        state = start(config, env, init_key)
        recorder = Recorder(run, settings, columns(env), config.iterations, env_steps_per_iteration(config, env))
    except ValueError as error:
        parser.error(str(error))

    started = time.perf_counter()
    save = {"save_fn": recorder.save, "save_every": run.save_every} if run.run_dir else {}
    compiled = train.lower(config, env, state, train_key, log_fn=recorder.log, **save).compile()
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    recorder.start()
    state, _ = jax.block_until_ready(compiled(state, train_key))
    if run.run_dir:
        recorder.save(config.iterations - 1, state)

    figures, env_state = evaluate(config, env, state, eval_key, EVAL_EPISODES)
    print(evaluation_line(run.seed, {name: figures[name] for name in (*env.figures, "episode_return")}))
    print(env.text_map(env_state))


def run_interruptible(function: Callable[[], None]) -> None:
    """Run in a worker thread: the main one waits in Python, where Ctrl-C reaches it, and not inside the scan."""
    try:
        ThreadPoolExecutor(1).submit(function).result()
    except KeyboardInterrupt:
        print("interrupted: the rows and checkpoints written so far are complete", file=sys.stderr, flush=True)
        os._exit(130)
    except (jax.errors.JaxRuntimeError, OSError) as error:  # such as a failed write: the text ends with the cause
        sys.exit(f"stopped: {str(error).strip().splitlines()[-1]}")


if __name__ == "__main__":
    run_interruptible(main)
