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

`python es.py` evolves a small policy on Coverage, the whole run in one scan.

Axes: P population, D parameters; S seeds, T steps, E episodes, N agents, O/A sizes of observation and action.
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
from jax import Array
from jax.experimental import io_callback
from jax.flatten_util import ravel_pytree
from jax.tree_util import keystr, tree_leaves_with_path

NETWORKS = ("policy",)  # what --init-from takes over
LENGTH = "generations"  # the setting that --resume may raise
EVAL_EPISODES, EVAL_DETERMINISTIC = 100, False
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
    below = (fitness < fitness[:, None]).sum(1)
    not_above = (fitness <= fitness[:, None]).sum(1)
    return (below + not_above - 1) / 2 / (fitness.size - 1) - 0.5


def nes_tell(theta: Array, population: Array, fitness: Array, config: ESConfig) -> tuple[Array, Array]:
    """One ascent step along the search gradient; returns (theta [D], sigma [])."""
    noise = (population - theta) / config.sigma
    gradient = centered_ranks(fitness) @ noise / (config.pop_size * config.sigma)
    return theta + config.lr * gradient, jnp.asarray(config.sigma, theta.dtype)


def cem_tell(theta: Array, population: Array, fitness: Array, config: ESConfig) -> tuple[Array, Array]:
    """The elite's mean, and its root mean square distance from the old theta per dimension; (theta [D], sigma [])."""
    n_elite = max(1, int(config.pop_size * config.elite_frac + 1e-6))  # 0.29 x 100 is 28.999...
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
        if self.es_kind == "cem":
            allowed = f"at least 1 / --pop = {1 / self.pop}"
            check_range(self, "elite_frac", allowed, lambda value: value >= 1 / self.pop)

    @property
    def es_config(self) -> ESConfig:
        return ESConfig(
            self.pop, self.sigma, self.es_lr, self.es_kind, self.elite_frac, self.weight_decay, self.eval_batch
        )

    @property
    def iterations(self) -> int:
        return self.generations


class Policy(eqx.Module):
    """One hidden layer, [..., O] -> logits [..., A]; shared by the agents."""

    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, config: Config, size: int, action_size: int, *, key: Array):
        hidden_key, head_key = jax.random.split(key)
        self.hidden = eqx.nn.Linear(size, config.hidden, key=hidden_key)
        self.head = eqx.nn.Linear(config.hidden, action_size, key=head_key)

    def __call__(self, observation: Array) -> Array:
        return linear(self.head, jnp.tanh(linear(self.hidden, observation)))


def linear(layer: eqx.nn.Linear, x: Array) -> Array:
    """A layer on any number of rows, [..., I] -> [..., O], as one matrix product; layer(x) takes a single row."""
    return x @ layer.weight.T + layer.bias


class TrainState(NamedTuple):
    """Everything that the search changes."""

    policy: Policy  # the mean of the search distribution
    sigma: Array  # [] its standard deviation; cem adapts it


def select_action(config: Config, env, state: TrainState, observation, key: Array, deterministic: bool) -> Array:
    """Sampled or most likely actions of a team."""
    logits = state.policy(observation.observation)
    logits = jnp.where(observation.action_mask, logits, -1e9)
    return logits.argmax(-1) if deterministic else jax.random.categorical(key, logits)


def team_fitness(config: Config, env, state: TrainState, key: Array, theta: Array) -> Array:
    """Mean episode return of a team with the parameters theta [D], less the price of its cost. []"""
    state, key = state._replace(policy=set_module_theta(state.policy, theta)), jax.random.clone(key)  # reuse on purpose
    figures, _ = evaluate(config, env, state, key, config.rollouts, deterministic=False)
    return (figures["episode_return"] - config.cost_coef * figures["episode_cost"]).mean()


@partial(jax.jit, static_argnames=("config", "env"))
def init_state(config: Config, env, key: Array) -> TrainState:
    """A random policy."""
    observation, _ = jax.eval_shape(env.reset, key)
    policy = Policy(config, observation.observation.shape[-1], observation.action_mask.shape[-1], key=key)
    return TrainState(policy, jnp.asarray(config.sigma, float))


def train_step(config: Config, env, state: TrainState, key: Array) -> tuple[TrainState, dict]:
    """One generation: all members play the same episodes (common random numbers)."""
    search_key, episode_key = jax.random.split(key)
    fitness = partial(team_fitness, config, env, state, episode_key)
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
    from envs import play  # the strategies above do without it

    policy = partial(select_action, config, env, state, deterministic=deterministic)
    return play(env, policy, key, episodes)


def environments() -> dict[str, type]:
    """The environments to choose from with --env, the default first."""
    from envs import Coverage  # the strategies above do without it

    return {cls.__name__.lower(): cls for cls in (Coverage,)}


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


# --- 4. checkpoints -------------------------------------------------------------------------------
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


# --- 5. flags -------------------------------------------------------------------------------------
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


# --- 6. recording: lines, metrics.csv, checkpoint.eqx ---------------------------------------------
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


# --- 7. running -----------------------------------------------------------------------------------
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
