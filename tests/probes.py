"""Probe environments with known values, N = 2 (after Andy Jones, "Debugging RL, without the agonizing pain")."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from envs import AgentObservation, TimeStep


class ProbeState(NamedTuple):
    sign: jax.Array  # [N] +1 or -1, what an agent sees
    time: jax.Array  # []


@dataclass(frozen=True)
class Probe:
    """`kind` says what the reward depends on:

    constant: 1, over after a step.        endless: 1, cut by the clock after a step: worth 1 / (1 - gamma).
    observed: what the agent saw.          delayed: 1 in the second of two steps, the time is seen.
    action: +1 for action 1, else -1.      both: +1 if the action fits what the agent saw, else -1.
    tempting: 1 for action 1, and the share of agents that took it is the cost.

    Continuous actions in [-1, 1] take the place of -1 (action 0) and +1 (action 1).
    """

    kind: str
    n_agents: int = 2
    continuous_actions: bool = False
    figure_names: ClassVar = ("episode_return",)

    @property
    def horizon(self) -> int:
        return 2 if self.kind == "delayed" else 1

    @property
    def action_size(self) -> int:
        return 1 if self.continuous_actions else 2

    def sample_action(self, key):
        if self.continuous_actions:
            return jax.random.uniform(key, (self.n_agents, 1), minval=-1.0)
        return jax.random.randint(key, (self.n_agents,), 0, 2)

    def observe(self, state):
        sees_sign = self.kind in ("observed", "both")
        time = jnp.full(self.n_agents, 1.0) * state.time * (self.kind == "delayed")
        return AgentObservation(jnp.stack([state.sign * sees_sign, time], -1))

    def reset(self, key):
        sign = jnp.where(jax.random.bernoulli(key, 0.5, (self.n_agents,)), 1.0, -1.0)
        state = ProbeState(sign, jnp.zeros((), jnp.int32))
        return self.observe(state), state

    def step(self, key, state, action):
        one = jnp.ones(self.n_agents)
        choice = jnp.clip(action[:, 0], -1, 1) if self.continuous_actions else 2.0 * action - 1  # in [-1, 1]
        reward = {
            "constant": one,
            "endless": one,
            "observed": state.sign,
            "delayed": one * (state.time == 1),
            "action": choice,
            "both": state.sign * choice,
            "tempting": (1 + choice) / 2,
        }[self.kind]
        state = ProbeState(state.sign, state.time + 1)
        over = state.time >= self.horizon
        cost = (choice == 1).mean() * (self.kind == "tempting")
        endless = self.kind == "endless"
        time_step = TimeStep(self.observe(state), reward, cost, over & (not endless), over & endless, {})
        return time_step, state

    def episode_summary(self, mean, last):
        return {}


PROBES = [  # kind, observations of an agent, and their values under the best policy at a discount of 0.5
    ("constant", [(0, 0)], [1.0]),
    ("endless", [(0, 0)], [2.0]),  # 1 / (1 - gamma): truncation must not cut the bootstrap
    ("observed", [(-1, 0), (1, 0)], [-1.0, 1.0]),
    ("delayed", [(0, 0), (0, 1)], [0.5, 1.0]),  # gamma, then 1
    ("action", [(0, 0)], [1.0]),
    ("both", [(-1, 0), (1, 0)], [1.0, 1.0]),
]
