"""`python train.py` from outside: what a user types, sees, and gets back."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from training.config import Config, config_hash
from training.record.checkpoint import complete_checkpoints
from training.record.metrics import read_metrics
from training.screen import config_groups, refuse_added_keys, screen_overrides

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.layers=1", "model.hidden=32", "model.ffn=32", "model.heads=2", "model.kv_heads=1", "model.head_dim=16",
    "data.seq_len=128", "data.rows=2", "data.eval_rows=2", "wandb.mode=disabled",
]  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *SMALL, *arguments]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.headz=4", "model.headz.*heads"),
        ("model.heads=eight", "model.heads.*'eight'.*Integer"),
        ("strategy.cp=4", "strategy.cp.*cp_outer"),
        ("~strategy.cp_inner", "strategy.cp_inner cannot be left out; set it, as in strategy.cp_inner=null"),
        ("model=null", "model=null.*gpt2.*tiny"),
        ("~model", "~model.*gpt2"),
        ("model=gpt9", "model/gpt9.*tiny"),
        ("data.source=null", "data.source.*not Optional"),
        ("run.name=a=b", "run.name.*quote"),
        ("run.name=a b,c", "run.name.*sweep.*one value"),
        ("--run.seed=1", "no dashes; write run.seed=1"),
        ("+model.headz=4", "model.headz.*nothing would read it"),
        ("optim.schedule=linear", "optim.schedule.*linear.*cosine"),
        ("run.steps=1.5", "run.steps"),
        ("hydra.foo=1", "hydra.foo"),
    ],
)
def test_mistake_on_the_command_line_is_one_sentence_that_names_the_key(override, named):
    with pytest.raises(ValueError, match=named) as error:
        screen_overrides([override])
    assert "\n" not in str(error.value)


def test_correct_overrides_pass():
    screen_overrides(["model=gpt2", "run.stop_at=null", "model.window=[4,null]", "++run.seed=3", "-m", "run.seed=1,2"])
    screen_overrides(["data.paths=['a b.txt','c=d.txt']", "optim.lr=1e-3", "hydra.job.chdir=false"])


@pytest.mark.parametrize(
    "override",
    [
        f"{group}={name}"
        for group in ("model", "data", "strategy", "optim", "run")
        for name in config_groups()[group]
        if name not in ("hf", "tokens")  # need a checkpoint and shards: see test_adopt.py, test_sources_in_runs.py
    ],
)
def test_every_preset_composes_and_validates(override):
    needs = {
        "data=files": ["data.paths=[corpus.txt]"], "data=hub": ["data.path=folder"],
        "data=mix": ["data.sources=[{source: stdlib}]"],
    }  # fmt: skip
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("config", overrides=[override, *needs.get(override, [])])
    refuse_added_keys(OmegaConf.to_container(composed))
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.validate()


def test_composed_configuration_can_be_printed(tmp_path):
    done = run("--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0 and "hidden: 32" in done.stdout, done.stderr


def test_mistake_dies_before_torch_is_loaded():
    """A typo must show in about a second, and a refusal must not wait for the libraries that it keeps from running."""
    lines = [
        "import runpy, sys",
        "sys.argv = ['train.py', 'run.steps=0']",
        "try: runpy.run_path('train.py', run_name='__main__')",
        "except SystemExit as error: print(error, 'torch' in sys.modules)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "error: run.steps=0 must be 1 or more. False", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.headz=4"], "model.headz"),
        (["model.heads=eight"], "model.heads"),
        (["model=null"], "model=null"),
        (["data=files", "data.paths=[absent.txt]"], "absent.txt"),
        (["data=files", "data.paths=[empty.txt]"], "empty.txt"),
        (["data=files", "data.paths=[ids.jsonl]"], "ids.jsonl:2.*999"),
        (["model.vocab_size=100"], "258 ids.*vocab_size=100"),
        (["nproc=4"], r"data\.rows=2 .*dp=4"),
        (["nproc=0"], "nproc=0"),
        (["nproc=2", "strategy.dp=3"], "2 ranks.*dp=3"),
        (["nproc=3", "strategy=ulysses"], "3 ranks cannot share 2 query heads|cp_inner=3"),
        (["strategy.exchange=magic"], "exchange='magic'.*ring"),
        (["strategy=magic"], "strategy/magic.*usp"),
        (["model.attention=magic"], "magic"),
        (["data.rows=6", "run.accumulate=4"], "run.accumulate=4.*data.rows=6"),
        (["model.head_dim=300"], "model.head_dim=300 must lie in 1 to 256"),
        (["model.layers=1000000000"], "model.layers=1000000000 must lie in 1 to 10000"),
        (["nproc=1000000"], "nproc=1000000 must lie in 1 to 4096"),
        (["nproc=1000", "data.rows=1000"], "nproc=1000 would start 1000 processes.*run=plan"),
        (["wandb.project=a/b"], "wandb.project=a/b: W&B takes"),
    ],
)
def test_bad_input_ends_before_training(tmp_path, overrides, named):
    """Non-zero exit, one line that names the thing, and no run folder left behind."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "ids.jsonl").write_text('{"tokens": [1, 2, 3]}\n{"tokens": [4, 999]}\n')
    done = run(*overrides, "run.dir=out", cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(named, done.stderr), done.stderr
    assert done.stderr.startswith("error: ") and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "out").exists()


def test_default_folder_is_named_by_the_computation_and_reused(tmp_path):
    """Cadence, W&B and where to stop do not change the name: the same command with them goes on in the same folder."""
    first = run("run.steps=4", "run.stop_at=2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = run("run.steps=4", "run.save_every=1", "run.log_every=1", cwd=tmp_path)
    assert second.returncode == 0 and "resuming after step 2" in second.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert folder.name.startswith("run-") and config["run"]["steps"] == 4
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "tokens/s" in second.stdout and str(folder) in second.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}
    other = run("run.steps=4", f"run.dir={folder}", "model.ffn=64", cwd=tmp_path)
    assert other.returncode != 0
    assert re.search(r"another model \(model.ffn: 32 there, 64 here\)", other.stderr), other.stderr


def test_sigterm_to_the_process_saves_and_exits_cleanly(tmp_path):
    arguments = command("run.steps=100000", "run.dir=out", "run.log_every=1")
    child = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("step 3/"):
            child.send_signal(signal.SIGTERM)
            break
    rest = child.stdout.read()
    assert child.wait(timeout=60) == 0
    assert "stopped by SIGTERM" in rest
    step = int(re.findall(r"after step (\d+)", rest)[0])
    newest = complete_checkpoints(tmp_path / "out" / "checkpoints")[-1]
    assert newest.name == f"step_{step:08d}"
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["step"] == step


@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.deep)])
def test_killed_while_training_and_saving_it_resumes_and_ends_as_if_never_killed(tmp_path, kills):
    """SIGKILL at arbitrary moments of a run that saves at every step; then straight through beside it."""
    steps = 5 * kills + 5
    arguments = (f"run.steps={steps}", "run.save_every=1", "run.log_every=1")
    resumed_at = []
    for attempt in range(kills):
        child = subprocess.Popen(command(*arguments, "run.dir=out"), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        seen = 0
        for line in child.stdout:
            resumed_at += [int(n) for n in re.findall(r"resuming after step (\d+)", line)]
            seen += line.startswith("step ")
            if seen > 2:
                time.sleep(0.013 * attempt)
                os.kill(child.pid, signal.SIGKILL)
                break
        child.stdout.close()
        child.wait(timeout=60)
        newest = complete_checkpoints(tmp_path / "out" / "checkpoints")
        assert newest, f"no complete checkpoint after kill {attempt + 1}"
    assert len(resumed_at) == kills - 1 and resumed_at == sorted(set(resumed_at))
    rest = run(*arguments, "run.dir=out", cwd=tmp_path)
    assert rest.returncode == 0 and "resuming after step" in rest.stdout
    assert run(*arguments, "run.dir=straight", cwd=tmp_path).returncode == 0
    a, b = (
        [row["train/loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("out", "straight")
    )
    assert len(a) == steps and a == b


def test_sweep_runs_each_job_in_its_own_folder_and_reports_a_failure(tmp_path):
    overrides = [*SMALL, "run.steps=2", "model.kv_heads=1,3", "run.seed=1"]
    sweep = [sys.executable, str(ROOT / "train.py"), "-m", *overrides]
    done = subprocess.run(sweep, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "model.kv_heads=3" in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["step"] == 2


def test_hash_leaves_out_what_does_not_change_the_computation(make_config):
    base = config_hash(make_config())
    same = [
        {"run": {"dir": "x", "timeout_s": 9, "stop_at": 3, "save_every": 9, "eval_every": 9, "keep": 7, "log_every": 3}}
    ]
    other = [
        {"run": {"seed": 1}},
        {"strategy": {"dp": 2}},
        {"run": {"steps": 7}},
        {"model": {"layers": 1}},
        {"optim": {"lr": 1.0}},
    ]
    assert all(config_hash(make_config(**c)) == base for c in same)
    ranked = make_config()
    ranked.nproc = 4
    assert config_hash(ranked) == base
    assert len({base, *(config_hash(make_config(**c)) for c in other)}) == 1 + len(other)
