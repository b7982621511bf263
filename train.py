"""Train a decoder on packed documents.

python train.py                                    the default run: the standard library's sources, a tiny model
python train.py model=gpt2 data.seq_len=1024       another preset; `ls conf/*` lists them
python train.py run.steps=50 optim.lr=1e-3         any key of the configuration
python train.py model=hf model.path=DIR data.tokenizer=DIR      go on from a Hugging Face checkpoint
python train.py data=files 'data.paths=[corpus/*.txt]'
python train.py -m run.seed=1,2,3                  a sweep: one run after the other, each in its own folder
python train.py nproc=4 strategy.weights=fully_sharded     four ranks on this machine
torchrun --nproc-per-node 8 train.py               the ranks that torchrun or Slurm starts
python train.py run=plan strategy=usp nproc=8      the schedule: proved, as a table, drawn; no rank starts
python train.py run=explain nproc=8                which strategies would be refused here, and why
python train.py --cfg job                          print the composed configuration and stop
python train.py --help                             every preset and key, with units and meanings
"""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

# nothing here loads torch, so that a mistake in the configuration shows within a second
from training.adopt import adopt_checkpoint
from training.outcome import PeerLost, RankFailed
from training.screen import refuse_added_keys, screen_overrides, typed
from training.show.help import help_text, wants_help
from training.start.launch import group_sweep, launch, refuse_sweep


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> None:
    """Run one composed configuration. A failure in a sweep is raised, for Hydra to report; alone it is one sentence."""
    sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        refuse_added_keys(OmegaConf.to_container(composed))
        adopt_checkpoint(composed)
        config = typed(composed)
        config.validate()
        if sweep:
            group_sweep(config, Path(HydraConfig.get().sweep.dir).name)
        outcome = launch(config)
    except (ValueError, ArithmeticError, OSError, RankFailed, PeerLost) as error:
        if sweep:
            print(f"error: {error}", file=sys.stderr)  # Hydra reports only the first job that failed
            raise
        sys.exit(f"error: {error}")
    if sweep and outcome.stopped_by in ("SIGINT", "SIGTERM"):
        raise KeyboardInterrupt  # ends the sweep, not only the job that was running


def command() -> None:
    """The command line: help, or a look at the overrides and then `main`."""
    if wants_help(sys.argv[1:]):
        print(help_text(__doc__ or ""))
        return
    try:
        if screen_overrides(sys.argv[1:]):
            refuse_sweep()
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    command()
