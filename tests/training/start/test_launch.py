"""Which ranks a run has, and what becomes of the job when one of them fails, hangs, leaves or is told to stop."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.config import Config, ConfigError
from training.outcome import RankFailed
from training.place import Place
from training.record.checkpoint import complete_checkpoints
from training.record.metrics import read_metrics
from training.start.launch import first_host, given_place, launch, local_environment
from training.start.supervise import Refused, run_local_ranks

ROOT = Path(__file__).resolve().parents[3]
SMALL = [
    "model.layers=1", "model.hidden=32", "model.ffn=32", "model.heads=2", "model.kv_heads=1", "model.head_dim=16",
    "data=synthetic", "data.seq_len=128", "data.rows=2", "data.eval_rows=2", "wandb.mode=disabled", "run.device=cpu",
]  # fmt: skip
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004,9]", "SLURM_JOB_ID": "1234567",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Place(3, 4, 1, "env://")),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Place(0, 1, 0, "env://")),
        (SLURM, Place(9, 16, 1, "tcp://gpu003:24567")),
        ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "5"}, Place(9, 16, 1, "tcp://head:5")),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell in a step of one task
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_ID": "5"}, None),  # the batch script itself
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", **{k: SLURM[k] for k in list(SLURM)[3:]}, "SLURM_PROCID": "1"},
            Place(1, 2, 1, "tcp://gpu003:24567"),
        ),
    ],
)
def test_place_is_read_from_the_launchers_variables(environment, place):
    assert given_place(environment) == place


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"WORLD_SIZE": "4"}, "RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "four", "LOCAL_RANK": "0"}, "WORLD_SIZE='four'"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "rank 4 of 4"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, "MASTER_ADDR"),
    ],
)
def test_variables_that_make_no_sense_are_named(environment, named):
    with pytest.raises(ConfigError, match=named):
        given_place(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"), ("a,b", "a"), ("n[1-3,7],m2", "n1"), ("rack2-n[007]", "rack2-n007"), ("n[01-02]-ib", "n01-ib"),
        ("node[01-03,7],other-1", "node01"), ("a[1-2]b[3-4]", "a1b3"), ("a[1-2]b[3-4],c", "a1b3"), ("n[7]", "n7"),
        ("other-1,node[01-03]", "other-1"), ("gpu-a100[0-3].cluster.org", "gpu-a1000.cluster.org"), ("x-y-1", "x-y-1"),
        ("r[1,3]n[02,04-09]-ib[0]", "r1n02-ib0"), (" n[1-2], m", "n1"), ("n[0-6/2]", "n0"),
        ("10.0.0.[1-4]", "10.0.0.1"),
    ],
)  # fmt: skip
def test_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "n[1-2", "n]1[", "[", "n[]", ",a", "n[1-2]]"])
def test_a_list_of_nodes_that_cannot_be_read_is_named(nodes):
    with pytest.raises(ConfigError, match="cannot be read; set MASTER_ADDR to the first node's name"):
        first_host(nodes)


@pytest.mark.parametrize(
    "environment", [{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, SLURM, {**SLURM, "SLURM_PROCID": "0"}]
)
def test_a_sweep_under_a_launcher_is_refused_before_a_rank_starts(environment, tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "-m", "run.seed=1,2", *SMALL]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and not done.stdout and not list(tmp_path.iterdir())
    world = environment.get("WORLD_SIZE", "16")
    assert re.fullmatch(rf"error: -m runs one job .* {world} ranks of one job; .* nproc={world}\.\n", done.stderr)


def test_clash_with_the_launcher_is_refused(make_config, monkeypatch):
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    config = make_config()
    config.nproc = 4
    with pytest.raises(ConfigError, match=r"nproc=4, and the launcher gives 2 ranks"):
        launch(config)


def test_ranks_that_do_not_fit_are_refused_before_a_process_starts(make_config, monkeypatch):
    monkeypatch.setattr("training.start.supervise.run_local_ranks", pytest.fail)
    config = make_config(data={"rows": 6})
    config.nproc = 4
    with pytest.raises(ConfigError, match="multiple of 4"):
        launch(config)


def test_local_ranks_share_the_cores_and_stay_on_loopback():
    found = local_environment({"PATH": "/bin"}, 2 * (os.cpu_count() or 1))
    assert found["OMP_NUM_THREADS"] == "1" and found["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert local_environment({"OMP_NUM_THREADS": "7"}, 2)["OMP_NUM_THREADS"] == "7"


def worker(marker: Path, deed: str) -> str:
    """A worker whose rank 1 does `deed` in step 3; its command line carries `marker`."""
    return f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import os, signal, time
import training.loop as loop
from training.start.worker import main
MARKER = {str(marker)!r}
original, calls = loop.forward_backward, []
def forward_backward(*arguments):
    calls.append(1)
    if len(calls) == 3 and arguments[-1].team.rank == 1:
        {deed}
    return original(*arguments)
loop.forward_backward = forward_backward
main()
"""


def processes(marker: Path) -> list[int]:
    """Processes alive whose command line holds `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            dead = entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
            if (
                int(entry.name) != os.getpid()
                and not dead
                and str(marker).encode() in entry.joinpath("cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return found


def run_two(config: Config, marker: Path, deed: str) -> None:
    run_local_ranks(config, 2, local_environment(os.environ, 2), worker(marker, deed))


DRILLS = {
    "raises": ("raise RuntimeError('boom')", r"rank 1 of 2 failed: RuntimeError: boom\. The same command goes on"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 was killed by SIGKILL"),
    "exits with 0": ("os._exit(0)", "rank 1 of 2 left early with exit code 0"),
    "leaves with 0": ("sys.exit(0)", "rank 1 of 2 failed: SystemExit: 0"),
    "hangs": ("time.sleep(1000)", "rank 1 of 2 did not answer within run.timeout_s=4 s"),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 of 2 did not answer within run.timeout_s=4 s"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("deed", "named"),
    [
        pytest.param(*drill, id=name, marks=() if name in ("raises", "hangs") else pytest.mark.deep)
        for name, drill in DRILLS.items()
    ],
)
def test_failed_rank_ends_the_job_in_its_own_words(make_config, tmp_path, capfd, deed, named):
    config = make_config(run={"steps": 1000, "save_every": 1, "timeout_s": 4})
    with pytest.raises(RankFailed, match=named):
        run_two(config, tmp_path, deed)
    errors = capfd.readouterr().err
    if "raise" in deed:
        assert errors.index("[rank 1] Traceback") < errors.index("boom") and "Connection closed" not in errors
    if "sleep" in deed:
        assert re.search(r'\[rank 1\].*File "<string>", line \d+ in forward_backward', errors), errors
    assert processes(tmp_path) == []
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step_00000002"


def test_refusal_of_all_ranks_is_one_sentence(make_config, tmp_path, capfd):
    with pytest.raises(Refused, match=r"model\.attention='magic' is no attention backend"):
        run_two(make_config(model={"attention": "magic"}), tmp_path, "pass")
    assert "Traceback" not in capfd.readouterr().err


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *SMALL, *arguments]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`train.py nproc=2` in `folder`, once it has printed its third step."""
    child = subprocess.Popen(
        command("nproc=2", "run.steps=100000", "run.log_every=1", "run.dir=out", *arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout is not None
    seen = ""
    for line in child.stdout:
        seen += line
        if line.startswith("step 3/"):
            return child
    raise AssertionError(seen)


def children(pid: int) -> list[int]:
    return [int(n) for task in Path(f"/proc/{pid}/task").iterdir() for n in (task / "children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.deep)])
def test_signal_to_the_parent_stops_all_ranks_after_one_step_and_exits_with_0(tmp_path, number):
    child = start(tmp_path)
    child.send_signal(number)
    rest, _ = child.communicate(timeout=60)
    assert child.returncode == 0, rest
    (step,) = re.findall(rf"stopped by {number.name} after step (\d+)", rest)
    assert complete_checkpoints(tmp_path / "out" / "checkpoints")[-1].name == f"step_{int(step):08d}"
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["step"] == int(step)
    assert "Traceback" not in rest


@pytest.mark.deep
def test_second_signal_interrupts_at_once_and_leaves_nobody(tmp_path):
    child = start(tmp_path)
    ranks = children(child.pid)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)  # the same signal twice may be delivered as one
    rest, _ = child.communicate(timeout=60)
    assert child.returncode == 1 and "interrupted" in rest, rest
    assert len(ranks) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_ranks_end_with_their_parent(tmp_path, stopped):
    """SIGKILL to the parent, also while a rank cannot run a line of its own."""
    child = start(tmp_path)
    ranks = children(child.pid)
    assert len(ranks) == 2
    if stopped:
        os.kill(ranks[1], signal.SIGSTOP)
    child.kill()
    child.wait()
    for _ in range(200):
        if not any(Path(f"/proc/{pid}").exists() for pid in ranks):
            return
        time.sleep(0.1)
    raise AssertionError(f"ranks {ranks} outlived their parent")


def agents(folder: Path, *arguments: str, second: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """Two torchrun agents on loopback, as two nodes of one rank each: their exit codes and outputs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for node in range(2):
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
            "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port),
        ]  # fmt: skip
        started.append(
            subprocess.Popen(
                [*launcher, *command(*arguments, *(second if node else ()))[1:]],
                cwd=folder,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [agent.communicate(timeout=120)[0] for agent in started]
    return [(agent.returncode, output) for agent, output in zip(started, outputs)]


def test_two_torchrun_agents_are_two_nodes(tmp_path):
    (first, text), (second, silent) = agents(tmp_path, "run.steps=3", "run.dir=out")
    assert (first, second) == (0, 0), text + silent
    assert "2 x cpu" in text and "finished" in text and "finished" not in silent
    assert [row["step"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.deep
def test_nodes_with_other_configurations_are_refused_on_both(tmp_path):
    for code, text in agents(tmp_path, "run.steps=3", "run.dir=out", second=("run.seed=1",)):
        assert code == 1 and "run.seed is 1 there, 0 on rank 0" in text, text
    assert not (tmp_path / "out").exists()


@pytest.mark.deep
def test_sweep_gives_each_job_its_ranks_and_reports_the_failed_one(tmp_path):
    """Two of four jobs cannot split their rows; the others run, each in its folder, in one W&B group, tagged."""
    jobs = ["strategy.weights=replicated,fully_sharded", "data.rows=3,4", "nproc=2"]
    arguments = [sys.executable, str(ROOT / "train.py"), "-m", *SMALL, *jobs, "run.steps=2", "wandb.mode=offline"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0 and done.stderr.count("error: data.rows=3 do not split") == 2, done.stderr
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2 and all((folder / "summary.json").exists() for folder in folders)
    (group,) = (path.name for path in (tmp_path / "sweeps").iterdir())
    for folder in folders:
        (log,) = folder.glob("wandb/offline-run-*/*.wandb")
        assert group.encode() in log.read_bytes() and b"local" in log.read_bytes()
