"""The ladder of Coverage with ppo_ctde.py, each rung from the networks below it: `python benchmarks/ladder.py`.

Prints the seconds of the whole process and the evaluation line for every seed and rung; runs are kept in --run-dir.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM = "--num-envs 64 --lr 7e-4"
RUNGS = {
    "16x16/4": "--grid 16 --n-agents 4",
    "24x24/6": f"--grid 24 --n-agents 6 {WARM} --total-timesteps 2_400_000 --lagrange-init 0.7 --cost-limit 0.04",
    "32x32/10": f"--grid 32 --n-agents 10 {WARM} --total-timesteps 480_000 --lagrange-init 1.8 "
    "--lagrange-lr 0.1 --cost-limit 0.045 --ent-coef 0.003",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "ladder")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        below = None
        for name, flags in RUNGS.items():
            run_dir = arguments.run_dir / f"{name.replace('/', '-')}-seed{seed}"
            command = [sys.executable, ROOT / "ppo_ctde.py", *flags.split(), "--seed", str(seed), "--run-dir", run_dir]
            started = time.perf_counter()
            command += ["--init-from", below] if below else []
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if result.returncode:
                sys.exit(result.returncode)  # the script has said why
            evaluation = next(line for line in result.stdout.splitlines() if line.startswith("evaluation"))
            print(f"{name:9} {time.perf_counter() - started:6.0f} s  {evaluation}", flush=True)
            below = run_dir


if __name__ == "__main__":
    main()
