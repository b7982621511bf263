"""The tokenizers by name, and those that are read from a file."""

from collections.abc import Callable
from pathlib import Path

from data.tokenizers.json_file import JsonTokenizer
from data.tokenizers.rank_file import RankTokenizer
from data.tokenizers.tokenizer import ByteTokenizer, Tokenizer

TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte": ByteTokenizer}


def load_tokenizer(
    name: str, pattern: str | None = None, bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """The tokenizer called `name`: one of TOKENIZERS, a `tokenizers` JSON file (or a folder with one), or a rank file.

    Args:
        pattern: how a rank file's text is cut, a name in rank_file.PATTERNS; None: told by the file's name.
        bos_token, eos_token: the tokens that begin and end a document; None: told by the file's special tokens.

    Raises:
        ValueError: no such name or file, a file that is no tokenizer, or a setting that it would ignore.
    """
    set_keys = {"tokenizer_pattern": pattern, "bos_token": bos_token, "eos_token": eos_token}
    for key, value in set_keys.items():
        if value is not None and name in TOKENIZERS:
            raise ValueError(f"data.{key}={value} is set, but data.tokenizer={name} does not read it; leave it out")
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        known = ", ".join(TOKENIZERS)
        raise ValueError(
            f"data.tokenizer={name!r} is unknown: it is no file (looked for {path}); choose one of {known}, or give a "
            "tokenizer.json or a tiktoken rank file"
        )
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(
            f"data.tokenizer={name} cannot be read ({error.strerror or error}); give a file that can"
        ) from None
    if path.suffix == ".json":
        if pattern is not None:
            raise ValueError(
                f"data.tokenizer_pattern={pattern} is set, but {name} brings its own pattern; leave it out, or give a "
                "tiktoken rank file"
            )
        return JsonTokenizer(path, bos_token, eos_token)
    return RankTokenizer(path, pattern, bos_token, eos_token)
