"""The loop as its user meets it: exact resumption, honest losses, an orderly end."""

import dataclasses
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

import training.loop as loop
from data.batch import PackedBatch
from data.loader import PackedLoader
from models.attend import local_attend
from models.decoder import Decoder
from training.config import Config, ConfigError, LrSchedule, NonFinite, Precision, Resume
from training.record.checkpoint import complete_checkpoints
from training.record.metrics import read_metrics
from training.share import Share
from training.step import NonFiniteLoss, evaluate, forward_backward, token_losses
from training.team import Team


def run(config: Config) -> tuple[loop.Outcome, str]:
    console = Console(record=True, quiet=False, file=open(os.devnull, "w"), width=200)  # noqa: SIM115
    outcome = loop.train(config, console)
    return outcome, console.export_text()


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = complete_checkpoints(folder / "checkpoints")[-1]
    return load_file(newest / "model.safetensors") | load_file(newest / "optimizer.safetensors")


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in read_metrics(folder / "metrics.jsonl")]


def record_tokens(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    original = loop.forward_backward

    def spy(model, batch: PackedBatch, *rest):
        seen.append(batch.tokens.clone())
        return original(model, batch, *rest)

    monkeypatch.setattr(loop, "forward_backward", spy)
    return seen


def test_twenty_steps_straight_equal_ten_and_ten_bitwise(make_config, tmp_path, monkeypatch):
    """Losses, parameters, optimiser state and token ids, over an epoch's end of a small corpus."""
    seen = record_tokens(monkeypatch)
    straight = make_config(run={"steps": 20, "dir": str(tmp_path / "a")})
    run(straight)
    straight_tokens, seen[:] = list(seen), []
    outcome, text = run(make_config(run={"steps": 20, "stop_at": 10, "dir": str(tmp_path / "b")}))
    assert (outcome.step, outcome.stopped_by) == (10, "stop_at") and "the same command goes on" in text
    outcome, text = run(make_config(run={"steps": 20, "resume": Resume.must, "dir": str(tmp_path / "b")}))
    assert outcome.step == 20 and "resuming after step 10" in text
    assert len(seen) == 20 and all(torch.equal(a, b) for a, b in zip(straight_tokens, seen))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    a, b = parameters(tmp_path / "a"), parameters(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert read_metrics(tmp_path / "b" / "metrics.jsonl")[-1]["data/epoch"] >= 1


def test_an_epoch_is_counted_when_it_was_trained_on(make_config, tmp_path, monkeypatch):
    """The packer looks 256 documents ahead, three passes of this corpus; it takes ten steps to train on one."""
    given: list[dict[int, int]] = []
    original = loop.forward_backward

    def spy(model, batch: PackedBatch, *rest):
        given.append({})
        for d in batch.documents:
            given[-1][d.epoch] = given[-1].get(d.epoch, 0) + d.stop - d.start
        return original(model, batch, *rest)

    monkeypatch.setattr(loop, "forward_backward", spy)
    config = make_config(run={"steps": 24})
    loader = loop.open_loaders(config)[0]
    assert loader.indices is not None and config.data.lookahead > 2 * len(loader.indices)
    size = sum(loader.source.length(int(d)) for d in loader.indices)
    run(config)
    for step, row in enumerate(read_metrics(tmp_path / "run" / "metrics.jsonl"), 1):
        done = [sum(found.get(epoch, 0) for found in given[:step]) == size for epoch in range(9)]
        assert row["data/epoch"] == sum(done), step
    assert row["data/epoch"] >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_saves_and_the_run_goes_on_bitwise(make_config, tmp_path, monkeypatch, number):
    run(make_config(run={"dir": str(tmp_path / "a")}))
    original = loop.forward_backward
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "forward_backward", interrupted)
        outcome, text = run(make_config(run={"dir": str(tmp_path / "b")}))
    assert (outcome.step, outcome.stopped_by) == (3, signal.Signals(number).name)
    assert f"stopped by {signal.Signals(number).name} after step 3 of 6" in text
    run(make_config(run={"dir": str(tmp_path / "b")}))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_handlers_are_given_back(make_config):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(make_config(run={"steps": 2}))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_finished_run_prints_its_table_again_and_trains_no_more(make_config, monkeypatch):
    _, first = run(make_config(run={"steps": 2}))
    monkeypatch.setattr(loop, "forward_backward", pytest.fail)
    _, again = run(make_config(run={"steps": 2}))
    table = first[first.index("  steps") :]
    assert table.splitlines() == again[again.index("  steps") :].splitlines()
    assert "run folder" in table and "tokens/s" in table and "training loss" in table


def test_run_folder_holds_what_the_readme_says(make_config, tmp_path):
    config = make_config(run={"steps": 2})
    run(config)
    folder = tmp_path / "run"
    assert json.loads((folder / "config.json").read_text())["model"]["layers"] == 2
    origin = json.loads((folder / "provenance.json").read_text())[0]
    assert origin["versions"]["torch"] == torch.__version__
    assert len(read_metrics(folder / "metrics.jsonl")) == 2
    assert complete_checkpoints(folder / "checkpoints")[-1].name == "step_00000002"


def test_checkpoint_of_another_model_is_refused_and_untouched(make_config, tmp_path):
    run(make_config(run={"steps": 2}))
    before = parameters(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"another model \(model.layers: 2 there, 3 here\)"):
        run(make_config(run={"steps": 2}, model={"layers": 3}))
    after = parameters(tmp_path / "run")
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_resume_must_needs_a_checkpoint_and_never_sets_the_old_run_aside(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.resume=must"):
        run(make_config(run={"steps": 2, "resume": Resume.must}))
    run(make_config(run={"steps": 2}))
    outcome, _ = run(make_config(run={"steps": 2, "resume": Resume.never}, optim={"lr": 2e-3}))
    assert outcome.step == 2
    assert (tmp_path / "run" / "earlier-1" / "checkpoints" / "step_00000002").is_dir()


def test_two_processes_cannot_share_a_run_folder(make_config):
    from training.record.folder import RunFolder

    with RunFolder(make_config()), pytest.raises(ConfigError, match="another process is training in"):
        run(make_config())


def test_accumulation_gives_the_same_gradient_with_unequal_micro_batches(make_config):
    """Micro-batches with few valid tokens must not weigh as much as full ones."""
    config = make_config(data={"packing": "padded", "seq_len": 64, "rows": 6})
    batch = PackedLoader(config.data, 258, 0).batch(0)
    counts = [m.label_tokens for m in batch.micro_batches(3)]
    assert len(set(counts)) > 1
    grads = {}
    for accumulate in (1, 2, 3, 6):
        model = Decoder(config.model, seed=0, dtype=torch.float64)
        found = forward_backward(model, batch, accumulate, Precision.fp32)
        grads[accumulate] = (found.loss, [p.grad.clone() for p in model.parameters() if p.grad is not None])
    for accumulate in (2, 3, 6):
        assert grads[accumulate][0] == pytest.approx(grads[1][0], rel=1e-12)
        for a, b in zip(grads[1][1], grads[accumulate][1]):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)


def test_packed_row_equals_its_documents_one_by_one(make_config):
    """Loss and every parameter's gradient, fp64: nothing leaks between documents and nothing is lost."""
    config = make_config(data={"seq_len": 64, "rows": 2}, model={"window": [7, None]})
    batch = PackedLoader(config.data, 258, 3).batch(0)
    packed = Decoder(config.model, seed=0, dtype=torch.float64)
    loss = forward_backward(packed, batch, 1, Precision.fp32).loss
    single = Decoder(config.model, seed=0, dtype=torch.float64)
    total = 0.0
    tokens, labels = batch.tokens.flatten(), batch.labels.flatten()
    for start, stop in zip(batch.layout.starts.tolist(), batch.layout.stops.tolist()):
        attend = local_attend([0], [stop - start], stop - start, config.model.layer_masks(), backend="reference")
        one = single.loss(
            tokens[start:stop], torch.arange(stop - start), labels[start:stop], attend, valid_tokens=batch.label_tokens
        )
        one.backward()
        total += one.item()
    assert loss == pytest.approx(total, abs=1e-12)
    for (name, a), b in zip(packed.named_parameters(), single.parameters()):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-12), name


def test_step_without_a_valid_token_survives(make_config):
    """The mean over nothing is NaN in plain cross entropy; here it is zero loss and zero gradient."""
    config = make_config()
    batch = PackedLoader(config.data, 258, 0).batch(0)
    empty = dataclasses.replace(batch, labels=torch.full_like(batch.labels, -100))
    model = Decoder(config.model, seed=0)
    assert forward_backward(model, empty, 2, Precision.fp32).loss == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_evaluation_plans_a_batch_before_it_is_asked_for(make_config, monkeypatch):
    """While one batch is computed, the next one's exchanges are planned; every batch but the first has its turn."""
    config = make_config(data={"eval_rows": 12, "eval_fraction": 0.5})
    loader, seen = PackedLoader(config.data, 258, 0, split="eval"), []
    share = Share(Decoder(config.model, seed=0))
    share_part = share.part
    monkeypatch.setattr(share, "prepare", lambda batch, *_: seen.append(("prepared", batch.documents)))
    monkeypatch.setattr(share, "part", lambda micro, *_: seen.append(("run", micro.documents)) or share_part(micro, *_))
    evaluate(share.model, loader, Precision.fp32, share=share)
    batches = [batch.documents for batch in loader]
    assert len(batches) > 1
    wanted = [("run", batches[0])]
    for documents in batches[1:]:
        wanted[-1:] = [("prepared", documents), wanted[-1], ("run", documents)]
    assert seen == wanted


def test_only_a_first_compiled_step_waits_longer(make_config, monkeypatch):
    """Ranks compile at their own pace: longer than a collective may take."""
    counts, patience = {}, Team.patience
    monkeypatch.setattr(Decoder, "compile_layers", lambda self: None)
    for compiled in (False, True):
        calls = []
        with monkeypatch.context() as patch:
            patch.setattr(Team, "patience", lambda self, calls=calls: calls.append(1) or patience(self))
            run(make_config(model={"compile": compiled}, run={"steps": 3, "resume": Resume.never}))
        counts[compiled] = len(calls)
    assert counts[True] == counts[False] + 1


def test_evaluation_sums_before_it_divides(make_config):
    """Batches of unequal counts: the mean of their means would be another number."""
    config = make_config(data={"packing": "padded", "seq_len": 96, "rows": 1, "eval_rows": 6})
    loader = PackedLoader(config.data, 258, 0, split="eval")
    model = Decoder(config.model, seed=0)
    result = evaluate(model, loader, Precision.fp32)
    batches = list(loader)
    sums = [token_losses(Share(model), b, Precision.fp32).sum().item() for b in batches]
    counts = [b.label_tokens for b in batches]
    assert len(set(counts)) > 1
    assert result.loss == pytest.approx(sum(sums) / sum(counts), rel=1e-6)
    assert result.loss != pytest.approx(sum(s / c for s, c in zip(sums, counts)) / len(sums), rel=1e-5)


def test_bits_per_byte_counts_bytes_only(make_config):
    config = make_config(data={"source": "stdlib", "paths": [], "seq_len": 128, "eval_rows": 4})
    loader = PackedLoader(config.data, 258, 0, split="eval")
    model = Decoder(config.model, seed=0)
    result = evaluate(model, loader, Precision.fp32)
    tokens, size = sum(b.label_tokens for b in loader), sum(b.predicted_bytes for b in loader)
    assert result.bits_per_byte == pytest.approx(result.loss * tokens / math.log(2) / size)


def poison(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    original = loop.forward_backward
    calls = []

    def poisoned(model, batch, *rest):
        calls.append(1)
        if len(calls) == at:
            with torch.no_grad():
                keep = model.embed_tokens.weight.clone()
                model.embed_tokens.weight[batch.tokens[0, 0]] = float("nan")
            found = original(model, batch, *rest)
            with torch.no_grad():
                model.embed_tokens.weight.copy_(keep)
            return found
        return original(model, batch, *rest)

    monkeypatch.setattr(loop, "forward_backward", poisoned)


def test_loss_that_is_not_finite_stops_and_names_step_and_documents(make_config, monkeypatch, tmp_path):
    poison(monkeypatch, at=3)
    config = make_config(run={"save_every": 1})
    name = PackedLoader(config.data, 258, 0).batch(2).documents[0].name
    with pytest.raises(NonFiniteLoss, match="step 3: loss nan is not finite; documents:") as error:
        run(config)
    assert name in str(error.value)
    assert [p.name for p in complete_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step_00000001",
        "step_00000002",
    ]
    assert all(torch.isfinite(t).all() for t in parameters(tmp_path / "run").values())


def test_loss_that_is_not_finite_is_skipped_and_counted_by_config(make_config, monkeypatch, tmp_path):
    poison(monkeypatch, at=3)
    outcome, text = run(make_config(run={"nonfinite": NonFinite.skip}))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert outcome.step == 6 and rows[2]["train/loss"] is None
    assert [r["train/skipped_steps"] for r in rows] == [0, 0, 1, 1, 1, 1]
    assert "skipped" in text and all(torch.isfinite(t).all() for t in parameters(tmp_path / "run").values())


OPTIONS = {
    "stream": {"data": {"packing": "stream"}},
    "padded": {"data": {"packing": "padded"}},
    "recompute": {"model": {"recompute": True}},
    "bf16": {"run": {"precision": Precision.bf16}},
    "accumulate": {"run": {"accumulate": 4}},
    "synthetic": {"data": {"source": "synthetic", "paths": []}},
    "no evaluation": {"data": {"eval_fraction": 0.0}},
    "no clipping, wsd": {"optim": {"clip_norm": None, "schedule": LrSchedule.wsd, "decay_steps": 3}},
    "everything on": {
        "model": {"window": [9, None], "softcap": 20.0, "sink": True, "qk_norm": True, "recompute": True},
        "run": {"accumulate": 2, "precision": Precision.bf16},
    },
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_train_and_lower_the_loss(make_config, changes, tmp_path):
    changes = {**changes, "run": {**changes.get("run", {}), "steps": 15}}
    run(make_config(**changes))
    found = losses(tmp_path / "run")
    assert sum(found[-3:]) < sum(found[:3])


def test_evaluations_come_when_asked(make_config, tmp_path):
    run(make_config(run={"eval_every": 2}))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/loss" in row] == [2, 4, 6]


def test_cut_documents_are_counted(make_config, tmp_path):
    """A document of three rows is cut twice."""
    path = tmp_path / "long.txt"
    path.write_text("a" * 250)
    batch = PackedLoader(make_config(data={"paths": [str(path)], "eval_fraction": 0.0, "rows": 3}).data, 258, 0).batch(
        0
    )
    assert batch.num_documents == 3 and batch.cut_documents == 2


def test_damaged_checkpoints_are_set_aside_with_a_word(make_config, tmp_path):
    run(make_config(run={"stop_at": 3}))
    marker = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "COMPLETE"
    marker.write_text("[]")
    outcome, text = run(make_config())
    assert outcome.step == 6 and "no complete checkpoint" in text
    assert len(read_metrics(tmp_path / "run" / "earlier-1" / "metrics.jsonl")) == 3


def test_flipped_byte_falls_back_to_the_checkpoint_before(make_config, tmp_path):
    run(make_config(run={"stop_at": 4, "save_every": 2}))
    newest = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    outcome, text = run(make_config())
    assert outcome.step == 6 and "is damaged" in text and "resuming after step 2" in text


def test_second_signal_interrupts_at_once(make_config, monkeypatch):
    def twice(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "forward_backward", twice)
    with pytest.raises(KeyboardInterrupt):
        run(make_config())


def test_advice_to_skip_can_be_followed_in_the_same_folder(make_config, tmp_path):
    """run.nonfinite does not change what a finite step computes, so it may change between invocations."""
    run(make_config(run={"stop_at": 2}))
    outcome, _ = run(make_config(run={"nonfinite": NonFinite.skip}))
    assert outcome.step == 6


def test_stop_before_the_checkpoint_is_refused(make_config):
    run(make_config(run={"stop_at": 4}))
    with pytest.raises(ConfigError, match=r"run\.stop_at=2 lies before the checkpoint's step 4"):
        run(make_config(run={"stop_at": 2}))
