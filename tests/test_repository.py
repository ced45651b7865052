"""The repository as a newcomer meets it: pinned copies, style, README, command line, run folder, interruption."""

import ast
import contextlib
import csv
import importlib
import importlib.metadata
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, fields
from difflib import unified_diff
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from packaging.requirements import Requirement

import envs
import es
import merl
from benchmarks import ladder, runs

ROOT = Path(merl.__file__).parent
MODULES = {path.stem: importlib.import_module(path.stem) for path in sorted(ROOT.glob("*.py"))}
TREES = {name: ast.parse(inspect.getsource(module)) for name, module in MODULES.items()}
SCRIPTS = [name for name, module in MODULES.items() if hasattr(module, "Config")]
TASKS = [(script, name) for script in SCRIPTS for name in MODULES[script].environments()]
REQUIREMENTS = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines()]
SHARED = {  # Copied on purpose, so that a script stands alone: a change to one copy is a change to all.
    "es merl ppo_ctde sac_shared_critic": "linear train each_seed networks",
    "merl ppo_ctde sac_shared_critic": "make_optimizer evaluate",
    "merl ppo_ctde": "Trunk Critic small_linear compute_gae minibatch_rows",
    "ppo_ctde sac_shared_critic": "perceive env_steps_per_iteration",
    "envs es": "check_range",
}
DOCUMENTED = "--grid 10 --n-agents 4 --outer 3 --grad-steps 3 --pop 8 --flock scripted --rollouts 4"
# A script finds only what lies beside it, has no missing device to warn of and compiles fast.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
ENVIRONMENT |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def run(*argv, cwd: Path = ROOT) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a python command."""
    command = [sys.executable, *map(str, argv)]
    result = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout, result.stderr


def settings(script: str, env: str) -> list[type]:
    """The classes whose fields are the flags of a script."""
    return [MODULES[script].Config, MODULES[script].environments()[env], MODULES[script].Run]


def flag_comments(cls: type) -> dict[str, str | None]:
    """Flag -> the comment behind its field."""
    source = inspect.getsource(cls)
    line = {field.name: re.search(rf"^    {field.name}: .*?(?:  # (.+))?$", source, re.M) for field in fields(cls)}
    return {f"--{name.replace('_', '-')}": match[1] for name, match in line.items()}


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


@cache
def help_entries(script: str, env: str) -> dict[str, str]:
    """What --help says of each flag."""
    out = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")  # no wrapping
        MODULES[script].main(["--env", env, "--help"])
    out = out.getvalue()
    entries = [" ".join(entry.split()) for entry in re.split(r"\n  (?=-)", out)[1:]]
    return {flag: entry for entry in entries for flag in flags(entry)}


# --- 1. pinned copies -----------------------------------------------------------------------------
@pytest.mark.parametrize(("files", "name"), [(files, name) for files in SHARED for name in SHARED[files].split()])
def test_copies_of_a_definition_are_equal(files, name):
    first, *others = (inspect.getsource(getattr(MODULES[file], name)).splitlines() for file in files.split())
    for file, other in zip(files.split()[1:], others, strict=True):
        diff = "\n".join(unified_diff(first, other, files.split()[0], file, lineterm=""))
        assert not diff, diff


def test_definitions_that_are_equal_are_pinned():
    """Above the last sections, which are pinned as a whole."""
    files = {}
    for file, module in MODULES.items():
        for node in ast.parse(re.split(r"# --- \d+\. checkpoints", inspect.getsource(module))[0]).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                files.setdefault((node.name, ast.dump(node)), []).append(file)
    copies = {name: " ".join(places) for (name, _), places in files.items() if len(places) > 1}
    assert copies == {name: places for places, names in SHARED.items() for name in names.split()}


def test_last_sections_are_equal_in_all_scripts():
    """From the checkpoints on, but for the numbers of the sections."""
    source = [re.sub(r"# --- \d+\.", "# ---", inspect.getsource(MODULES[name])) for name in SCRIPTS]
    first, *others = (text.split("# --- checkpoints ---")[1] for text in source)
    assert len(others) == 3 and "# --- running ---" in first
    for other in others:
        diff = "\n".join(unified_diff(first.splitlines(), other.splitlines(), lineterm=""))
        assert not diff, diff


# --- 2. style -------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", TREES)
def test_functions_are_short_and_nest_at_most_once(file):
    def functions(node):
        return [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]

    for function in functions(TREES[file]):
        assert function.end_lineno - function.lineno < 60, f"{function.name} has more than 60 lines"
        assert all(len(functions(inner)) == 1 for inner in functions(function)[1:]), f"def in def in {function.name}"


@pytest.mark.parametrize("file", TREES)
def test_imports_are_the_runtime_packages_and_the_shared_files(file):
    imports = [node for node in ast.walk(TREES[file]) if isinstance(node, ast.Import)]
    modules = [alias.name for node in imports for alias in node.names]
    modules += [node.module or "." for node in ast.walk(TREES[file]) if isinstance(node, ast.ImportFrom)]
    allowed = {"jax", "equinox", "optax", "numpy", "matplotlib", "envs", *sys.stdlib_module_names}
    assert {module.split(".")[0] for module in modules} <= allowed | ({"es"} if file == "merl" else set())


def test_importing_prints_nothing_and_loads_no_plotting():
    code = f"import sys, {', '.join(MODULES)}; assert 'matplotlib' not in sys.modules"
    assert run("-c", code) == (0, "", "")


@pytest.mark.parametrize(("script", "env"), TASKS)
def test_every_field_is_read_and_shown_by_help(script, env):
    for cls in settings(script, env):
        module, holder = sys.modules[cls.__module__], {"Config": "config", "Run": "run"}.get(cls.__name__, "env")
        for field, (flag, comment) in zip(fields(cls), flag_comments(cls).items(), strict=True):
            assert help_entries(script, env)[flag].endswith(f" {comment} (default: {field.default})")
            is_read = re.search(rf"\b{holder}\.{field.name}\b", inspect.getsource(module))
            is_read = is_read or re.search(rf"\bself\.{field.name}\b", inspect.getsource(cls))
            assert is_read or field.name in getattr(module, "ES_FIELDS", ()), f"{flag} is never read"


# --- 3. requirements ------------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
def test_inline_metadata_lists_the_runtime_requirements(script):
    (block,) = re.findall(r"^# /// script\n(.*?)^# ///$", inspect.getsource(MODULES[script]), re.M | re.S)
    listed = tomllib.loads(re.sub(r"^# ", "", block, flags=re.M))["dependencies"]
    assert {Requirement(text) for text in listed} == {each for each in REQUIREMENTS if each.name != "pytest"}


def test_requirements_exclude_jax_0_10_2_and_hold_here():
    refusing = {each.name for each in REQUIREMENTS if "0.10.1" in each.specifier and "0.10.2" not in each.specifier}
    assert {"jax", "jaxlib"} <= refusing
    assert all(importlib.metadata.version(each.name) in each.specifier for each in REQUIREMENTS)


# --- 4. README ------------------------------------------------------------------------------------
def readme() -> tuple[list[str], list[str]]:
    """The lines of its code blocks, continued ones joined, and its code spans."""
    parts = re.split(r"^```.*\n", (ROOT / "README.md").read_text().replace("\\\n", " "), flags=re.M)
    return "".join(parts[1::2]).splitlines(), re.findall(r"`([^`]+)`", "".join(parts[::2]))


@pytest.mark.parametrize("command", ["python merl.py --grid 10 --n-agents 4", "pytest"])
def test_readme_shows_the_command(command):
    assert f"pip install -r requirements.txt && {command}" in readme()[0]


def test_ci_runs_the_linter_and_the_test_command_of_the_readme(tmp_path):
    # In place of python, this makes an environment of copies of itself; all of them only note how they are called.
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(f"""#!/bin/sh
    echo "$(basename "$0") $*" >> {calls}
    [ "$2" != venv ] || {{ mkdir "$3/bin"; for tool in pip ruff pytest; do cp "$0" "$3/bin/$tool"; done; }}""")
    stub.chmod(0o755)
    subprocess.run(ROOT / ".ci" / "run", env=os.environ | {"PYTHON": str(stub)}, check=True)
    linter = ["pip install --quiet ruff matplotlib pytest-xdist", "ruff check .", "ruff format --check ."]
    assert calls.read_text().splitlines()[1:] == [*linter, "pip install -r requirements.txt", "pytest "]


def test_readme_shows_only_flags_that_exist():
    lines, spans = readme()
    known = {script: set() for script in SCRIPTS}
    for script, env in TASKS:
        known[script] |= help_entries(script, env).keys()
    for script, arguments in re.findall(r"python (\w+)\.py([^;&|#\n]*)", "\n".join(lines + spans)):
        assert flags(arguments) <= known[script]
    assert flags(" ".join(span for span in spans if span.startswith("--"))) <= set().union(*known.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_readme_describes_every_flag(script):
    wanted = {
        flag for env in MODULES[script].environments() for cls in settings(script, env) for flag in flag_comments(cls)
    }
    assert wanted <= flags(" ".join(readme()[1]))


def test_commands_of_readme_and_benchmarks_are_accepted():
    """As far as that is decided before anything is compiled or read from a file."""
    lines, spans = readme()
    commands = re.findall(r"python (\w+)\.py([^;&|#\n]*)", "\n".join(lines + spans))
    commands += [("ppo_ctde", arguments) for arguments in ladder.RUNGS.values()]
    commands += [(script.removesuffix(".py"), arguments) for script, arguments in runs.TASKS.items()]
    assert len(commands) > 15
    for script, arguments in commands:
        if not flags(arguments) & {"--resume", "--eval", "--help"}:
            config, env, *_ = MODULES[script].parse_settings(arguments.replace("--seed S", "--seed 0").split())
            jax.eval_shape(partial(MODULES[script].init_state, config, env), jax.random.key(0))


# --- 5. a run from start to end -------------------------------------------------------------------
def metrics(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def checkpoint_header(folder: Path) -> dict:
    return json.loads((folder / "checkpoint.eqx").read_bytes().split(b"\n")[0])


@pytest.fixture(scope="module")
def documented(tmp_path_factory) -> tuple[list[str], Path]:
    """The lines that the documented command prints, and its run folder."""
    folder = tmp_path_factory.mktemp("documented") / "run"
    code, out, err = run("merl.py", *DOCUMENTED.split(), "--run-dir", folder)
    assert (code, err) == (0, "")
    return out.splitlines(), folder


def test_run_prints_aligned_lines_the_evaluation_and_the_map(documented):
    (size, compiled, header, *iterations, task, evaluation), city = documented[0][:8], documented[0][8:]
    sizes = r"state of \d\.\d MB: policy \d\.\d, critic \d\.\d, optimizer_state \d\.\d"
    assert re.fullmatch(f"3 iterations of 4,400 env steps, {sizes}", size)
    assert re.fullmatch(r"compiled in \d+\.\d s", compiled)
    assert task == str(envs.Coverage(grid=10))
    ends = [[cell.end() for cell in re.finditer(r"\S+", line)] for line in (header, *iterations)]
    assert ends == [ends[0]] * 4  # every cell ends where its header does
    for i, (line, row) in enumerate(zip(iterations, metrics(documented[1]), strict=True), 1):
        cells = dict(zip(header.split(), line.split(), strict=True))
        assert (cells["iteration"], cells["env_steps"]) == (f"{i}/3", f"{4400 * i:,}")
        metric_of = {"es_best": "best", "es_mean": "mean", "coverage": "grad_cov", "connected": "grad_conn5"}
        for name in (*metric_of, "episode_return", "lagrange_multiplier"):
            assert cells[name] == f"{float(row[metric_of.get(name, name)]):.2f}"

    names = "coverage", "connected", "connected_weak", "episode_return"
    figures = " ".join(rf"{name}=(-?\d+\.\d) {name}_se=\d+\.\d" for name in names)
    numbers = re.fullmatch(f"evaluation seed=0 episodes=100 {figures}", evaluation).groups()
    coverage, connected, connected_weak, episode_return = map(float, numbers)
    assert 0 < connected <= connected_weak <= 100
    assert episode_return == pytest.approx((coverage - 4) / 4, abs=0.1)  # 100 cells, 4 of them without reward, 4 robots

    assert len(city) == 10 and "".join(city).count("*") == 4
    assert all(re.fullmatch(r"([.0-3][ *]){10}", row.ljust(20)) for row in city)


def test_evaluation_goes_to_another_map_and_team(documented, capsys):
    merl.main(["--eval", str(documented[1]), "--grid", "12", "--n-agents", "5", "--episodes", "2"])
    task, evaluation, *city = capsys.readouterr().out.splitlines()
    assert task == str(envs.Coverage(grid=12, n_agents=5)) and evaluation.startswith("evaluation seed=0 episodes=2 ")
    assert len(city) == 12 and "".join(city).count("*") == 5


def test_run_folder_is_complete(documented):
    _, folder = documented
    assert {path.name for path in folder.iterdir()} == {"config.json", "metrics.csv", "checkpoint.eqx"}
    header = checkpoint_header(folder)
    assert (header["format"], header["iteration"]) == (2, 3)
    config, env = merl.Config(outer=3, grad_steps=3, pop=8, rollouts=4), envs.Coverage(grid=10)
    values = asdict(config) | asdict(env) | asdict(merl.Run(run_dir=str(folder))) | {"env": "coverage"}
    for saved in (header, json.loads((folder / "config.json").read_text())):
        assert (saved["script"], saved["config"]) == ("merl.py", values)
    assert saved["command"] == ["merl.py", *DOCUMENTED.split(), "--run-dir", str(folder)]
    assert saved["versions"]["jax"] == jax.__version__ and "commit" in saved

    rows = [list(row.items()) for row in metrics(folder)]
    assert len(rows) == 3
    for i, row in enumerate(rows, 1):
        assert row[:3] == [("seed", "0"), ("iteration", str(i)), ("env_steps", str(4400 * i))]
        assert [name for name, _ in row[-2:]] == ["env_steps_per_second", "seconds"]
        assert all(np.isfinite(float(value)) for _, value in row)


# --- 6. copies of the scripts, interruption, failure ----------------------------------------------
def stop_in_mid_run(folder: Path, files: str, argv: str, stop) -> tuple[int, str]:
    """Copy files to a folder, run the first there without end, `stop(process)` after two rows; -> exit code, stderr."""
    for file in files.split():
        shutil.copy(ROOT / file, folder)
    tiny = "--grid 4 --n-agents 2 --horizon 10 --rollouts 2 --pop 2 --save-every 1 --run-dir run"
    command = [sys.executable, *files.split()[:1], *tiny.split(), *argv.split()]
    rows, deadline = folder / "run" / "metrics.csv", time.monotonic() + 300
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, a child would ignore it
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=err)
    signal.signal(signal.SIGINT, handler)
    try:
        while not rows.exists() or rows.read_text().count("\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "err").read_text()
            time.sleep(0.05)
        stop(process)
        return process.wait(60), (folder / "err").read_text()
    finally:
        process.kill()


def test_interrupted_run_of_copied_scripts_leaves_complete_files(documented, tmp_path):
    folder, interrupt = tmp_path / "run", lambda process: process.send_signal(signal.SIGINT)
    argv = "--outer 99999 --grad-steps 1 --num-minibatches 1 --num-epochs 1 --seed 1 --lr 1e-12 --es-lr 0 --init-from "
    code, err = stop_in_mid_run(tmp_path, "merl.py envs.py es.py", argv + str(documented[1]), interrupt)
    assert code == 130 and re.fullmatch(r"interrupted: the checkpoint of iteration \d+ is in run\n", err)
    *rows, end = (folder / "metrics.csv").read_text().split("\n")
    assert end == "" and {row.count(",") for row in rows} == {rows[0].count(",")}
    assert checkpoint_header(folder)["iteration"] in (len(rows) - 2, len(rows) - 1)  # one row is the header
    saved, origin = (jax.tree.leaves(merl.load_checkpoint(path)[1].policy) for path in (folder, documented[1]))
    assert all(np.allclose(*pair, atol=1e-6) for pair in zip(saved, origin, strict=True))  # its steps are all but zero


def test_failing_write_ends_the_run_with_its_cause(tmp_path):
    def stop(process):
        (tmp_path / "run").rename(tmp_path / "gone")
        (tmp_path / "run").touch()

    code, err = stop_in_mid_run(tmp_path, "es.py envs.py", "--generations 99999", stop)
    assert code == 1
    assert re.fullmatch(r"stopped: \w+Error: .*checkpoint.tmp.*; the checkpoint of iteration \d+ is in run\n", err)


def test_es_works_without_any_other_file(tmp_path):
    shutil.copy(ROOT / "es.py", tmp_path)
    code = """import jax, jax.numpy as jnp, es
theta, config = jnp.ones(3), es.ESConfig(pop_size=64)
population = es.ask(theta, config, jax.random.key(0))
print(es.tell(theta, population, -jnp.square(population).sum(1), config)[0].tolist())"""
    exit_code, out, err = run("-c", code, cwd=tmp_path)
    assert (exit_code, err) == (0, "")
    assert np.square(json.loads(out)).sum() < 2.8  # uphill from -3


# --- 7. bad input ---------------------------------------------------------------------------------
REFUSALS = {  # what the line says: arguments
    "{flag} must be at least 1, got {value}": "--grid 0, --grid -3, --n-agents 0, --rollouts 0, --save-every 0",
    "{flag} must be at most 25, the cells of the spawn area that are surely free, got {value}": "--n-agents 26",
    "{flag} must be even and at least 2, got {value}": "--pop 7, --pop 0",
    "{flag} must be a divisor of --horizon x --rollouts = 3200, got {value}": "--num-minibatches 7",
    "{flag} must be finite and above 0, got {value}": "--sigma nan, --sigma 0.0, --lr inf",
    "{flag} must be in [0, 1], got {value}": "--gamma 1.5",
    "{flag} must be at least 0, got {value}": "--seed -1",
    "{flag}: invalid int32 value: '{value}'": "--grid abc, --hidden 2147483648, --horizon -99999999999",
    "{flag}: invalid choice: '{value}' (choose from ": "--es-kind foo, --flock foo, --env nowhere",
    "unrecognized arguments: {flag} {value}": "--unknown-flag 1, --roll 4",
    "{flag} must be a checkpoint, {value} cannot be read: No such file or directory": "--init-from DIR/missing.eqx",
    "{flag} must be a checkpoint, {value}/checkpoint.eqx cannot be read: ": "--init-from DIR/empty",
    "{flag} must be a checkpoint, {value} is not a complete one of merl.py": "--init-from DIR/text, "
    "--init-from DIR/cut_in_header, --init-from DIR/cut_after_header, --init-from DIR/cut_in_arrays, "
    "--init-from DIR/cut_by_a_byte",
    "{flag} must be a checkpoint of merl.py, {value}/checkpoint.eqx is one of es.py": "--init-from DIR/es",
    "{flag} must have the same architecture, {value} has ": "--init-from DIR/other",
    "{flag} must be a writable folder: ": "--run-dir DIR/text, --run-dir DIR/text/below, --run-dir DIR/" + 300 * "a",
    "{flag} must hold no run, {value} has checkpoint.eqx: see --resume": "--run-dir DIR/merl",
    "{flag} must hold no run, {value} has metrics.csv: delete it": "--run-dir DIR/started",
    "{flag} must be a .png or .gif file in a folder that exists, got {value}": "--render a.jpg, --render DIR/no/a.png",
    "{flag} must be at least 2, got {value}": "--episodes 1",
    "--num-seeds must be 2 as in {value}, got 1": "--init-from DIR/two",
}
BAD = {argument: message for message, arguments in REFUSALS.items() for argument in arguments.split(", ")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with things to point --init-from and --run-dir at."""
    folder, env = tmp_path_factory.mktemp("inputs"), envs.Coverage()
    runs = {"merl": (merl, {}, 1), "other": (merl, {"n_goals": 9}, 1), "es": (es, {}, 1), "two": (merl, {}, 2)}
    for name, (script, config, num_seeds) in runs.items():
        config, run_dir = script.Config(**config), str(folder / name)
        run = script.Run(num_seeds=num_seeds, run_dir=run_dir)
        state = jax.vmap(partial(script.init_state, config, env))(run.keys()[0])
        recorder = script.Recorder(config, env, run, {})
        recorder.save(0, state)
        recorder.metrics_file.close()
    content = (folder / "merl" / "checkpoint.eqx").read_bytes()
    (folder / "newer").mkdir()
    (folder / "newer" / "checkpoint.eqx").write_bytes(content.replace(b'"format": 2', b'"format": 3', 1))
    arrays = content.index(b"\n") + 1
    for name, end in {"in_header": 99, "after_header": arrays, "in_arrays": arrays + 9999, "by_a_byte": -1}.items():
        (folder / f"cut_{name}").write_bytes(content[:end])
    (folder / "text").write_text("not a checkpoint\n")
    (folder / "empty").mkdir()
    (folder / "started").mkdir()
    (folder / "started" / "metrics.csv").write_text("")
    return folder


RESUME = {
    "--eval DIR/missing": "--eval must be a checkpoint, DIR/missing cannot be read: No such file or directory",
    "--resume DIR/missing": "--resume must be a checkpoint, DIR/missing cannot be read: No such file or directory",
    "--resume DIR/cut_in_arrays": "--resume must be a checkpoint, DIR/cut_in_arrays is not a complete one of merl.py",
    "--eval DIR/es": "--eval must be a checkpoint of merl.py, DIR/es/checkpoint.eqx is one of es.py",
    "--resume DIR/newer": "--resume must be of format 2, DIR/newer/checkpoint.eqx is of 3: use the code that wrote it",
    "--resume DIR/merl/checkpoint.eqx": "--resume must be a writable folder: [Errno 17] File exists: "
    "'DIR/merl/checkpoint.eqx'",
    "--resume DIR/merl --lr 0.5": "--lr must be left out, with --resume DIR/merl it is 0.001; got 0.5",
    "--resume DIR/merl --num-seeds 2": "--num-seeds must be left out, with --resume DIR/merl it is 1; got 2",
    "--resume DIR/merl --init-from x": "--init-from must be left out, with --resume DIR/merl it is ''; got 'x'",
    "--resume DIR/merl --seed 1": "--seed must be left out, with --resume DIR/merl it is 0; got 1",
    "--resume DIR/merl --grid 9": "--grid must be left out, with --resume DIR/merl it is 16; got 9",
    "--resume DIR/merl --outer 59": "--outer must be left out or raised, with --resume DIR/merl it is 60; got 59",
    "--resume DIR/merl --eval DIR/other": "--eval must be left out, with --resume DIR/merl it is ''; got 'DIR/other'",
    "--eval DIR/merl --outer 70": "--outer must be left out, with --eval DIR/merl it is 60; got 70",
    "--eval DIR/merl --view-r 4": "--eval must have the same architecture, DIR/merl has "
    "critic.trunk.layers.0.weight (64, 450) instead of (64, 642), "
    "policy.trunk.layers.0.weight (64, 224) instead of (64, 320)",
    "--eval DIR/merl --run-dir DIR/new": "--run-dir must be left out, with --eval DIR/merl it is ''; got 'DIR/new'",
}


def refused(argv: str, inputs: Path, capsys, monkeypatch) -> str:
    """The one line with which merl.py refuses arguments; nothing is compiled and no file changes."""
    content = lambda: {path: path.is_file() and path.read_bytes() for path in inputs.rglob("*")}
    before = content()
    monkeypatch.setattr(merl, "train", None)  # nothing to compile
    with pytest.raises(SystemExit) as stopped:
        merl.main(argv.split())
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, content()) == (2, "", before)
    return re.fullmatch(r"\S+: error: (.*)\n", err)[1]


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_refused_in_one_line_before_anything_happens(argument, inputs, capsys, monkeypatch):
    flag, value = argument.replace("DIR", str(inputs)).split()
    argv = f"{flag} {value}" if flag == "--run-dir" else f"{flag} {value} --run-dir {inputs}/new"
    assert BAD[argument].format(flag=flag, value=value) in refused(argv, inputs, capsys, monkeypatch)


@pytest.mark.parametrize("argument", RESUME)
def test_resume_and_evaluation_refuse_what_does_not_fit(argument, inputs, capsys, monkeypatch):
    argv, message = (text.replace("DIR", str(inputs)) for text in (argument, RESUME[argument]))
    assert refused(argv, inputs, capsys, monkeypatch) == message


@pytest.mark.parametrize(("plugins", "flags"), [(None, "--xla_backend_optimization_level=1"), ("a GPU", None)])
def test_only_a_cpu_is_asked_to_compile_quickly(plugins, flags, capsys, monkeypatch):
    monkeypatch.setattr(merl, "find_spec", lambda name: plugins)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(SystemExit):
        merl.main(["--pop", "7"])
    assert os.environ.get("XLA_FLAGS") == flags


def test_drawing_without_matplotlib_is_refused(inputs, capsys, monkeypatch):
    monkeypatch.setattr(merl, "find_spec", lambda name: None)
    line = refused(f"--render {inputs}/a.png", inputs, capsys, monkeypatch)
    assert line == "--render needs matplotlib, which is not installed: pip install matplotlib"


def test_bad_command_exits_with_code_2_and_one_line():
    code, out, err = run("es.py", "--pop", "7")
    assert (code, out, err) == (2, "", "es.py: error: --pop must be even and at least 2, got 7\n")
