"""Speed of the parts: `python benchmarks/throughput.py`. All figures are medians of 7 calls after one warm-up call.

merl.py on grids of growing size at N = 4, in env steps per second: `world` is the environment alone under random moves,
`rollout` adds the policy and the record that PPO learns from, `update` is the rest of a PPO step on that record,
`population` one generation of the evolution strategy. The last two columns are microseconds per robot and step.

sac_shared_critic.py on Spread with 3 agents, 256 rows per agent, two layers of 128: env steps and gradient steps per
second with the joint observation for the critics and with that of the agent; a gradient step learns from the batches of
all agents. If rejax is installed (0.1.3 works with gymnax 0.0.9), its SAC follows with the same batch, networks,
environments and normalization: one agent of the same team, the others push at random, its critics see what it sees. All
are called in turns, and what rejax takes to start cancels between a short and a long run.
"""

import argparse
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import merl
import sac_shared_critic as sac
from envs import Coverage, Spread


def seconds(*calls: tuple) -> list[float]:
    """Median wall time of each call (function, *arguments); the calls take turns."""
    compiled = [jax.jit(function).lower(*arguments).compile() for function, *arguments in calls]
    times = [[] for _ in calls]
    for _ in range(8):
        for call, (_, *arguments), record in zip(compiled, calls, times, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(call(*arguments))
            record.append(time.perf_counter() - started)
    return [median(record[1:]) for record in times]


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


def merl_parts(grids: list[int], n_agents: int) -> None:
    config, key = merl.Config(), jax.random.key(0)
    print(f"merl.py: {config.rollouts} episodes, N = {n_agents}")
    print("grid   world/s  rollout/s   update/s  population/s  world us/robot  rollout us/robot")
    for grid in grids:
        env = Coverage(grid=grid, n_agents=n_agents)
        state = merl.init_state(config, env, key)
        steps = config.rollouts * env.horizon
        (world_time,) = seconds((partial(world, env, config.rollouts), key))
        (rollout_time,) = seconds((partial(merl.collect, config, env, state.policy), key))
        (step_time,) = seconds((partial(merl.ppo_step, config, env), state, key))
        (population_time,) = seconds((partial(merl.evolve_selector, config, env), state, key))
        times = world_time, rollout_time, step_time - rollout_time, population_time / config.pop
        row = "{:4}  {:8,.0f}  {:9,.0f}  {:9,.0f}  {:12,.0f}".format(grid, *(steps / spent for spent in times))
        per_robot = (1e6 * spent / steps / env.n_agents for spent in (world_time, rollout_time))
        print(row + "  {:14.2f}  {:16.2f}".format(*per_robot), flush=True)


def one_agent(env: Spread):
    """The first agent as a gymnax environment, while the others push at random."""
    from gymnax.environments.environment import Environment
    from gymnax.environments.spaces import Box

    class OneAgent(Environment):
        def reset_env(self, key, params):
            observation, env_state = env.reset(key)
            return observation.observation[0], env_state

        def step_env(self, key, env_state, action, params):
            time_step, env_state = env.step(key, env_state, env.sample_action(key).at[0].set(action))
            observation = time_step.observation.observation[0]
            return observation, env_state, time_step.reward[0], time_step.truncated, {}

        def observation_space(self, params):
            return Box(-jnp.inf, jnp.inf, jax.eval_shape(env.reset, jax.random.key(0))[0].observation.shape[1:])

        def action_space(self, params):
            return Box(-1.0, 1.0, (env.action_size,))

    return OneAgent()


def sac_parts(steps: int = 200) -> None:
    config, calls = sac.Config(batch_size=256, hidden=128, num_steps=steps), []
    envs = {"joint": Spread(), "local": Spread(critic_observation=False)}
    for env in envs.values():
        state = sac.init_state(config, env, jax.random.key(0))
        calls.append((partial(sac.train_step, config, env), state, jax.random.key(1)))
    if find_spec("rejax"):
        import rejax

        settings = {"env": one_agent(envs["local"]), "num_envs": config.num_envs, "normalize_observations": True}
        settings |= {"batch_size": config.batch_size, "hidden_layer_sizes": (config.hidden, config.hidden)}
        settings |= {"buffer_size": config.buffer_size, "fill_buffer": steps * config.num_envs}
        for total in (2 * steps * config.num_envs, 4 * steps * config.num_envs):
            other = rejax.SAC.create(**settings, total_timesteps=total, eval_freq=total)
            other = other.replace(eval_callback=lambda *_: ())
            calls.append((lambda key, other=other: other.train(key)[0], jax.random.key(2)))
    times = seconds(*calls)
    for (name, env), spent in zip(envs.items(), times, strict=False):
        speed = steps / spent
        print(f"sac_shared_critic.py, {name}: {speed * config.num_envs:,.0f} env steps/s,", end=" ")
        print(f"{speed:,.0f} gradient steps/s, {env.n_agents * speed:,.0f} agent batches/s", flush=True)
    if times[2:]:
        short, long = times[2:]
        print(f"rejax, local: {2 * steps / (long - short):,.0f} gradient steps/s of one agent batch each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--n-agents", type=int, default=4)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}")
    merl_parts(arguments.grids, arguments.n_agents)
    sac_parts()


if __name__ == "__main__":
    main()
