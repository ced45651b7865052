# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.1,!=0.10.2", "jaxlib>=0.10.1,!=0.10.2", "equinox>=0.13", "optax>=0.2.5", "numpy>=2.0"]
# ///
"""MERL: a gradient trains the executor, an evolution strategy refines the selector on team fitness.

Every robot runs the same policy. Its selector picks a skill, the skill scores the goals of a stencil around the robot,
a goal is sampled from the scores, and a greedy controller makes the move. One round of training:

    (a) PPO trains executor, selector and critic on the reward r - lagrange_multiplier * cost    (grad_steps times)
    (b) theta <- the selector as the gradient left it                                            (inject the learner)
    (c) theta <- one generation of the evolution strategy on team fitness, the same episodes for all members
    (d) selector <- theta                                                                        (write back)

Skills: disperse = the executor's learned scores; flock = towards the in-range teammate whose link is most at risk, or a
learned head; hold = stay, unless about to be isolated, then towards the nearest teammate.

Papers: Khadka & Tumer 2018 (ERL), Majumdar et al. 2020 (MERL), Salimans et al. 2017 (OpenAI-ES), Schulman et al. 2017
(PPO). Deviations: the gradient learner is PPO and not off-policy; evolution moves the selector head only, from the
learner's own weights, instead of a population of whole policies; fitness carries the price of the constraint.

Axes: T steps, E episodes, N agents, B batch, P population, D parameters, K goals, O/C observation sizes.

    python merl.py --grid 10 --n-agents 4
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
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.experimental import io_callback

from envs import MOVES, AgentObservation, Coverage, chebyshev_distance, check_range
from es import ESConfig, es_step, module_theta, set_module_theta

SKILLS = ("disperse", "flock", "hold")
SCRIPT_SHARPNESS = 10.0  # scripted scores are this many nats per cell of distance: all but greedy
CONGESTION_CHARGE = 0.01  # reward per in-range teammate with the same skill

ES_FIELDS = ("pop", "sigma", "es_lr", "es_kind", "elite_frac", "weight_decay", "eval_batch")  # as ESConfig orders them


EVAL_EPISODES = 100


# --- 1. configuration -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Hyperparameters; each field is a flag, its comment the help text."""

    outer: int = 60  # rounds of training
    grad_steps: int = 5  # PPO steps per round
    rollouts: int = 32  # episodes per PPO step, and per fitness of a member
    pop: int = 16  # members of the population, even
    sigma: float = 0.05  # standard deviation of the search distribution
    es_lr: float = 0.01  # step size of nes
    es_kind: Literal["nes", "cem"] = "nes"  # OpenAI-ES or cross-entropy method
    elite_frac: float = 0.25  # share of the population that cem averages
    weight_decay: float = 0.0  # pull of the evolution strategy towards zero, per unit of es-lr
    eval_batch: int = 0  # members evaluated at once, bounds the memory; 0: all
    flock: Literal["scripted", "learned"] = "scripted"  # how the flock skill scores its goals
    congestion: Literal["off", "on"] = "off"  # charge robots for in-range teammates with the same skill
    n_goals: Literal[5, 9] = 5  # goals: here and 4 or 8 directions
    stride: int = 1  # cells between here and a goal
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
    cost_limit: float = 0.03  # mean cost per step that the multiplier tolerates
    lagrange_lr: float = 0.1  # step size of dual ascent
    lagrange_init: float = 1.0  # multiplier at the start

    def __post_init__(self):
        counts = "outer grad_steps rollouts stride hidden num_epochs num_minibatches"
        check_range(self, counts, "at least 1", lambda value: value >= 1)
        positive = "sigma lr clip_eps max_grad_norm"
        check_range(self, positive, "finite and above 0", lambda value: 0 < value < np.inf)
        weights = "es_lr weight_decay eval_batch ent_coef vf_coef cost_limit lagrange_lr lagrange_init"
        check_range(self, weights, "finite and at least 0", lambda value: 0 <= value < np.inf)
        check_range(self, "gamma gae_lambda", "in [0, 1]", lambda value: 0 <= value <= 1)
        check_range(self, "elite_frac", "in (0, 1]", lambda value: 0 < value <= 1)
        check_range(self, "pop", "even and at least 2", lambda value: value >= 2 and value % 2 == 0)

    @property
    def es_config(self) -> ESConfig:
        return ESConfig(*(getattr(self, name) for name in ES_FIELDS))

    @property
    def iterations(self) -> int:
        return self.outer

    @property
    def optimizer_steps(self) -> int:
        return self.outer * self.grad_steps * self.num_epochs * self.num_minibatches


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


class Policy(eqx.Module):
    """Heads for the selector, the executor and, if it is learned, the flock skill on one trunk; one robot at a time."""

    trunk: Trunk
    selector_head: eqx.nn.Linear
    executor_head: eqx.nn.Linear
    flock_head: eqx.nn.Linear | None

    def __init__(self, config: Config, size: int, *, key: Array):
        trunk_key, selector_key, executor_key, flock_key = jax.random.split(key, 4)
        self.trunk = Trunk(size, config.hidden, key=trunk_key)
        self.selector_head = small_linear(config.hidden, len(SKILLS), key=selector_key)
        self.executor_head = small_linear(config.hidden, config.n_goals, key=executor_key)
        self.flock_head = None
        if config.flock == "learned":
            self.flock_head = small_linear(config.hidden, config.n_goals, key=flock_key)


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


# --- 3. skills ------------------------------------------------------------------------------------
def make_stencil(config: Config) -> np.ndarray:
    """Goal offsets in cells, [K, 2]: here first, then north, east, south, west and, for 9 goals, the diagonals."""
    diagonal = np.array([(-1, 1), (1, 1), (1, -1), (-1, -1)])
    return config.stride * np.concatenate([MOVES, diagonal])[: config.n_goals]


def goal_mask(stencil: np.ndarray, action_mask: Array) -> Array:
    """[5] -> [K]: a goal is allowed if an allowed move leads towards it; here always is."""
    closer = np.abs(stencil[:, None] - MOVES).sum(-1) < np.abs(stencil).sum(-1)[:, None]  # [K, 5]
    return (closer & action_mask).any(-1).at[0].set(True)


def controller(stencil: np.ndarray, goal: Array, action_mask: Array) -> Array:
    """Greedy move: of the allowed actions, the one that ends nearest to the goal. goal [], action_mask [5] -> []."""
    distance = jnp.abs(jnp.asarray(stencil)[goal] - MOVES).sum(-1)
    return jnp.where(action_mask, distance, jnp.inf).argmin()


def skill_scores(policy: Policy, config: Config, env: Coverage, hidden: Array, observation: Array) -> Array:
    """Scores of the goals under each skill, before masking. hidden [H], observation [O] -> [3, K]"""
    stencil = make_stencil(config)
    nearest, weakest = env.teammate_offsets(observation)
    disperse = policy.executor_head(hidden)

    if policy.flock_head is None:
        flock = -SCRIPT_SHARPNESS * weakest[2] * jnp.abs(stencil - weakest[:2]).sum(-1)
    else:
        flock = policy.flock_head(hidden)

    safe = (nearest[2] > 0) & (jnp.abs(nearest[:2]).max() < env.comm_r)  # one more step apart keeps the link
    hold = -SCRIPT_SHARPNESS * jnp.abs(stencil - jnp.where(safe, 0.0, nearest[:2])).sum(-1)
    return jnp.stack([disperse, flock, hold])


def choice_log_probs(policy: Policy, config: Config, env: Coverage, observation: Array, action_mask: Array):
    """Log-probabilities of the skills [3] and, under each, of the goals [3, K]. observation [O], action_mask [5]"""
    hidden = policy.trunk(observation)
    scores = skill_scores(policy, config, env, hidden, observation)
    allowed = goal_mask(make_stencil(config), action_mask)
    skill_log_prob = jax.nn.log_softmax(policy.selector_head(hidden))
    return skill_log_prob, jax.nn.log_softmax(jnp.where(allowed, scores, -1e9))


class Choice(NamedTuple):
    """What the policy decides for a robot."""

    skill: Array  # []
    goal: Array  # []
    log_prob: Array  # [] of both


def act(policy: Policy, config: Config, env: Coverage, observation: Array, action_mask: Array, key: Array):
    """Sample a skill, then a goal, and move towards it. observation [O], action_mask [5]; -> (action [], Choice)"""
    skill_key, goal_key = jax.random.split(key)
    skill_log_prob, goal_log_prob = choice_log_probs(policy, config, env, observation, action_mask)
    skill = jax.random.categorical(skill_key, skill_log_prob)
    goal = jax.random.categorical(goal_key, goal_log_prob[skill])
    action = controller(make_stencil(config), goal, action_mask)
    return action, Choice(skill, goal, skill_log_prob[skill] + goal_log_prob[skill, goal])


# --- 4. rollout -----------------------------------------------------------------------------------
class Transition(NamedTuple):
    """One step of a team; [T, E, ...] in a rollout."""

    observation: AgentObservation  # [N, ...] acted on
    choice: Choice  # [N]
    reward: Array  # [N]
    cost: Array  # []
    terminated: Array  # []
    truncated: Array  # []


def interact(policy: Policy, config: Config, env: Coverage, carry: tuple, key: Array):
    """One step of one team; carry = (AgentObservation, env_state). -> (carry, (Transition, TimeStep))"""
    observation, env_state = carry
    act_key, step_key = jax.random.split(key)
    act_keys = jax.random.split(act_key, env.n_agents)
    each_robot = jax.vmap(partial(act, policy, config, env))
    action, choice = each_robot(observation.observation, observation.action_mask, act_keys)
    time_step, next_state = env.step(step_key, env_state, action)

    reward = time_step.reward
    if config.congestion == "on":
        in_range = chebyshev_distance(env_state.position) <= env.comm_r  # [N, N], itself included
        same_skill = choice.skill[:, None] == choice.skill
        reward = reward - CONGESTION_CHARGE * ((in_range & same_skill).sum(-1) - 1)
    transition = Transition(
        observation=observation,
        choice=choice,
        reward=reward,
        cost=time_step.cost,
        terminated=time_step.terminated,
        truncated=time_step.truncated,
    )
    return (time_step.observation, next_state), (transition, time_step)


def rollout(policy: Policy, config: Config, env: Coverage, key: Array, episodes: int, keep: Callable):
    """Whole episodes; -> (keep(Transition, TimeStep) [T, E, ...], final (AgentObservation, env_state) [E])"""
    reset_key, step_key = jax.random.split(key)
    each_team = jax.vmap(partial(interact, policy, config, env))

    def step(carry, key):
        carry, outcome = each_team(carry, jax.random.split(key, episodes))
        return carry, keep(*outcome)

    start = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))
    final, kept = jax.lax.scan(step, start, jax.random.split(step_key, env.horizon))
    return kept, final


def collect(policy: Policy, config: Config, env: Coverage, key: Array):
    """Episodes to learn from; -> (Transition [T, E, ...], the final AgentObservation [E, ...], info [T, E])"""
    keep = lambda transition, time_step: (transition, time_step.info)  # noqa: E731
    (transition, info), (final, _) = rollout(policy, config, env, key, config.rollouts, keep)
    return transition, final, info


def play(policy: Policy, config: Config, env: Coverage, key: Array, episodes: int):
    """Episodes to score; -> (reward [T, E, N], cost [T, E], info [T, E], final env_state [E])"""
    keep = lambda transition, time_step: (time_step.reward, time_step.cost, time_step.info)  # noqa: E731
    (reward, cost, info), (_, env_state) = rollout(policy, config, env, key, episodes, keep)
    return reward, cost, info, env_state


def summarize(env: Coverage, info: dict[str, Array]) -> dict[str, Array]:
    """The figures of whole episodes from their info [T, E], [E] each."""
    return env.episode_summary(jax.tree.map(lambda x: x.mean(0), info), jax.tree.map(lambda x: x[-1], info))


# --- 5. PPO trains executor, selector and critic --------------------------------------------------
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
    """What one PPO step learns from, [T, E, ...] or rows [B, ...]."""

    transition: Transition
    advantage: Array  # [N]
    target: Array  # [N]


def ppo_loss(networks: tuple[Policy, Critic], config: Config, env: Coverage, batch: Batch) -> tuple[Array, dict]:
    """Clipped surrogate, value error and entropy bonus (Schulman et al. 2017, eq. 9) over rows [B, N]."""
    policy, critic = networks
    observation, choice = batch.transition.observation, batch.transition.choice
    log_probs = jax.vmap(jax.vmap(partial(choice_log_probs, policy, config, env)))
    skill_log_prob, goal_log_prob = log_probs(observation.observation, observation.action_mask)  # [B, N, 3 (, K)]
    goal_log_prob_chosen = jnp.take_along_axis(goal_log_prob, choice.skill[..., None, None], 2)[..., 0, :]
    log_prob = jnp.take_along_axis(skill_log_prob, choice.skill[..., None], 2)[..., 0]
    log_prob += jnp.take_along_axis(goal_log_prob_chosen, choice.goal[..., None], 2)[..., 0]

    ratio = jnp.exp(log_prob - choice.log_prob)
    clipped = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-5)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()

    value = jax.vmap(jax.vmap(critic))(observation.critic_input)
    value_loss = jnp.square(value - batch.target).mean()

    skill_prob = jnp.exp(skill_log_prob)
    goal_entropy = -(jnp.exp(goal_log_prob) * goal_log_prob).sum(-1)  # [B, N, 3]
    entropy = (skill_prob * (goal_entropy - skill_log_prob)).sum(-1).mean()  # H(skill) + E[H(goal | skill)]

    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return loss, metrics | {f"skill_{name}": share for name, share in zip(SKILLS, skill_prob.mean((0, 1)), strict=True)}


class TrainState(NamedTuple):
    """Everything that training changes."""

    policy: Policy
    critic: Critic
    optimizer_state: optax.OptState
    lagrange_multiplier: Array  # [] price of a unit of cost
    sigma: Array  # [] of the search distribution; cem adapts it


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Adam behind a global norm clip; one update per minibatch."""
    schedule = optax.linear_schedule(config.lr, config.lr / 10, config.optimizer_steps)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(schedule, eps=1e-5))


def update_minibatch(config: Config, env: Coverage, carry: tuple, batch: Batch) -> tuple[tuple, dict]:
    """One optimizer step; carry = ((policy, critic), optimizer_state)."""
    networks, optimizer_state = carry
    (_, metrics), gradient = jax.value_and_grad(ppo_loss, has_aux=True)(networks, config, env, batch)
    update, optimizer_state = make_optimizer(config).update(gradient, optimizer_state)
    return (optax.apply_updates(networks, update), optimizer_state), metrics


def update_epoch(config: Config, env: Coverage, batch: Batch, carry: tuple, key: Array) -> tuple[tuple, dict]:
    """One pass over the rows [B, ...] in random order."""
    order = jax.random.permutation(key, batch.target.shape[0])
    minibatches = jax.tree.map(lambda x: x[order].reshape(config.num_minibatches, -1, *x.shape[1:]), batch)
    return jax.lax.scan(partial(update_minibatch, config, env), carry, minibatches)


def ppo_step(config: Config, env: Coverage, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """Collect, estimate advantages, update the networks, then price the constraint."""
    collect_key, update_key = jax.random.split(key)
    transition, final, info = collect(state.policy, config, env, collect_key)

    critic_input = jnp.concatenate([transition.observation.critic_input, final.critic_input[None]])
    value = jax.vmap(jax.vmap(jax.vmap(state.critic)))(critic_input)  # [T + 1, E, N]
    reward = transition.reward - state.lagrange_multiplier * transition.cost[..., None]
    terminated, truncated = transition.terminated[..., None], transition.truncated[..., None]
    advantage, target = compute_gae(
        reward, value[:-1], value[1:], terminated, truncated, config.gamma, config.gae_lambda
    )

    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), Batch(transition, advantage, target))  # [T E, ...]
    (networks, optimizer_state), losses = jax.lax.scan(
        partial(update_epoch, config, env, batch),
        ((state.policy, state.critic), state.optimizer_state),
        jax.random.split(update_key, config.num_epochs),
    )

    # Projected dual ascent: the price rises while the constraint is violated and is never negative.
    violation = transition.cost.mean() - config.cost_limit
    lagrange_multiplier = jnp.maximum(state.lagrange_multiplier + config.lagrange_lr * violation, 0.0)

    summary = jax.tree.map(jnp.mean, summarize(env, info))
    metrics = {
        "episode_return": transition.reward.sum(0).mean(),
        "grad_cov": summary["coverage"],
        "grad_conn5": summary["connected"],
        "grad_conn_weak": summary["connected_weak"],
        "cost": transition.cost.mean(),
        "lagrange_multiplier": lagrange_multiplier,
        "explained_variance": 1 - jnp.var(target - value[:-1]) / (jnp.var(target) + 1e-8),
    } | jax.tree.map(jnp.mean, losses)
    policy, critic = networks
    state = state._replace(
        policy=policy, critic=critic, optimizer_state=optimizer_state, lagrange_multiplier=lagrange_multiplier
    )
    return state, metrics


# --- 6. evolution refines the selector ------------------------------------------------------------
def with_selector(policy: Policy, theta: Array) -> Policy:
    """The policy with the selector head theta [D]; every other leaf is untouched."""
    selector_head = set_module_theta(policy.selector_head, theta)
    return eqx.tree_at(lambda policy: policy.selector_head, policy, selector_head)


def team_fitness(state: TrainState, config: Config, env: Coverage, key: Array, theta: Array) -> Array:
    """Mean episode return of the team with selector theta [D], less the price of its cost. []"""
    policy, key = with_selector(state.policy, theta), jax.random.clone(key)  # all members reuse the key on purpose
    reward, cost, _, _ = play(policy, config, env, key, config.rollouts)
    return (reward.mean(-1) - state.lagrange_multiplier * cost).sum(0).mean()


def evolve_selector(config: Config, env: Coverage, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """One generation around the learner's own selector."""
    search_key, episode_key = jax.random.split(key)
    theta = module_theta(state.policy.selector_head)  # inject the learner
    fitness = partial(team_fitness, state, config, env, episode_key)  # common random numbers
    theta, info = es_step(theta, fitness, config.es_config._replace(sigma=state.sigma), search_key)
    state = state._replace(policy=with_selector(state.policy, theta), sigma=info["sigma"])  # write back
    return state, {"best": info["best_fitness"], "mean": info["mean_fitness"], "sigma": info["sigma"]}


# --- 7. training: one scan ------------------------------------------------------------------------
@partial(jax.jit, static_argnames=("config", "env"))
def init_state(config: Config, env: Coverage, key: Array) -> TrainState:
    """Fresh networks, optimizer and multiplier. Raises ValueError where the sizes of config and env do not fit."""
    rows = env.horizon * config.rollouts
    allowed = f"a divisor of --horizon x --rollouts = {rows}"
    check_range(config, "num_minibatches", allowed, lambda value: rows % value == 0)
    policy_key, critic_key = jax.random.split(key)
    observation, _ = jax.eval_shape(env.reset, key)
    policy = Policy(config, observation.observation.shape[-1], key=policy_key)
    critic = Critic(config, observation.critic_input.shape[-1], key=critic_key)
    return TrainState(
        policy=policy,
        critic=critic,
        optimizer_state=make_optimizer(config).init((policy, critic)),
        lagrange_multiplier=jnp.asarray(config.lagrange_init, float),
        sigma=jnp.asarray(config.sigma, float),
    )


def train_step(config: Config, env: Coverage, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """One round: gradient steps on all networks, then one generation of the evolution strategy on the selector."""
    gradient_key, evolution_key = jax.random.split(key)
    gradient_keys = jax.random.split(gradient_key, config.grad_steps)
    state, metrics = jax.lax.scan(partial(ppo_step, config, env), state, gradient_keys)
    state, evolution_metrics = evolve_selector(config, env, state, evolution_key)
    return state, evolution_metrics | jax.tree.map(lambda x: x[-1], metrics)  # as the last gradient step saw them


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


def merl_train(
    env: Coverage,
    config: Config,
    *,
    key: Array,
    n_outer: int,
    grad_steps: int,
    es_config: ESConfig,
    log_fn: Callable[[Array, dict], None] | None = None,
    init_from: str | None = None,
) -> tuple[TrainState, list[dict]]:
    """Train from Python; -> (state, one dict of floats per round with `outer`, `best`, `mean`, `grad_cov`, ...)."""
    evolution = dict(zip(ES_FIELDS, es_config, strict=True))
    config = dataclasses.replace(config, outer=n_outer, grad_steps=grad_steps, **evolution)
    init_key, train_key = jax.random.split(key)
    start = partial(init_state_from_checkpoint, path=init_from) if init_from else init_state
    state = start(config, env, init_key)
    state, metrics = train(config, env, state, train_key, log_fn=log_fn)
    rows = zip(*(np.asarray(column).tolist() for column in metrics.values()), strict=True)
    return state, [{"outer": i} | dict(zip(metrics, row, strict=True)) for i, row in enumerate(rows)]


def init_state_from_checkpoint(config: Config, env: Coverage, key: Array, path: str) -> TrainState:
    """A fresh state around the networks of a checkpoint. Raises ValueError if shapes differ."""
    state, saved = init_state(config, env, key), load_checkpoint(path)
    kept = ("policy", "critic")
    check_same_shapes(path, *({name: getattr(each, name) for name in kept} for each in (saved, state)))
    return state._replace(**{name: getattr(saved, name) for name in kept})


@partial(jax.jit, static_argnames=("config", "env", "episodes"))
def evaluate(
    config: Config, env: Coverage, state: TrainState, key: Array, episodes: int
) -> tuple[dict[str, Array], Any]:
    """Fresh episodes, sampled actions; -> (figures [E] of the episodes, the env_state in which the first one ended)."""
    reward, _, info, env_state = play(state.policy, config, env, key, episodes)
    figures = summarize(env, info) | {"episode_return": reward.sum(0).mean(-1)}
    return figures, jax.tree.map(lambda x: x[0], env_state)


def environments() -> dict[str, type]:
    """The environments to choose from with --env, the default first."""
    return {"coverage": Coverage}


def env_steps_per_iteration(config: Config, env: Coverage) -> int:
    return (config.grad_steps + config.pop) * config.rollouts * env.horizon


def columns(env: Coverage) -> dict[str, str]:
    """The columns of the line per iteration: header and metric."""
    return {
        "es_best": "best",
        "es_mean": "mean",
        "episode_return": "episode_return",
        "coverage": "grad_cov",
        "connected": "grad_conn5",
        "lagrange_multiplier": "lagrange_multiplier",
    }


# --- 8. running: arguments, logging, saving --------------------------------------------------------
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
