# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10.1,!=0.10.2", "jaxlib>=0.10.1,!=0.10.2", "equinox>=0.13", "optax>=0.2.5", "numpy>=2.0"]
# ///
"""Evolution strategies in JAX: ask for a population, evaluate it, tell the fitness. Fitness is maximized.

    population = ask(theta, config, key)                      # [P, D], antithetic pairs theta +- sigma eps
    theta, info = tell(theta, population, fitness, config)    # fitness [P]

`nes` is OpenAI-ES (Salimans et al. 2017): fitness becomes centered ranks, then one step along the estimated gradient,

    theta <- (1 - lr weight_decay) theta + lr / (P sigma) sum_i rank_i eps_i.

`cem` is the cross-entropy method (Rubinstein 1999): theta becomes the mean of the elite, and `info["sigma"]` the spread
of the elite around the old theta, which the caller passes on to the next generation. Deviations from Salimans et al.:
plain gradient ascent instead of Adam, no virtual batch normalization, and all members share one set of episode keys.

`python es.py` evolves a small policy on Coverage, the whole run in one scan. Axes: P population, D parameters.
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
from jax import Array
from jax.experimental import io_callback
from jax.flatten_util import ravel_pytree

EVAL_EPISODES = 100
SIGMA_FLOOR = 1e-3  # cem keeps searching after its elite has collapsed


# --- 1. the strategy ------------------------------------------------------------------------------
class ESConfig(NamedTuple):
    pop_size: int = 16  # members, even
    sigma: float | Array = 0.05  # standard deviation of the search distribution
    lr: float = 0.05  # step size of nes
    kind: str = "nes"  # nes or cem
    elite_frac: float = 0.25  # share of the population that cem averages
    weight_decay: float = 0.0  # pull towards zero, per unit of lr
    eval_batch: int = 0  # members evaluated at once, 0: all


def ask(theta: Array, config: ESConfig, key: Array) -> Array:
    """Sample antithetic pairs around theta, [D] -> [P, D]; member i + P/2 mirrors member i. ValueError if P is odd."""
    if config.pop_size < 2 or config.pop_size % 2:
        raise ValueError(f"pop_size must be even and at least 2, got {config.pop_size}")
    noise = jax.random.normal(key, (config.pop_size // 2, theta.size), theta.dtype)
    return theta + config.sigma * jnp.concatenate([noise, -noise])


def centered_ranks(fitness: Array) -> Array:
    """Ranks scaled to [-0.5, 0.5], [P] -> [P]. Ties share their mean rank, NaN is worst."""
    fitness = jnp.where(jnp.isnan(fitness), -jnp.inf, fitness)
    ordered = jnp.sort(fitness)
    below = jnp.searchsorted(ordered, fitness, side="left")
    not_above = jnp.searchsorted(ordered, fitness, side="right")
    return (below + not_above - 1) / 2 / (fitness.size - 1) - 0.5


def nes_tell(theta: Array, population: Array, fitness: Array, config: ESConfig) -> tuple[Array, Array]:
    """One ascent step along the search gradient; returns (theta [D], sigma [])."""
    noise = (population - theta) / config.sigma
    gradient = centered_ranks(fitness) @ noise / (config.pop_size * config.sigma)
    return theta + config.lr * gradient, jnp.asarray(config.sigma, theta.dtype)


def cem_tell(theta: Array, population: Array, fitness: Array, config: ESConfig) -> tuple[Array, Array]:
    """The elite's mean, and its root mean square distance from the old theta per dimension; (theta [D], sigma [])."""
    n_elite = max(1, int(config.pop_size * config.elite_frac))
    valid = ~jnp.isnan(fitness)
    fitness = jnp.where(valid, fitness, -jnp.inf)
    elite = fitness >= jnp.sort(fitness)[-n_elite]  # ties with the last of the elite belong to it
    elite &= valid | ~valid.any()
    weight = elite / elite.sum()
    variance = weight @ jnp.square(population - theta).mean(1)
    return weight @ population, jnp.maximum(jnp.sqrt(variance), SIGMA_FLOOR)


def tell(theta: Array, population: Array, fitness: Array, config: ESConfig) -> tuple[Array, dict[str, Array]]:
    """Move theta [D] towards the fitter members; population [P, D] from `ask`, fitness [P], higher is better."""
    kind_tell = {"nes": nes_tell, "cem": cem_tell}[config.kind]
    updated, sigma = kind_tell(theta, population, fitness, config)
    updated = updated - config.lr * config.weight_decay * theta
    return updated, {"best_fitness": jnp.nanmax(fitness), "mean_fitness": jnp.nanmean(fitness), "sigma": sigma}


def es_step(
    theta: Array, eval_fn: Callable[[Array], Array], config: ESConfig, key: Array
) -> tuple[Array, dict[str, Array]]:
    """One generation. `eval_fn`: pure, parameters [D] -> fitness []; it is vmapped, `eval_batch` members at a time."""
    population = ask(theta, config, key)
    fitness = jax.lax.map(eval_fn, population, batch_size=config.eval_batch or config.pop_size)
    return tell(theta, population, fitness, config)


# --- 2. Equinox modules as vectors ----------------------------------------------------------------
def module_theta(module: eqx.Module) -> Array:
    """All inexact-array leaves of a module as one vector [D]."""
    return ravel_pytree(eqx.filter(module, eqx.is_inexact_array))[0]


def set_module_theta(module: eqx.Module, theta: Array) -> eqx.Module:
    """The module with its inexact-array leaves replaced by theta [D]; the inverse of `module_theta`."""
    parameters, rest = eqx.partition(module, eqx.is_inexact_array)
    return eqx.combine(ravel_pytree(parameters)[1](theta), rest)


# --- 3. python es.py: evolve a policy on an environment ---------------------------------------------
@dataclass(frozen=True)
class Config:
    """Hyperparameters; each field is a flag, its comment the help text."""

    generations: int = 200  # generations
    rollouts: int = 8  # episodes per fitness of a member
    pop: int = 64  # members of the population, even
    sigma: float = 0.05  # standard deviation of the search distribution
    es_lr: float = 0.05  # step size of nes
    es_kind: Literal["nes", "cem"] = "nes"  # OpenAI-ES or cross-entropy method
    elite_frac: float = 0.25  # share of the population that cem averages
    weight_decay: float = 0.0  # pull towards zero, per unit of es-lr
    eval_batch: int = 0  # members evaluated at once, bounds the memory; 0: all
    hidden: int = 16  # width of the hidden layer
    cost_coef: float = 1.0  # price of a unit of cost in the fitness

    def __post_init__(self):
        check_range(self, "generations rollouts hidden", "at least 1", lambda value: value >= 1)
        check_range(self, "sigma", "finite and above 0", lambda value: 0 < value < np.inf)
        weights = "es_lr weight_decay eval_batch cost_coef"
        check_range(self, weights, "finite and at least 0", lambda value: 0 <= value < np.inf)
        check_range(self, "elite_frac", "in (0, 1]", lambda value: 0 < value <= 1)
        check_range(self, "pop", "even and at least 2", lambda value: value >= 2 and value % 2 == 0)

    @property
    def es_config(self) -> ESConfig:
        return ESConfig(
            self.pop, self.sigma, self.es_lr, self.es_kind, self.elite_frac, self.weight_decay, self.eval_batch
        )

    @property
    def iterations(self) -> int:
        return self.generations


class Policy(eqx.Module):
    """One hidden layer, [O] -> logits [A]; shared by the agents."""

    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, config: Config, size: int, n_actions: int, *, key: Array):
        hidden_key, head_key = jax.random.split(key)
        self.hidden = eqx.nn.Linear(size, config.hidden, key=hidden_key)
        self.head = eqx.nn.Linear(config.hidden, n_actions, key=head_key)

    def __call__(self, observation: Array) -> Array:
        return self.head(jnp.tanh(self.hidden(observation)))


class TrainState(NamedTuple):
    """Everything that the search changes."""

    policy: Policy  # the mean of the search distribution
    sigma: Array  # [] its standard deviation; cem adapts it


def play(policy: Policy, env, key: Array, episodes: int):
    """Whole episodes, sampled actions; -> (reward [T, E, N], cost [T, E], info [T, E], the last env_state [E])."""
    reset_key, step_key = jax.random.split(key)

    def step(carry, key):
        observation, env_state = carry
        act_key, step_key = jax.random.split(key)
        logits = jax.vmap(jax.vmap(policy))(observation.observation)
        action = jax.random.categorical(act_key, jnp.where(observation.action_mask, logits, -1e9))
        time_step, env_state = jax.vmap(env.step)(jax.random.split(step_key, episodes), env_state, action)
        return (time_step.observation, env_state), (time_step.reward, time_step.cost, time_step.info)

    start = jax.vmap(env.reset)(jax.random.split(reset_key, episodes))
    (_, env_state), outcome = jax.lax.scan(step, start, jax.random.split(step_key, env.horizon))
    return *outcome, env_state


def team_fitness(state: TrainState, config: Config, env, key: Array, theta: Array) -> Array:
    """Mean episode return of a team with the parameters theta [D], less the price of its cost. []"""
    policy, key = set_module_theta(state.policy, theta), jax.random.clone(key)  # all members reuse the key on purpose
    reward, cost, _, _ = play(policy, env, key, config.rollouts)
    return (reward.mean(-1) - config.cost_coef * cost).sum(0).mean()


@partial(jax.jit, static_argnames=("config", "env"))
def init_state(config: Config, env, key: Array) -> TrainState:
    """A random policy."""
    observation, _ = jax.eval_shape(env.reset, key)
    policy = Policy(config, observation.observation.shape[-1], observation.action_mask.shape[-1], key=key)
    return TrainState(policy, jnp.asarray(config.sigma, float))


def train_step(config: Config, env, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """One generation: all members play the same episodes (common random numbers)."""
    search_key, episode_key = jax.random.split(key)
    fitness = partial(team_fitness, state, config, env, episode_key)
    es_config = config.es_config._replace(sigma=state.sigma)
    theta, info = es_step(module_theta(state.policy), fitness, es_config, search_key)
    metrics = {"best": info["best_fitness"], "mean": info["mean_fitness"], "sigma": info["sigma"]}
    return TrainState(set_module_theta(state.policy, theta), info["sigma"]), metrics


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
    """A fresh state around the policy of a checkpoint. Raises ValueError if shapes differ."""
    state, saved = init_state(config, env, key), load_checkpoint(path)
    check_same_shapes(path, saved.policy, state.policy)
    return state._replace(policy=saved.policy)


@partial(jax.jit, static_argnames=("config", "env", "episodes"))
def evaluate(config: Config, env, state: TrainState, key: Array, episodes: int) -> tuple[dict[str, Array], Any]:
    """Fresh episodes, sampled actions; -> (figures [E] of the episodes, the env_state in which the first one ended)."""
    reward, _, info, env_state = play(state.policy, env, key, episodes)
    mean, last = jax.tree.map(lambda x: x.mean(0), info), jax.tree.map(lambda x: x[-1], info)
    figures = env.episode_summary(mean, last) | {"episode_return": reward.sum(0).mean(-1)}
    return figures, jax.tree.map(lambda x: x[0], env_state)


def environments() -> dict[str, type]:
    """The environments to choose from with --env, the default first."""
    from envs import Coverage  # the strategies above do without it

    return {"coverage": Coverage}


def env_steps_per_iteration(config: Config, env) -> int:
    return config.pop * config.rollouts * env.horizon


def columns(env) -> dict[str, str]:
    """The columns of the line per iteration: header and metric."""
    return {"best": "best", "mean": "mean", "sigma": "sigma"}


def check_range(settings, names: str, allowed: str, test: Callable[[Any], bool]) -> None:
    """Raise a one-line ValueError for the first of the named fields that fails the test; fields are named as flags."""
    for name in names.split():
        value = getattr(settings, name)
        if not test(value):
            raise ValueError(f"--{name.replace('_', '-')} must be {allowed}, got {value}")


# --- 4. running: arguments, logging, saving --------------------------------------------------------
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
