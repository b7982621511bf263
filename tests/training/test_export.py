"""From a Hugging Face checkpoint through training and back: transformers computes what our model does."""

import dataclasses
import json
import os
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer

import training.export as export
import training.loop as loop
from data.config import DataConfig
from data.sources.table import open_tokenizer
from models.attend import local_attend
from models.config import ModelConfig
from models.decoder import Decoder
from models.hf.config import read_config
from models.hf.files import CheckpointError, open_folder
from tests.checkpoints import FAMILIES, load_back, load_decoder, save, theirs
from tests.data.conftest import train as train_tokenizer
from tests.data.conftest import write_ranks
from training.config import Config, ConfigError, Resume
from training.export import export_run, find_source, main
from training.record.checkpoint import complete_checkpoints
from training.record.metrics import read_metrics
from training.team import Team

QUIET = Console(quiet=True)


def adopted(folder: Path, **changes: Any) -> ModelConfig:
    found = open_folder(folder)
    config = read_config(found.config)[1]
    return dataclasses.replace(config, path=str(folder), content_hash=found.content_hash, **changes)


def trained(run: Path) -> Decoder:
    """The model of a run's newest checkpoint."""
    source = find_source(run, None, QUIET)
    decoder = Decoder(dataclasses.replace(source.model, path=None, content_hash=None))
    decoder.load_state_dict(load_file(source.checkpoint / "model.safetensors"))
    return decoder


def logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    count = len(tokens)
    attend = local_attend([0], [count], count, decoder.config.layer_masks())
    with torch.no_grad():
        return decoder.logits(decoder(tokens, torch.arange(count), attend))


def run_job(config: Config) -> list[float]:
    """A job: the whole loop on this rank; its losses."""
    team = Team(config, dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Team(config)
    loop.train(config, QUIET, team)
    return losses(config)


def losses(config: Config) -> list[float]:
    assert config.run.dir
    return [row["train/loss"] for row in read_metrics(Path(config.run.dir) / "metrics.jsonl")]


@pytest.fixture
def make_run(make_config, tmp_path):
    """A function: model changes, run changes -> the folder of a run of 2 steps from random weights."""

    def make(run: dict | None = None, **model: Any) -> Path:
        config = make_config(model=model, run={"steps": 2, **(run or {})})
        loop.train(config, QUIET)
        return Path(config.run.dir)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_imported_trained_a_step_exported_and_loaded_back_by_transformers(make_config, tmp_path, family):
    save(family, tmp_path / "start")
    config = dataclasses.replace(make_config(run={"steps": 1}), model=adopted(tmp_path / "start"))
    loop.train(config, QUIET)
    out = export_run(tmp_path / "run", shard_gb=2e-5, console=QUIET)
    assert (out / "model.safetensors.index.json").exists() and out.parent == tmp_path / "run" / "export"
    tokens = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(2))
    mine, back = logits(trained(tmp_path / "run"), tokens), theirs(load_back(out), tokens)
    torch.testing.assert_close(back, mine, atol=1e-4, rtol=0)
    moved = (mine - theirs(load_back(tmp_path / "start"), tokens)).abs().max()
    assert moved > 1e-2, "a step at lr 1e-2 changes logits by more than the tolerance"
    again = load_decoder(read_config(open_folder(out).config)[1], out)
    assert torch.equal(logits(again, tokens), mine)


def test_first_step_s_loss_is_the_checkpoint_s(make_config, tmp_path):
    """Of an untouched checkpoint: what is trained is what was loaded, and `fully_sharded` starts from the same."""
    save("qwen3", tmp_path / "start")
    config = dataclasses.replace(make_config(run={"steps": 1}), model=adopted(tmp_path / "start"))
    loop.train(config, QUIET)
    random = make_config(run={"steps": 1, "dir": str(tmp_path / "random")})
    random = dataclasses.replace(random, model=dataclasses.replace(config.model, path=None, content_hash=None))
    loop.train(random, QUIET)
    assert abs(losses(config)[0] - losses(random)[0]) > 1e-2


@pytest.mark.parametrize(("weights", "strategy"), [("replicated", "usp"), ("fully_sharded", "ring")])
def test_ranks_start_from_the_checkpoint_as_one_process_does(ranks, make_config, tmp_path, weights, strategy):
    from parallel.strategy import load_strategy

    save("llama31", tmp_path / "start")
    alone = make_config(run={"steps": 3, "dir": str(tmp_path / "alone")}, optim={"lr": 3e-3})
    alone = dataclasses.replace(alone, model=adopted(tmp_path / "start"))
    expected = run_job(alone)
    many = dataclasses.replace(
        alone,
        strategy=load_strategy(strategy, weights=weights),
        run=dataclasses.replace(alone.run, dir=str(tmp_path / "many")),
    )
    found = ranks.run(run_job, many, world=2)[0]
    assert found == pytest.approx(expected, abs=2e-5)
    exported = [export_run(tmp_path / name, console=QUIET) for name in ("alone", "many")]
    one, two = (load_file(path / "model.safetensors") for path in exported)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=0)


def test_run_from_a_checkpoint_resumes_bitwise_without_reading_it_again(make_config, tmp_path):
    save("gpt2", tmp_path / "start")
    config = make_config(run={"steps": 4})
    config = dataclasses.replace(config, model=adopted(tmp_path / "start"))
    loop.train(config, QUIET)
    split = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(tmp_path / "split"), stop_at=2))
    loop.train(split, QUIET)
    shutil.rmtree(tmp_path / "start")
    rest = dataclasses.replace(split, run=dataclasses.replace(split.run, stop_at=None, resume=Resume.must))
    loop.train(rest, QUIET)
    assert losses(config) == losses(rest)
    a, b = (
        load_file(complete_checkpoints(tmp_path / n / "checkpoints")[-1] / "model.safetensors")
        for n in ("run", "split")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_checkpoint_that_changed_since_it_was_composed_is_refused(make_config, tmp_path):
    save("gpt2", tmp_path / "start")
    config = dataclasses.replace(make_config(run={"steps": 1}), model=adopted(tmp_path / "start"))
    save("gpt2", tmp_path / "start", seed=1)
    with pytest.raises(CheckpointError, match="holds other weights"):
        loop.train(config, QUIET)


def test_bf16_export_holds_the_rounded_weights(make_run):
    run = make_run()
    full, half = export_run(run, console=QUIET), export_run(run, dtype="bf16", console=QUIET)
    a, b = (load_file(path / "model.safetensors") for path in (full, half))
    assert a.keys() == b.keys()
    for name in a:
        assert b[name].dtype == torch.bfloat16 and torch.equal(a[name].bfloat16(), b[name])
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_run_from_random_weights_names_its_bytes_and_the_step_that_was_asked_for(make_run, tmp_path):
    run = make_run(run={"save_every": 1, "keep": 3})
    out = export_run(run, step=1, out=tmp_path / "one", console=QUIET)
    written = json.loads((out / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (256, 257, None)
    card = (out / "README.md").read_text()
    assert "1 of 2 steps" in card and "256 begins a document" in card and str(tmp_path) not in card
    first = load_file(run / "checkpoints" / "step_00000001" / "model.safetensors")
    assert torch.equal(load_file(out / "model.safetensors")["model.norm.weight"], first["norm.weight"])
    with pytest.raises(ConfigError, match="step 7; complete ones: 1, 2"):
        export_run(run, step=7, console=QUIET)


def test_tokenizer_files_and_special_tokens_come_from_the_checkpoint(make_config, tmp_path):
    save("qwen2", tmp_path / "start")
    train_tokenizer(tmp_path / "start" / "tokenizer.json", "qwen", ["<|endoftext|>"], ids=299)
    words = (tmp_path / "start" / "tokenizer.json").read_text()
    raw = json.loads((tmp_path / "start" / "config.json").read_text())
    (tmp_path / "start" / "config.json").write_text(json.dumps({**raw, "eos_token_id": [7, 8]}))
    data = {"tokenizer": str(tmp_path / "start")}
    config = dataclasses.replace(make_config(run={"steps": 1}, data=data), model=adopted(tmp_path / "start"))
    config.validate()
    loop.train(config, QUIET)
    out = export_run(tmp_path / "run", console=QUIET)
    assert (out / "tokenizer.json").read_text() == words
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [7, 8]
    assert "tokenizer.json" in (out / "README.md").read_text()
    (tmp_path / "start" / "tokenizer.json").write_text(words + "\n")
    out = export_run(tmp_path / "run", out=tmp_path / "other", console=QUIET)
    assert not (out / "tokenizer.json").exists() and "start has another tokenizer" in (out / "README.md").read_text()
    shutil.rmtree(tmp_path / "start")
    out = export_run(tmp_path / "run", out=tmp_path / "alone", console=QUIET)
    assert not (out / "tokenizer.json").exists() and "is gone" in (out / "README.md").read_text()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] is None


def in_parts(folder: Path, tokenizer: Path) -> None:
    """The vocabulary of a tokenizer.json as vocab.json and merges.txt."""
    model = json.loads(tokenizer.read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], indent=1))
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")


# what lies in the start folder; how the run spelled the tokenizer that it read ({} is where the run's own lies)
FOLDERS = ("json", "parts", "model", "ranks")
SPELLINGS = ("absolute", "relative", "folder", "link", "link to the folder")


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", FOLDERS)
def test_only_the_tokenizer_that_the_run_read_is_carried(kind, spelling, same, tmp_path, monkeypatch):
    start, own = tmp_path / "start", tmp_path / "own"
    start.mkdir()
    own.mkdir()
    (start / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    ranks = kind in ("model", "ranks")
    name = "qwen.tiktoken" if ranks else "tokenizer.json"
    tokenizer = train_tokenizer(own / "tokenizer.json", "qwen", ["<|endoftext|>"], ids=299)
    if ranks:
        write_ranks(tokenizer, own / name)
        (own / "tokenizer.json").unlink()
    if kind == "parts":
        in_parts(start, own / name)
    else:
        shutil.copyfile(own / name, start / {"json": "tokenizer.json", "model": "tokenizer.model"}.get(kind, name))
    if not same:  # the run read another, of the same kind
        train_tokenizer(own / "tokenizer.json", "qwen", ["<|endoftext|>"], ids=290)
        if ranks:
            write_ranks(Tokenizer.from_file(str(own / "tokenizer.json")), own / name)
            (own / "tokenizer.json").unlink()
    (tmp_path / "linked").symlink_to(own)
    (tmp_path / f"link-{name}").symlink_to(own / name)
    monkeypatch.chdir(tmp_path)
    spelled = {
        "absolute": own / name,
        "relative": f"own/../own/{name}",
        "folder": f"own/{name}" if ranks else "own/",
        "link": f"link-{name}",
        "link to the folder": f"linked/{name}" if ranks else "linked",
    }[spelling]
    config = DataConfig(tokenizer=str(spelled), tokenizer_pattern="qwen" if ranks else None)
    sha256 = open_tokenizer(config).identity["sha256"]
    data = {**dataclasses.asdict(config), "tokenizer_sha256": sha256}
    model = types.SimpleNamespace(path=str(start), vocab_size=400)
    special, carried, note = export._tokenizer(types.SimpleNamespace(config={"data": data}, model=model))
    if same:
        assert special["eos_token_id"] == 7 and "where training started" in note
        assert {path.name for path in carried} >= ({"vocab.json", "merges.txt"} if kind == "parts" else set())
    else:
        assert (special, carried) == ({}, []) and "start has another tokenizer" in note


def test_run_on_bytes_does_not_carry_the_checkpoint_s_tokenizer(make_config, tmp_path):
    save("qwen2", tmp_path / "start")
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    loop.train(dataclasses.replace(make_config(run={"steps": 1}), model=adopted(tmp_path / "start")), QUIET)
    out = export_run(tmp_path / "run", console=QUIET)
    assert not (out / "tokenizer.json").exists() and "longfold's byte" in (out / "README.md").read_text()


def test_target_that_holds_something_is_refused_and_left_alone(make_run, tmp_path):
    run, target = make_run(), tmp_path / "target"
    target.mkdir()
    export_run(run, out=target, console=QUIET)  # an empty one is taken
    (target / "mine.txt").write_text("mine")
    before = sorted(target.iterdir())
    with pytest.raises(ConfigError, match="holds something"):
        export_run(run, out=target, console=QUIET)
    assert sorted(target.iterdir()) == before


def test_failure_half_way_leaves_no_folder(make_run, tmp_path, monkeypatch):
    run = make_run()
    original = export.check_written

    def fail(*arguments):
        original(*arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "check_written", fail)
    with pytest.raises(OSError, match="No space"):
        export_run(run, out=tmp_path / "out", console=QUIET)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".writing-*"))


def test_two_exports_to_one_folder_do_not_touch_each_other(make_run, tmp_path):
    run, inside = make_run(), []
    with export._writing(tmp_path / "out") as temporary:
        (temporary / "mine").touch()
        with pytest.raises(ConfigError, match=r"another export is writing .*out; wait for it"):
            export_run(run, out=tmp_path / "out", console=QUIET)
        inside += [path.name for path in temporary.iterdir()]
    assert inside == ["mine"] and not temporary.exists()
    temporary.mkdir()
    (temporary / "left by one that was killed").touch()
    out = export_run(run, out=tmp_path / "out", console=QUIET)
    assert not (out / "left by one that was killed").exists()


def test_model_that_no_architecture_computes_writes_nothing(make_run, tmp_path):
    run = make_run(sink=True, window=[8, None])
    with pytest.raises(CheckpointError, match=r"no model\.sink=true, no model\.window"):
        export_run(run, out=tmp_path / "out", console=QUIET)
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoint_is_passed_over_and_a_folder_that_is_no_run_refused(make_run, tmp_path):
    run = make_run(run={"save_every": 1})
    newest = run / "checkpoints" / "step_00000002" / "model.safetensors"
    with newest.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert export_run(run, console=QUIET).name == "step_00000001-fp32"
    with pytest.raises(ConfigError, match="is no run folder with a complete checkpoint"):
        export_run(run, step=2, console=QUIET)
    with pytest.raises(ConfigError, match="is no run folder"):
        export_run(tmp_path / "nothing", console=QUIET)


def test_command_line_ends_in_one_sentence(make_run, tmp_path, capsys):
    run = make_run()
    main([str(run), "--out", str(tmp_path / "out"), "--dtype", "bf16", "--shard-gb", "0.00001"])
    assert "parameters in bf16" in capsys.readouterr().out and len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    for arguments, named in (
        ([str(run), "--out", str(tmp_path / "out")], "holds something"),
        ([str(run), "--shard-gb", "0"], "must be above 0"),
        ([str(run), "--shard-gb", "inf"], "must be above 0"),
        ([str(tmp_path / "x")], "no run folder"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{named}") as stopped:
            main(arguments)
        assert "\n" not in str(stopped.value)
