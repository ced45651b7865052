"""What it costs to log and save, and whether killed runs resume exactly: `python benchmarks/runs.py`.

Measures the time to the first line, the callbacks, and the checkpoint of a large state; then kills runs of all four
scripts at random moments, resumes them, and compares state and metrics bit for bit with a run that was never stopped.
"""

import argparse
import contextlib
import csv
import io
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

import ppo_ctde
import sac_shared_critic as sac
from envs import Coverage, Spread

ROOT = Path(ppo_ctde.__file__).parent
TASKS = {  # small runs that take some seconds
    "merl.py": "--grid 5 --n-agents 2 --horizon 20 --rollouts 4 --pop 4 --hidden 16 --outer 300",
    "es.py": "--grid 5 --n-agents 2 --horizon 20 --rollouts 4 --pop 8 --generations 600",
    "ppo_ctde.py": "--env rendezvous --num-envs 8 --num-steps 20 --hidden 16 --total-timesteps 96_000",
    "sac_shared_critic.py": "--num-envs 4 --num-steps 20 --batch-size 16 --hidden 16 --total-timesteps 40_000",
}


def outcome(folder: Path) -> tuple[bytes, list]:
    """The leaves of the checkpoint, and the rows without the two columns of the clock."""
    leaves = (folder / "checkpoint.eqx").read_bytes().split(b"\n", 1)[1]
    return leaves, [row[:-2] for row in csv.reader((folder / "metrics.csv").open())]


def kill_and_resume(script: str, whole: Path, folder: Path) -> int:
    """Kill a run in a random iteration after its first checkpoint, resume it; -> the iteration it resumed from."""
    command, rows = [sys.executable, ROOT / script], folder / "metrics.csv"
    wanted = random.randint(15, len(outcome(whole)[1]) - 15)
    process = subprocess.Popen([*command, *TASKS[script].split(), "--run-dir", folder], stdout=subprocess.DEVNULL)
    while not rows.exists() or rows.read_bytes().count(b"\n") < wanted:
        assert process.poll() is None, f"{script} ended before row {wanted}"
        time.sleep(random.uniform(0, 0.01))
    process.kill()
    process.wait()
    header = json.loads((folder / "checkpoint.eqx").read_bytes().split(b"\n")[0])
    subprocess.run([*command, "--resume", folder], check=True, stdout=subprocess.DEVNULL)
    assert outcome(folder) == outcome(whole), f"{script} resumed from iteration {header['iteration']} ended elsewhere"
    return header["iteration"]


def kills(count: int, folder: Path) -> None:
    for script, argv in list(TASKS.items())[:count]:
        command = [sys.executable, ROOT / script, *argv.split(), "--run-dir", folder / script]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for i in range(count):
        script = list(TASKS)[i % len(TASKS)]
        iteration = kill_and_resume(script, folder / script, folder / f"kill-{i}")
        print(f"kill {i + 1}/{count}: {script} resumed from iteration {iteration}, equal bit for bit")


def callbacks(folder: Path) -> None:
    config, env = ppo_ctde.Config(total_timesteps=10 * 3200), Coverage()
    run = ppo_ctde.Run(run_dir=str(folder / "callbacks"))
    init_key, train_key, _ = run.keys()
    state = jax.vmap(lambda key: ppo_ctde.init_state(config, env, key))(init_key)
    recorder = ppo_ctde.Recorder(config, env, run, {})
    recorder.start_clock()
    hooks = {"log_fn": recorder.log, "save_fn": recorder.save, "save_every": run.save_every}
    programs = [ppo_ctde.train.lower(config, env, state, train_key, **each).compile() for each in (hooks, {})]
    ratios = []
    for _ in range(21):
        times = []
        for program in programs:
            started = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                jax.block_until_ready(program(state, train_key))
                jax.effects_barrier()
            times.append(time.perf_counter() - started)
        ratios.append(times[0] / times[1])
    print(f"callbacks: {100 * (median(ratios) - 1):.1f} % of a run of 10 iterations, median of {len(ratios)} pairs")


def checkpoint(folder: Path) -> None:
    config, env = sac.Config(buffer_size=57_000), Spread()
    run = sac.Run(run_dir=str(folder / "checkpoint"))
    state = jax.vmap(lambda key: sac.init_state(config, env, key))(run.keys()[0])
    recorder = sac.Recorder(config, env, run, {})
    state, times = jax.tree.map(np.asarray, state), []
    for i in range(5):
        started = time.perf_counter()
        recorder.save(i, state)
        times.append(time.perf_counter() - started)
    size = (folder / "checkpoint" / "checkpoint.eqx").stat().st_size / 1e6
    print(f"checkpoint of {size:.0f} MB: {median(times):.2f} s")


def first_line() -> None:
    started = time.perf_counter()
    command = [sys.executable, "-u", ROOT / "merl.py", "--grid", "16", "--n-agents", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not next(process.stdout).lstrip().startswith("1/"):
        pass
    print(f"merl.py: {time.perf_counter() - started:.1f} s to the line of the first round, compiling included")
    process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    with tempfile.TemporaryDirectory() as folder:
        first_line()
        callbacks(Path(folder))
        checkpoint(Path(folder))
        kills(arguments.kills, Path(folder))


if __name__ == "__main__":
    main()
