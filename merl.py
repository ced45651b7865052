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

Axes: S seeds, T steps, E episodes, N agents, B batch, P population, D parameters, K goals, O/C observation sizes.

    python merl.py --grid 10 --n-agents 4
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
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.experimental import io_callback
from jax.tree_util import keystr, tree_leaves_with_path

from envs import MOVES, AgentObservation, Coverage, chebyshev_distance, check_range, play
from es import ESConfig, es_step, module_theta, set_module_theta

SKILLS = ("disperse", "flock", "hold")
SCRIPT_SHARPNESS = 10.0  # scripted scores fall by this many nats per cell of distance: practically greedy
CONGESTION_CHARGE = 0.01  # reward per in-range teammate with the same skill

ES_FIELDS = ("pop", "sigma", "es_lr", "es_kind", "elite_frac", "weight_decay", "eval_batch")  # as ESConfig orders them

NETWORKS = ("policy", "critic")  # what --init-from takes over
LENGTH = "outer"  # the setting that --resume may raise
EVAL_EPISODES, EVAL_DETERMINISTIC = 100, False


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
    max_grad_norm: float = 0.5  # gradients are scaled down to this global norm
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
        if self.es_kind == "cem":
            allowed = f"at least 1 / --pop = {1 / self.pop}"
            check_range(self, "elite_frac", allowed, lambda value: value >= 1 / self.pop)

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
    """Two hidden tanh layers, [..., I] -> [..., hidden]."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear]

    def __init__(self, size: int, hidden: int, *, key: Array):
        first_key, second_key = jax.random.split(key)
        self.layers = eqx.nn.Linear(size, hidden, key=first_key), eqx.nn.Linear(hidden, hidden, key=second_key)

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = jnp.tanh(linear(layer, x))
        return x


class Policy(eqx.Module):
    """Heads for the selector, the executor and, if it is learned, the flock skill on one trunk."""

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


def skill_scores(config: Config, env: Coverage, policy: Policy, hidden: Array, observation: Array) -> Array:
    """Scores of the goals under each skill, before masking. hidden [hidden], observation [O] -> [3, K]"""
    stencil = make_stencil(config)
    nearest, weakest = env.teammate_offsets(observation)
    disperse = linear(policy.executor_head, hidden)

    if policy.flock_head is None:
        flock = -SCRIPT_SHARPNESS * weakest[2] * jnp.abs(stencil - weakest[:2]).sum(-1)
    else:
        flock = linear(policy.flock_head, hidden)

    safe = (nearest[2] > 0) & (jnp.abs(nearest[:2]).max() < env.comm_r)  # one more step apart keeps the link
    hold = -SCRIPT_SHARPNESS * jnp.abs(stencil - jnp.where(safe, 0.0, nearest[:2])).sum(-1)
    return jnp.stack([disperse, flock, hold])


def choice_log_probs(config: Config, env: Coverage, policy: Policy, observation: Array, action_mask: Array):
    """Log-probabilities of the skills [3] and, under each, of the goals [3, K]. observation [O], action_mask [5]"""
    hidden = policy.trunk(observation)
    scores = skill_scores(config, env, policy, hidden, observation)
    allowed = goal_mask(make_stencil(config), action_mask)
    skill_log_prob = jax.nn.log_softmax(linear(policy.selector_head, hidden))
    return skill_log_prob, jax.nn.log_softmax(jnp.where(allowed, scores, -1e9))


class Choice(NamedTuple):
    """What the policy decides for a robot."""

    skill: Array  # []
    goal: Array  # []
    log_prob: Array  # [] of both


def act(
    config: Config,
    env: Coverage,
    policy: Policy,
    observation: AgentObservation,
    key: Array,
    deterministic: bool = False,
) -> tuple[Array, Choice]:
    """Each robot samples a skill, then a goal, or takes the likeliest, and moves there; -> (action [N], Choice [N])

    With Gumbel noise on the log-probabilities the argmax is a sample.
    """
    log_probs = jax.vmap(partial(choice_log_probs, config, env, policy))
    skill_log_prob, goal_log_prob = log_probs(observation.observation, observation.action_mask)  # [N, 3], [N, 3, K]
    shape = env.n_agents, len(SKILLS) + config.n_goals
    noise = jnp.zeros(shape) if deterministic else jax.random.gumbel(key, shape)
    skill_noise, goal_noise = jnp.split(noise, [len(SKILLS)], -1)
    robot = jnp.arange(env.n_agents)
    skill = (skill_log_prob + skill_noise).argmax(-1)
    goal = (goal_log_prob[robot, skill] + goal_noise).argmax(-1)
    action = jax.vmap(partial(controller, make_stencil(config)))(goal, observation.action_mask)
    return action, Choice(skill, goal, skill_log_prob[robot, skill] + goal_log_prob[robot, skill, goal])


# --- 4. rollout -----------------------------------------------------------------------------------
class Transition(NamedTuple):
    """One step of a team; [T, E, ...] in a rollout."""

    observation: AgentObservation  # [N, ...] acted on
    choice: Choice  # [N]
    reward: Array  # [N]
    charge: Array  # [N] for congestion
    cost: Array  # []
    terminated: Array  # []
    truncated: Array  # []


def interact(config: Config, env: Coverage, policy: Policy, carry: tuple, keys: Array):
    """One step of one team; carry = (AgentObservation, env_state). -> (carry, (Transition, info))

    keys [2]: one to act, one for the environment.
    """
    observation, env_state = carry
    act_key, step_key = keys
    action, choice = act(config, env, policy, observation, act_key)
    time_step, next_state = env.step(step_key, env_state, action)

    charge = jnp.zeros_like(time_step.reward)
    if config.congestion == "on":
        in_range = chebyshev_distance(env_state.position) <= env.comm_r  # [N, N], itself included
        same_skill = choice.skill[:, None] == choice.skill
        charge = CONGESTION_CHARGE * ((in_range & same_skill).sum(-1) - 1)
    transition = Transition(
        observation=observation,
        choice=choice,
        reward=time_step.reward,
        charge=charge,
        cost=time_step.cost,
        terminated=time_step.terminated,
        truncated=time_step.truncated,
    )
    return (time_step.observation, next_state), (transition, time_step.info)


def collect(config: Config, env: Coverage, policy: Policy, key: Array):
    """Episodes of `horizon` steps, as all in Coverage; -> (Transition, AgentObservation, info)

    Transition and info (of scalars) are [T, E, ...], the final AgentObservation is [E, ...].
    """
    keys = jax.random.split(key, (1 + env.horizon, config.rollouts, 2))  # the first row resets
    each_team = jax.vmap(partial(interact, config, env, policy))
    start = jax.vmap(env.reset)(keys[0, :, 0])
    (final, _), (transition, info) = jax.lax.scan(each_team, start, keys[1:])
    return transition, final, info


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


def ppo_loss(learner: tuple[Policy, Critic], config: Config, env: Coverage, batch: Batch) -> tuple[Array, dict]:
    """Clipped surrogate, value error and entropy bonus (Schulman et al. 2017, eq. 9) over rows [B, N].

    Advantages are normalized over the rows and robots of the minibatch.
    """
    policy, critic = learner
    observation, choice = batch.transition.observation, batch.transition.choice
    log_probs = jax.vmap(jax.vmap(partial(choice_log_probs, config, env, policy)))
    skill_log_prob, goal_log_prob = log_probs(observation.observation, observation.action_mask)  # [B, N, 3 (, K)]
    goal_log_prob_chosen = jnp.take_along_axis(goal_log_prob, choice.skill[..., None, None], 2)[..., 0, :]
    log_prob = jnp.take_along_axis(skill_log_prob, choice.skill[..., None], 2)[..., 0]
    log_prob += jnp.take_along_axis(goal_log_prob_chosen, choice.goal[..., None], 2)[..., 0]

    ratio = jnp.exp(log_prob - choice.log_prob)
    clipped = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-5)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()

    value = critic(observation.critic_input)
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
    """Adam behind a global norm clip, on the parameters as one flat vector; the schedule counts optimizer steps."""
    schedule = optax.linear_schedule(config.lr, config.lr / 10, config.optimizer_steps)
    return optax.flatten(optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(schedule, eps=1e-5)))


def minibatch_rows(config: Config, rows: int, key: Array) -> Array:
    """Every row once per epoch, in random order. [num_epochs x num_minibatches, rows / num_minibatches]"""
    order = jax.random.uniform(key, (config.num_epochs, rows)).argsort(1)
    return order.reshape(config.num_epochs * config.num_minibatches, -1)


def update_minibatch(config: Config, env: Coverage, batch: Batch, carry: tuple, row: Array) -> tuple[tuple, dict]:
    """One optimizer step on these rows of a batch; carry = ((policy, critic), optimizer_state)."""
    learner, optimizer_state = carry
    minibatch = jax.tree.map(lambda x: x[row], batch)
    (_, metrics), gradient = jax.value_and_grad(ppo_loss, has_aux=True)(learner, config, env, minibatch)
    update, optimizer_state = make_optimizer(config).update(gradient, optimizer_state)
    return (optax.apply_updates(learner, update), optimizer_state), metrics


def ppo_step(config: Config, env: Coverage, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """Collect, estimate advantages, update the networks, then price the constraint."""
    collect_key, update_key = jax.random.split(key)
    transition, final, info = collect(config, env, state.policy, collect_key)

    critic_input = jnp.concatenate([transition.observation.critic_input, final.critic_input[None]])
    value = state.critic(critic_input)  # [T + 1, E, N]
    reward = transition.reward - transition.charge - state.lagrange_multiplier * transition.cost[..., None]
    terminated, truncated = transition.terminated[..., None], transition.truncated[..., None]
    advantage, target = compute_gae(
        reward, value[:-1], value[1:], terminated, truncated, config.gamma, config.gae_lambda
    )

    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), Batch(transition, advantage, target))  # [T E, ...]
    ((policy, critic), optimizer_state), losses = jax.lax.scan(
        partial(update_minibatch, config, env, batch),
        ((state.policy, state.critic), state.optimizer_state),
        minibatch_rows(config, batch.target.shape[0], update_key),
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
    state = state._replace(
        policy=policy, critic=critic, optimizer_state=optimizer_state, lagrange_multiplier=lagrange_multiplier
    )
    return state, metrics


# --- 6. evolution refines the selector ------------------------------------------------------------
def with_selector(policy: Policy, theta: Array) -> Policy:
    """The policy with the selector head theta [D]; every other leaf is untouched."""
    selector_head = set_module_theta(policy.selector_head, theta)
    return eqx.tree_at(lambda policy: policy.selector_head, policy, selector_head)


def team_fitness(config: Config, env: Coverage, state: TrainState, key: Array, theta: Array) -> Array:
    """Mean episode return of the team with selector theta [D], less the price of its cost. []"""
    state, key = state._replace(policy=with_selector(state.policy, theta)), jax.random.clone(key)  # reuse on purpose
    figures, _ = evaluate(config, env, state, key, config.rollouts, deterministic=False)
    return (figures["episode_return"] - state.lagrange_multiplier * figures["episode_cost"]).mean()


def evolve_selector(config: Config, env: Coverage, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """One generation around the learner's own selector."""
    search_key, episode_key = jax.random.split(key)
    theta = module_theta(state.policy.selector_head)  # inject the learner
    fitness = partial(team_fitness, config, env, state, episode_key)  # common random numbers
    theta, info = es_step(theta, fitness, config.es_config._replace(sigma=state.sigma), search_key)
    state = state._replace(policy=with_selector(state.policy, theta), sigma=info["sigma"])  # write back
    return state, {"best": info["best_fitness"], "mean": info["mean_fitness"], "sigma": info["sigma"]}


# --- 7. training: one scan ------------------------------------------------------------------------
def select_action(
    config: Config, env: Coverage, state: TrainState, observation: AgentObservation, key: Array, deterministic: bool
) -> Array:
    """Actions of a team in evaluation."""
    return act(config, env, state.policy, observation, key, deterministic)[0]


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
    keys = jax.random.split(key, config.grad_steps + 1)
    state, metrics = jax.lax.scan(partial(ppo_step, config, env), state, keys[:-1])
    state, evolution_metrics = evolve_selector(config, env, state, keys[-1])
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
    """Train from Python; -> (state, history: a dict of floats per round).

    `best`, `mean`: fitness over the members of this generation. `grad_cov`, `grad_conn5`: coverage and share of steps
    with lambda_2 > 0.5, in percent, over the episodes of the last PPO step of the round.
    """
    evolution = dict(zip(ES_FIELDS, es_config._replace(sigma=float(es_config.sigma)), strict=True))
    config = dataclasses.replace(config, outer=n_outer, grad_steps=grad_steps, **evolution)
    init_key, train_key = jax.random.split(key)
    start = partial(init_state_from_checkpoint, path=init_from) if init_from else init_state
    state = start(config, env, init_key)
    state, metrics = train(config, env, state, train_key, log_fn=log_fn)
    rows = zip(*(np.asarray(column).tolist() for column in metrics.values()), strict=True)
    return state, [{"outer": i} | dict(zip(metrics, row, strict=True)) for i, row in enumerate(rows)]


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
    return {cls.__name__.lower(): cls for cls in (Coverage,)}


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


# --- 8. checkpoints -------------------------------------------------------------------------------
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


# --- 9. flags -------------------------------------------------------------------------------------
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


# --- 10. recording: lines, metrics.csv, checkpoint.eqx ---------------------------------------------
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


# --- 11. running -----------------------------------------------------------------------------------
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
