"""Train a decoder on packed documents.

python train.py                                    the default run: the standard library's sources, a tiny model
python train.py model=gpt2 data.seq_len=1024       another preset; `ls conf/*` lists them
python train.py run.steps=50 optim.lr=1e-3         any key of the configuration
python train.py data=files 'data.paths=[corpus/*.txt]'
python train.py -m run.seed=1,2,3                  a sweep: one run after the other, each in its own folder
python train.py --cfg job                          print the composed configuration and stop
"""

import sys

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from training.config import Config
from training.launch import launch
from training.loop import Outcome
from training.screen import screen_overrides
from training.step import NonFiniteLoss

ConfigStore.instance().store(name="schema", node=Config)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> None:
    """Run one composed configuration. A failure in a sweep is raised, for Hydra to report; alone it is one sentence."""
    sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        config = OmegaConf.to_object(composed)
        assert isinstance(config, Config)
        outcome = launch(config)
    except (ValueError, NonFiniteLoss, FileNotFoundError) as error:
        if sweep:
            raise
        sys.exit(f"error: {error}")
    _stop_sweep(sweep, outcome)


def _stop_sweep(sweep: bool, outcome: Outcome) -> None:
    # Ctrl-C ends the sweep, not only the job that was running
    if sweep and outcome.stopped_by in ("SIGINT", "SIGTERM"):
        raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        screen_overrides(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    main()
