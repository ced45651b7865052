"""Env steps per second of the parts of merl.py, on grids of growing size at N = 4: `python benchmarks/throughput.py`.

Prints the median of 7 timed calls after one warm-up call. `world` is the environment alone under random moves,
`rollout` adds the policy and the record that PPO learns from, `update` is the rest of a PPO step on that record,
`population` one generation of the evolution strategy.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import merl
from envs import Coverage


def seconds(function, *arguments) -> float:
    """Median wall time of a call."""
    compiled = jax.jit(function).lower(*arguments).compile()
    times = []
    for _ in range(8):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - started)
    return median(times[1:])


def world(env: Coverage, episodes: int, key):
    """Random moves; the sum over the observations keeps them from being optimized away."""
    reset_key, step_key = jax.random.split(key)

    def step(carry, key):
        observation, env_state = carry
        action_key, env_key = jax.random.split(key)
        action = jax.random.categorical(action_key, jnp.where(observation.action_mask, 0.0, -1e9))
        time_step, env_state = jax.vmap(env.step)(jax.random.split(env_key, episodes), env_state, action)
        return (time_step.observation, env_state), time_step.observation.critic_input.sum()

    start = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))
    return jax.lax.scan(step, start, jax.random.split(step_key, env.horizon))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--n-agents", type=int, default=4)
    arguments = parser.parse_args()

    config, key = merl.Config(), jax.random.key(0)
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {config.rollouts} episodes, N = {arguments.n_agents}")
    print("grid   world/s  rollout/s   update/s  population/s  world us/robot  rollout us/robot")
    for grid in arguments.grids:
        env = Coverage(grid=grid, n_agents=arguments.n_agents)
        state = merl.init_state(config, env, key)
        steps = config.rollouts * env.horizon
        world_time = seconds(partial(world, env, config.rollouts), key)
        rollout_time = seconds(partial(merl.collect, state.policy, config, env), key)
        update_time = seconds(partial(merl.ppo_step, config, env), state, key) - rollout_time
        population_time = seconds(partial(merl.evolve_selector, config, env), state, key)
        speeds = steps / world_time, steps / rollout_time, steps / update_time, config.pop * steps / population_time
        per_robot = (1e6 * spent / steps / env.n_agents for spent in (world_time, rollout_time))
        row = "{:4}  {:8,.0f}  {:9,.0f}  {:9,.0f}  {:12,.0f}".format(grid, *speeds)
        print(row + "  {:14.2f}  {:16.2f}".format(*per_robot), flush=True)


if __name__ == "__main__":
    main()
