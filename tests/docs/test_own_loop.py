"""docs/own_loop.md: the script on two ranks equals transformers' eager attention in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kernels.mask_spec import MaskSpec  # noqa: E402
from models.hf.sharded_attention import attend_sharded, mask_spec  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
(SCRIPT,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_loop.md").read_text(), re.S)


def one_process() -> list[float]:
    """The losses of the script's batches with eager attention, each document a row of its own."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for lengths in [[40, 9, 1, 14], [20, 20, 24], [64], [5] * 12 + [4]]:
        tokens = torch.randint(64, (sum(lengths),))
        count, total = sum(lengths) - len(lengths), torch.zeros(())
        for ids in tokens.split(lengths):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / count
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


def test_script_on_two_ranks_equals_one_process(tmp_path: Path):
    assert len([line for line in SCRIPT.splitlines() if line.strip()]) <= 42
    script = tmp_path / "own_loop.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line) for line in done.stdout.split()]
    expected = one_process()
    assert len(losses) == 4 and losses[-1] < 4.4  # of log(64) = 4.16, noise
    assert losses == pytest.approx(expected, abs=1e-5)


def test_what_a_plan_cannot_honour_is_refused():
    q = torch.zeros(1, 4, 6, 8)
    calls: list[MaskSpec] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskSpec, **_: object) -> torch.Tensor:
        calls.append(mask)
        return q

    def call(mask: object = None, rows: int = 1, **more: object) -> None:
        x = q.expand(rows, -1, -1, -1)
        attend_sharded(torch.nn.Identity(), x, x, x, mask, attention=attention, **more)  # pyright: ignore[reportArgumentType]

    call(MaskSpec())
    call(MaskSpec(window=3), sliding_window=3)
    assert calls == [MaskSpec(), MaskSpec(window=3)]
    for sentence, refused in {
        "no attention dropout": {"dropout": 0.1},
        "give one packed row": {"rows": 2},
        "takes no head_mask": {"head_mask": q},
        "its layer says": {"mask": MaskSpec(window=3)},
        "output_attentions": {"output_attentions": True},
    }.items():
        with pytest.raises(ValueError, match=sentence):
            call(**refused)
    with pytest.raises(ValueError, match="hides tokens"):
        mask_spec(None, torch.tensor([[1, 0]]))
    with pytest.raises(ValueError, match="neither causal"):
        mask_spec(lambda *_: True)
    masking = transformers.masking_utils
    assert mask_spec(masking.sliding_window_causal_mask_function(4)) == MaskSpec(window=4)
