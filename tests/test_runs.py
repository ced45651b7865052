"""Runs that last: seeds, resuming after a kill, evaluation, loading elsewhere, drawing, numbers that are not finite."""

import json
import random
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import side_by_side
from test_repository import ENVIRONMENT, MODULES, ROOT, metrics, run

from envs import Coverage, Rendezvous, Spread

ITERATIONS = 200
TASKS = {  # with so many iterations of the smallest size
    "ppo_ctde": "--env rendezvous --num-envs 2 --num-steps 4 --num-minibatches 1 --hidden 4 --total-timesteps 1600",
    "sac_shared_critic": "--max-steps 5 --num-envs 2 --num-steps 4 --learning-starts 20 --buffer-size 50 "
    "--batch-size 4 --hidden 4 --total-timesteps 1600",
}
COMMON = "--num-seeds 2 --seed 3 --episodes 8 --save-every 7"


def printed(*argv, cwd: Path = ROOT) -> list[str]:
    """The lines of a command that must not fail."""
    code, out, err = run(*argv, cwd=cwd)
    assert (code, err) == (0, "")
    return out.splitlines()


def evaluation(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("evaluation")]


def outcome(folder: Path, script: str) -> tuple:
    """Iteration and leaves of the checkpoint, and the rows without the columns of the clock."""
    header, state = MODULES[script].load_checkpoint(folder)
    rows = [list(row.items())[:-2] for row in metrics(folder)]
    return header["iteration"], [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], rows


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """script -> (script, the folder of a run of two seeds, what it printed); the scripts run side by side"""
    folders = {script: tmp_path_factory.mktemp(script) / "run" for script in TASKS}
    start = lambda script: printed(*f"{script}.py {TASKS[script]} {COMMON} --run-dir {folders[script]}".split())
    lines = side_by_side(start, TASKS)
    return {script: (script, folders[script], out) for script, out in zip(TASKS, lines, strict=True)}


@pytest.fixture(params=TASKS)
def finished(request, run_of):
    return run_of[request.param]


@pytest.fixture
def continued(run_of):
    """The script that compiles fastest; what is left to test is the same code in all."""
    return run_of["ppo_ctde"]


# --- seeds ----------------------------------------------------------------------------------------
def test_rows_and_lines_carry_the_seed(finished):
    _, folder, out = finished
    rows = metrics(folder)
    count = range(1, ITERATIONS + 1)
    assert [(row["seed"], row["iteration"]) for row in rows] == [(seed, str(i)) for i in count for seed in "34"]
    for seed in "34":
        assert [int(row["env_steps"]) for row in rows if row["seed"] == seed] == [8 * i for i in count]
    loss = next(name for name in rows[0] if name.endswith("loss"))
    assert rows[-1][loss] != rows[-2][loss]
    line = next(line for line in out if line.strip().startswith(f"{ITERATIONS}/"))
    assert float(rows[-1]["env_steps_per_second"]) * float(rows[-1]["seconds"]) == pytest.approx(2 * 1600, rel=0.1)
    last = out[2].split()[-2]  # column in front of the time left
    value = [float(row[last]) for row in rows[-2:]]
    assert re.search(re.escape(f" {np.mean(value):.2f} ± {np.std(value):.2f} "), line)
    assert [line.split()[1] for line in evaluation(out)] == ["seed=3", "seed=4"]


def test_keys_all_differ_and_those_of_a_seed_are_its_own():
    together, alone = MODULES["merl"].Run(seed=3, num_seeds=2).keys(), MODULES["merl"].Run(seed=4).keys()
    data = [np.asarray(jax.random.key_data(keys)) for keys in (*together, *alone)]
    assert len(np.unique(np.concatenate(data[:3]), axis=0)) == 6
    np.testing.assert_array_equal(np.stack(data[:3])[:, 1:], np.stack(data[3:]))


def test_each_seed_behaves_as_it_would_alone(finished):
    """To rounding in the first update; later ones may drift apart, as sums are taken in another order."""
    script, folder, _ = finished
    module = MODULES[script]
    config, env = module.saved_task(module.load_checkpoint(folder)[0])
    init_keys, train_keys, _ = module.Run(seed=3, num_seeds=2).keys()
    init = jax.vmap(partial(module.init_state, config, env))
    state, row = module.train(config, env, init(init_keys), train_keys, stop=1)
    second = jax.tree.map(lambda x: x[1:], state), jax.tree.map(lambda x: x[:, 1:], row)
    init_key, train_key, _ = module.Run(seed=4).keys()
    alone = module.train(config, env, init(init_key), train_key, stop=1)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), second, alone)
    jax.tree.map(lambda one, other: np.testing.assert_equal(one.shape, other.shape), second, alone)


# --- resuming -------------------------------------------------------------------------------------
def kill_at_random(folder: Path, *argv) -> None:
    """Start or resume a run and kill it (SIGKILL) in one of its next iterations, after the first checkpoint."""
    path = folder / "metrics.csv"
    written = path.read_bytes().count(b"\n") if path.exists() else 0
    rows = written + 2 * random.randint(8, ITERATIONS // 3)
    process = subprocess.Popen([sys.executable, *map(str, argv)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not path.exists() or path.read_bytes().count(b"\n") < rows:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()


def test_the_state_is_saved_after_every_so_many_iterations_and_after_the_last():
    script, env, key, saved = MODULES["ppo_ctde"], Rendezvous(), jax.random.key(0), []
    config = script.Config(total_timesteps=80, num_envs=2, num_steps=4, num_minibatches=1, hidden=4)
    save = lambda i, state: saved.append((int(i), int(state.normalizer.count)))
    script.train(config, env, script.init_state(config, env, key), key, start=1, save_fn=save, save_every=3)
    jax.effects_barrier()
    assert saved == [(i, 16 * i) for i in (2, 5, 8, 9)]  # 16 rows per iteration, of which the first one was left out


def test_run_that_is_killed_twice_ends_bit_for_bit_like_one_that_never_stopped(run_of, tmp_path):
    script, whole, out = run_of["sac_shared_critic"]
    folder = tmp_path / "run"
    kill_at_random(folder, f"{script}.py", *TASKS[script].split(), *COMMON.split(), "--run-dir", folder)
    first, _, _ = outcome(folder, script)
    kill_at_random(folder, f"{script}.py", "--resume", folder)
    assert first <= outcome(folder, script)[0] < ITERATIONS
    resumed = printed(f"{script}.py", "--resume", folder)
    assert outcome(folder, script) == outcome(whole, script)
    assert evaluation(resumed) == evaluation(out)
    assert resumed[0].startswith(f"{ITERATIONS} iterations of ")  # and no longer than before
    seconds = [float(row["seconds"]) for row in metrics(folder)]
    assert seconds == sorted(seconds)  # the clock goes on


def test_longer_run_continues_the_finished_one(continued, tmp_path):
    script, whole, _ = continued
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    out = printed(f"{script}.py", "--resume", folder, "--total-timesteps", 1616)
    assert out[0] == "total_timesteps raised from 1600 to 1616: schedules stretch to the new total"
    assert [line.split()[0] for line in out if "/202 " in line] == ["201/202", "202/202"]
    iteration, _, rows = outcome(folder, script)
    assert (iteration, len(rows)) == (202, 404)
    assert rows[:400] == outcome(whole, script)[2]


@pytest.mark.parametrize("left", [b"", b"seed,iterat", b"seed,iteration\n3,1\n4,"])
def test_lost_rows_do_not_keep_a_run_from_going_on(left, continued, tmp_path):
    module = MODULES[continued[0]]
    header, _ = module.load_checkpoint(continued[1])
    (tmp_path / "metrics.csv").write_bytes(left)
    run = module.Run(run_dir=str(tmp_path), resume=str(tmp_path))
    recorder = module.Recorder(*module.saved_task(header), run, header)
    recorder.metrics_file.close()
    assert (tmp_path / "metrics.csv").read_bytes() == left[: left.rfind(b"\n") + 1]  # the whole lines
    assert recorder.saved == f"the checkpoint of iteration {ITERATIONS} is in {tmp_path}"


def test_every_seed_starts_from_its_own_networks_or_all_from_those_of_one(continued, tmp_path):
    module, folder = MODULES[continued[0]], continued[1]
    header, saved = module.load_checkpoint(folder)
    config, env = module.saved_task(header)
    module.Recorder(config, env, module.Run(run_dir=str(tmp_path / "one")), {}).save(
        0, jax.tree.map(lambda x: x[1:], saved)
    )
    keys, _, _ = module.Run(seed=8, num_seeds=2).keys()
    for path, origin in ((folder, [0, 1]), (tmp_path / "one", [1, 1])):
        warm = module.init_state_from_checkpoint(config, env, keys, path)
        expected = jax.tree.map(lambda x, origin=origin: x[np.array(origin)], module.networks(saved))
        jax.tree.map(np.testing.assert_array_equal, module.networks(warm), expected)


# --- evaluation, loading, drawing -----------------------------------------------------------------
def test_evaluation_of_the_checkpoint_repeats_the_line_of_the_run(continued):
    script, folder, out = continued
    before = {path: path.read_bytes() for path in folder.iterdir()}
    again = printed(f"{script}.py", "--eval", folder)
    assert again[0] == next(line for line in out if "(n_agents=" in line)  # what the numbers belong to
    assert evaluation(again) == evaluation(out)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("argv", "seed", "deterministic"), [("", 3, False), ("--deterministic --seed 5", 5, True)])
def test_line_of_a_seed_is_the_mean_and_standard_error_over_its_episodes(continued, argv, seed, deterministic, capsys):
    module, folder = MODULES[continued[0]], continued[1]
    module.main(["--eval", str(folder), *argv.split()])
    lines = evaluation(capsys.readouterr().out.splitlines())
    header, state = module.load_checkpoint(folder)
    config, env = module.saved_task(header)
    *_, keys = module.Run(seed=seed, num_seeds=2).keys()
    for s, line in enumerate(lines):
        trained = jax.tree.map(lambda x, s=s: x[s], state)
        figures, _ = module.evaluate(config, env, trained, keys[s], 8, deterministic)
        expected = {"seed": seed + s, "episodes": 8}
        for name in env.figure_names:
            value = np.asarray(figures[name])
            expected |= {name: value.mean(), f"{name}_se": value.std(ddof=1) / 8**0.5}
        printed = {name: float(value) for name, value in re.findall(r"(\w+)=(\S+)", line)}
        assert printed == pytest.approx(expected, abs=0.051)


def test_policy_loads_where_there_is_only_the_script_and_the_environments(continued, tmp_path):
    script, folder, _ = continued
    module = MODULES[script]
    for file in (f"{script}.py", "envs.py"):
        shutil.copy(ROOT / file, tmp_path)
    shutil.copy(folder / "checkpoint.eqx", tmp_path)
    code = f"""import json, jax, {script}
header, _ = {script}.load_checkpoint("checkpoint.eqx")
_, env = {script}.saved_task(header)
observation, _ = env.reset(jax.random.key(5))
policy = {script}.load_policy("checkpoint.eqx", index=1)
print(json.dumps([policy(observation).tolist(), policy(observation, jax.random.key(6)).tolist()]))"""
    modes, sampled = json.loads(printed("-c", code, cwd=tmp_path)[0])
    for index in (-1, 2):
        with pytest.raises(ValueError, match=rf"index must be in 0\.\.1, a seed of .*, got {index}$"):
            module.load_policy(folder, index=index)
    header, state = module.load_checkpoint(folder)
    config, env = module.saved_task(header)
    trained = jax.tree.map(lambda x: x[1], state)
    observation, _ = env.reset(jax.random.key(5))
    for action, key, deterministic in ((modes, jax.random.key(0), True), (sampled, jax.random.key(6), False)):
        expected = module.select_action(config, env, trained, observation, key, deterministic)
        np.testing.assert_allclose(action, expected, atol=1e-6)


def test_evaluation_draws_an_episode(continued, tmp_path):
    pytest.importorskip("matplotlib")
    script, folder, _ = continued
    path = tmp_path / "episode.gif"
    assert printed(f"{script}.py", "--eval", folder, "--render", path, "--episodes", 8)[-1] == f"drawn to {path}"
    assert path.read_bytes()[:4] == b"GIF8"


@pytest.mark.parametrize("env", [Coverage(grid=6, obstacle_density=0.5), Spread(), Rendezvous(n_agents=3)])
def test_drawing(env, tmp_path):
    pytest.importorskip("matplotlib")

    def step(env_state, key):
        _, env_state = env.step(key, env_state, env.sample_action(key))
        return env_state, env_state

    walk = jax.jit(lambda key: jax.lax.scan(step, env.reset(key)[1], jax.random.split(key, 7))[1])
    pictures = []
    for seed in (0, 1):
        path = tmp_path / f"{seed}.png"
        env.draw(jax.tree.map(np.asarray, walk(jax.random.key(seed))), str(path))
        pictures.append(path.read_bytes())
    assert pictures[0][:4] == b"\x89PNG" and pictures[0] != pictures[1]


# --- lines and failure ----------------------------------------------------------------------------
def test_line_shows_speed_and_time_left_and_a_loss_that_is_not_finite_ends_the_run(
    continued, tmp_path, capsys, monkeypatch
):
    module = MODULES[continued[0]]
    config, env = module.saved_task(module.load_checkpoint(continued[1])[0])
    clock = iter([10.0, 12.0, 14.0, 30.0, 31.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    values = {name: np.ones(2) for name in (*module.columns(env).values(), "value_loss")}
    finite = {"actor": np.array(True), "critic": np.array(True)}

    recorder = module.Recorder(config, env, module.Run(num_seeds=2, run_dir=str(tmp_path)), {})
    recorder.start_clock()
    recorder.log(np.array(0), values | {"finite": finite})
    assert [(row["seed"], row["iteration"]) for row in metrics(tmp_path)] == [("0", "1"), ("1", "1")]  # flushed
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["iteration", "env_steps", "steps/s"] and header.split()[-1] == "time_left"
    cells = line.split()
    assert cells[:3] == ["1/200", "8", "8"] and cells[-1] == "0:06:38"  # 2 seeds x 8 steps in 2 of 400 s
    with pytest.raises(FloatingPointError, match=r"^value_loss is not finite$"):
        recorder.log(np.array(1), values | {"finite": finite, "value_loss": np.array([1.0, np.nan])})
    assert len(capsys.readouterr().out.splitlines()) == 1

    resumed = module.Recorder(config, env, module.Run(num_seeds=2), {"iteration": 99, "seconds": 49.0})
    resumed.start_clock()
    with pytest.raises(FloatingPointError, match=r"^critic is not finite$"):
        resumed.log(np.array(99), values | {"finite": finite | {"critic": np.array(False)}})
    _, line = capsys.readouterr().out.splitlines()
    cells = line.split()
    assert cells[:3] == ["100/200", "800", "32"] and cells[-1] == "0:00:50"  # 100 of 200 iterations in 49 + 1 s


def test_a_single_weight_that_is_not_finite_marks_its_leaf_and_no_other():
    """es.py does not spread it: a step moves every parameter on its own."""
    script, env, key, seen = MODULES["es"], Coverage(grid=4, n_agents=2, horizon=4), jax.random.key(0), []
    config = script.Config(generations=1, rollouts=2, pop=2, hidden=4)
    state = script.init_state(config, env, key)
    state = eqx.tree_at(lambda state: state.policy.head.weight, state, replace_fn=lambda x: x.at[0, 0].set(np.inf))
    script.train(config, env, state, key, log_fn=lambda i, metrics: seen.append(metrics["finite"]))
    jax.effects_barrier()
    (finite,) = seen
    flags = {script.leaf_name(path): bool(flag) for path, flag in jax.tree_util.tree_leaves_with_path(finite)}
    assert flags == {
        "policy.hidden.weight": True,
        "policy.hidden.bias": True,
        "policy.head.weight": False,
        "policy.head.bias": True,
    }


def test_run_stops_where_a_parameter_is_not_finite_and_keeps_the_checkpoint_before(tmp_path):
    folder = tmp_path / "run"
    argv = f"ppo_ctde.py {TASKS['ppo_ctde']} --num-epochs 1 --save-every 1 --lr 1e37 --run-dir {folder}"
    code, _, err = run(*argv.split())
    assert code == 1
    cause, saved = re.fullmatch(r"stopped: FloatingPointError: (\S+) is not finite; (.+)\n", err).groups()
    assert re.match(r"(actor|critic)\.", cause)
    iteration = re.fullmatch(r"the checkpoint of iteration (\d+) is in .+", saved)[1]
    assert len(metrics(folder)) == int(iteration) + 1
    header, state = MODULES["ppo_ctde"].load_checkpoint(folder)
    assert header["iteration"] == int(iteration)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.actor, state.critic)))
