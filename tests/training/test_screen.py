"""The command line before Hydra: each mistake is a sentence of ours, and what it says to type passes."""

import re
import shlex

import pytest

from training.screen import is_list, screen_overrides, typed_as

# what is typed -> a pattern of the sentence; where it ends in something to type, that is typed instead and passes
MISTAKES: dict[str, str] = {
    "run.steps 5": r"run\.steps: a key is set with an equals sign; write (run\.steps=5)",
    "data.paths x.jsonl": r"write ('data\.paths=\[x\.jsonl\]')",
    "data=files data.paths=x.jsonl": r"data\.paths is a list; write ('data\.paths=\[x\.jsonl\]')",
    "data=files 'data.paths=\"my file.txt\"'": r"data\.paths is a list; write ('data\.paths=\[\"my file\.txt\"\]')",
    "data=files 'data.paths=[my (old) file.txt]'": r"a hash: ('data\.paths=\[\"my \(old\) file\.txt\"\]')",
    "data=files 'data.paths=[a=b.txt,c d.txt]'": r"a hash: ('data\.paths=\[\"a=b\.txt\",\"c d\.txt\"\]')",
    "data=files data.paths=a.txt,b.txt": r"or write one value: ('data\.paths=\[a\.txt,b\.txt\]')",
    "data=files \"data.paths=[it's.txt]\"": r"a hash: ('data\.paths=.*)$",
    "data=hub 'data.path=my (old) folder'": r"a hash: ('data\.path=\"my \(old\) folder\"')",
    "data=tokens 'data.path=C:\\tokens, old'": r"a sweep; .*one value: ('data\.path=.*)$",
    "run=plan run.lengths=5": r"run\.lengths is a list; write ('run\.lengths=\[5\]')",
    "optim.betas=0.9": r"optim\.betas is a list; write ('optim\.betas=\[0\.9\]')",
    "wandb.tags=mine": r"wandb\.tags is a list; write ('wandb\.tags=\[mine\]')",
    "model.window=64": r"model\.window is a list; write ('model\.window=\[64\]')",
    "run.name=a=b": r"quote one .*: ('run\.name=\"a=b\"')",
    "'run.name=a b,c'": r"one value: ('run\.name=\"a b,c\"')",
    "'run.name=a #1'": r"a hash: ('run\.name=\"a #1\"')",
    "run.seed=1,2": r"run\.seed=1,2: several values are a sweep; add (-m) to run",
    "~strategy.cp_inner": r"set it, as in (strategy\.cp_inner=null)",
    "--run.seed=1": r"write (run\.seed=1)",
    "--nproc 4": r"--nproc is no option .*, as (nproc=4)",
    "-m run.stepz=3": r"run\.stepz: .*did you mean (steps)",
    "-m run.seed=1,2 run.stepz=3": r"run\.stepz: .*did you mean",
    "-m run.seed=1,2 model.heads=2,eight": r"model\.heads: Value 'eight' .*Integer",
    "-m model=tiny,gpt9": r"model/gpt9",
    "-m model.kv_heads=1,2 data.paths=x": r"data\.paths is a list; write ('data\.paths=\[x\]')",
    "--multirun 'run.seed=range(3)' run.stepz=3": r"run\.stepz",
    "model.kv_heads=${nope.x}": r"model\.kv_heads: Interpolation key 'nope\.x' not found",
    "model.kv_heads=${data.source}": r"model\.kv_heads: .*'stdlib'.*Integer",
    "--cfg job --resolve model=hf": r"model=hf takes the model's sizes",
    "--cfg job run.stepz=3": r"run\.stepz",
    "--config-name=other": r"one configuration, conf/config\.yaml; .*as in (model=gpt2)",
    "--config-dir mine": r"one configuration",
    "--bogus": r"--bogus is no option",
    "+run.stepz=3": r"nothing would read it",
    "model=null": r"choose one of",
    "run.steps=(1": r"run\.steps=\(1: the value of run\.steps cannot be read; give one number or name",
}  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence_and_what_it_says_to_type_passes(line: str) -> None:
    arguments = shlex.split(line)
    with pytest.raises(ValueError, match=MISTAKES[line]) as caught:
        screen_overrides(arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence and "hydra" not in sentence.lower()
    hint = re.search(MISTAKES[line], sentence)
    if hint is None or not hint.groups() or "=" not in hint[1] + "=" * (hint[1] == "-m"):
        return
    typed = shlex.split(hint[1].rstrip("."))
    key = typed[0].partition("=")[0]
    rest = [] if key != "-m" else [arguments[-1]]
    group = [word for word in arguments if re.fullmatch(r"(data|run)=\w+", word)]
    screen_overrides([*group, *typed, *rest])


@pytest.mark.parametrize(
    "line",
    [
        "model.kv_heads=${model.heads}", "-m run.seed=1,2,3", "-m 'run.seed=range(3)' model=tiny,gpt2",
        "-m 'data.seq_len=choice(64,128)'", "--cfg job", "-c job --resolve", "--cfg=job", "--info", "--info defaults",
        "--multi run.seed=1,2", "-h", "--help", "model=hf model.path=x 'model.kv_heads=${model.heads}'",
        "hydra.sweep.dir=x", "run=plan nproc=4", "-m 'strategy=glob(*ring)'", "++run.seed=3",
    ],
)  # fmt: skip
def test_what_is_right_passes(line: str) -> None:
    screen_overrides(shlex.split(line))


@pytest.mark.parametrize(
    "name",
    ["a b.txt", "a,b.txt", "a=b", "it's", 'say "x"', "(1)", "#1", "a[1]", "a{1}", "ü.txt", "a:b", "a\\b c", "~/x", "$x",
     "${x}y"],
)  # fmt: skip
@pytest.mark.parametrize("key", ["data.path", "data.paths", "run.name"])
def test_any_text_can_be_typed(key: str, name: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if key == "data.paths" and name in ("a,b.txt",):
        name = '"a,b.txt"'  # of a list, a comma inside an entry is known by its quotes
    (word,) = shlex.split(typed_as(key, name))
    value = OverridesParser.create().parse_override(word).value()
    value = value[0] if isinstance(value, list) else value
    assert getattr(value, "text", str(value)).replace('\\"', '"').replace("\\\\", "\\") == name.strip(
        '"' * (name[0] == '"')
    )


def test_lists_are_known_by_the_schema() -> None:
    assert is_list("data.paths") and is_list("wandb.tags") and is_list("model.window") and is_list("run.lengths")
    assert not any(is_list(key) for key in ("run.steps", "data", "model.heads", "run.nope", "strategy.batch_groups"))
