"""`model=hf`: what a checkpoint gives, what may be set beside it, what is refused before any rank starts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from models.config import ModelConfig
from models.hf.config import read_config
from models.hf.files import open_folder
from tests.checkpoints import save
from training.adopt import FREE, GIVEN, adopt_checkpoint
from training.config import Config, ConfigError, config_hash, to_plain
from training.screen import refuse_added_keys, screen_overrides

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data.seq_len=64", "data.rows=2", "data.eval_rows=2", "run.steps=1", "wandb.mode=disabled"]


def configured(*overrides: str) -> Config:
    """As train.py does it."""
    screen_overrides([*SMALL, *overrides])
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("config", overrides=[*SMALL, *overrides])
    refuse_added_keys(OmegaConf.to_container(composed))
    adopt_checkpoint(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.validate()
    return config


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for family in ("llama31", "qwen2_window", "gpt2"):
        save(family, root / family)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("family", ["llama31", "qwen2_window", "gpt2"])
def test_composed_configuration_is_the_checkpoint_s_and_complete(folders, family):
    config = configured("model=hf", f"model.path={folders[family]}", "model.recompute=true")
    found = read_config(open_folder(folders[family]).config)[1]
    for key in GIVEN:
        assert getattr(config.model, key) == getattr(found, key), key
    assert config.model.recompute and config.model.path == str(folders[family])
    assert "checkpoint:" not in json.dumps(to_plain(config))


def test_hf_yaml_leaves_open_what_a_checkpoint_gives():
    marks = {key: f"${{checkpoint:{key}}}" for key in GIVEN}
    assert OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / "hf.yaml")) == marks
    ours = {"softcap", "recompute", "attention", "compile", "path", "content_hash", "chunk", "first", "prefix"}
    assert GIVEN | ours == set(ModelConfig.__dataclass_fields__)


def test_what_no_tensor_depends_on_can_be_set_even_to_null(folders):
    long = ["model.max_positions=4096", "model.rope_theta=5e6", "model.rope_factor=null"]
    config = configured(
        "model=hf", f"model.path={folders['llama31']}", *long, "model.rope_original_positions=null", "model.window=[16]"
    )
    model = config.model
    assert (model.max_positions, model.rope_theta, model.rope_factor, model.window) == (4096, 5e6, None, [16])
    windows = configured("model=hf", f"model.path={folders['qwen2_window']}")
    assert windows.model.layer_windows() == [None, 7]
    assert configured("model=hf", f"model.path={folders['qwen2_window']}", "model.window=null").model.window is None
    again = configured("model=hf", f"model.path={folders['llama31']}", "model.layers=2")  # as the checkpoint says
    assert again.model.layers == 2


@pytest.mark.parametrize(
    ("family", "override", "named"),
    [
        ("llama31", "model.layers=3", "model.layers=3, not 2"),
        ("llama31", "model.kv_heads=4", "model.kv_heads=4, not 2"),
        ("llama31", "model.tied_embeddings=false", "model.tied_embeddings=False, not True"),
        ("llama31", "model.qk_norm=true", "model.qk_norm=True, not False"),
        ("llama31", "model.sink=true", "model.sink=True"),
        ("llama31", "model.activation=gelu_tanh", "model.activation=gelu_tanh, not silu"),
        ("gpt2", "model.max_positions=512", "model.max_positions=512, not 256"),
        ("llama31", "model=tiny", "use model=hf"),
        ("llama31", "data.seq_len=512", "data.seq_len=512 exceeds model.max_positions=256"),
    ],
)
def test_contradiction_is_refused_with_both_numbers(folders, family, override, named):
    with pytest.raises(ValueError, match=named) as error:
        configured("model=hf", f"model.path={folders[family]}", override)
    assert "\n" not in str(error.value)


def test_bytes_are_not_fed_to_a_checkpoint_with_a_tokenizer(folders, tmp_path):
    shutil.copytree(folders["gpt2"], tmp_path / "start")
    (tmp_path / "start" / "vocab.json").write_text("{}")
    chosen = ["model=hf", f"model.path={tmp_path / 'start'}"]
    with pytest.raises(
        ValueError, match=r"data\.tokenizer=byte feeds ids of bytes to weights .*vocab\.json; set"
    ) as error:
        configured(*chosen)
    assert "\n" not in str(error.value)
    assert configured(*chosen, "data=synthetic").data.tokenizer == "byte"


def test_path_and_hash_belong_to_model_hf(folders):
    with pytest.raises(ValueError, match=r"model\.path=DIR"):
        configured("model=hf")
    with pytest.raises(ValueError, match=r"content_hash=abc belong together"):
        configured("model.content_hash=abc")
    with pytest.raises(ValueError, match=r"nowhere is no folder.*hf download"):
        configured("model=hf", "model.path=nowhere")


def test_config_hash_follows_the_weights_and_not_their_place(folders, tmp_path):
    first = config_hash(configured("model=hf", f"model.path={folders['llama31']}"))
    shutil.copytree(folders["llama31"], tmp_path / "moved")
    assert config_hash(configured("model=hf", f"model.path={tmp_path / 'moved'}")) == first
    save("llama31", tmp_path / "tuned", seed=1)
    assert config_hash(configured("model=hf", f"model.path={tmp_path / 'tuned'}")) != first


def test_reading_a_checkpoint_loads_no_torch(folders):
    code = (
        "import sys, pathlib; import training.adopt; from models.hf.files import open_folder; "
        f"open_folder(pathlib.Path({str(folders['gpt2'])!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_bad_checkpoint_ends_the_command_in_one_sentence_before_any_rank(folders, tmp_path):
    """With nproc=2, so that ranks would start; and no run folder is left behind."""
    bad = tmp_path / "bad"
    shutil.copytree(folders["gpt2"], bad)
    (bad / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, "model=hf", f"model.path={bad}", "nproc=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: config.json: model_type='mamba'") and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.deep
def test_command_with_two_ranks_records_a_complete_configuration(folders, tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, "model=hf", f"model.path={folders['gpt2']}"]
    done = subprocess.run(
        [*command, "nproc=2", "strategy=usp"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    written = json.loads((run / "config.json").read_text())["model"]
    assert (written["layers"], written["positions"], written["path"]) == (2, "learned", str(folders["gpt2"]))
    assert all(written[key] is not None for key in GIVEN - FREE)


def test_an_interpolation_of_ones_own_is_no_mark_of_model_hf(folders):
    config = configured("model.kv_heads=${model.heads}")
    assert config.model.kv_heads == config.model.heads
    found = read_config(open_folder(folders["llama31"]).config)[1]
    path = f"model.path={folders['llama31']}"
    config = configured("model=hf", path, "model.rope_original_positions=${model.max_positions}")
    assert config.model.rope_original_positions == found.max_positions
    with pytest.raises(ConfigError, match=rf"model\.ffn={found.hidden}, not {found.ffn}"):
        configured("model=hf", path, "model.ffn=${model.hidden}")
