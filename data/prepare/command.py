"""Tokenise a corpus once, into memory-mapped shards that data=tokens reads.

python -m data.prepare --source stdlib --tokenizer byte --out tokens/stdlib
python -m data.prepare --source files --paths 'corpus/*.parquet' 'more/*.jsonl' --tokenizer tokenizer.json --out DIR
python -m data.prepare --source hub --path FOLDER_OR_NAME --split train --tokenizer cl100k_base.tiktoken --out DIR
python train.py data=tokens data.path=DIR

Killed at any moment, the same command goes on after the last whole shard, and the manifest comes out the same, byte for
byte, whatever the number of workers. Documents keep their names, so that the same ones are held out for evaluation.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from data.config import SourceConfig
from data.prepare.shard_writer import ShardWriter, held_folder, write_whole
from data.prepare.units import Unit, listing_hash, stamp, units
from data.prepare.workers import TokenizerCall, coded_units
from data.sources.kinds import SOURCES
from data.sources.manifest import INPUT_FILE, MANIFEST_FILE, PROGRESS_FILE, VERSION, Manifest, ShardFile, read_manifest
from data.sources.records import Records
from data.tokenizers.table import load_tokenizer
from data.tokenizers.tokenizer import Tokenizer


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description="Tokenise a corpus once.")
    prepared = {name: kind.what for name, kind in SOURCES.items() if kind.prepared}
    listed = "; ".join(f"{name}: {what}" for name, what in prepared.items())
    parser.add_argument("--source", choices=prepared, required=True, help=listed)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write, absent, empty or begun before")
    parser.add_argument("--tokenizer", required=True, help="byte, a tokenizer.json, or a tiktoken rank file")
    parser.add_argument("--tokenizer-pattern", help="for a rank file: gpt2, cl100k, o200k, llama3, qwen")
    parser.add_argument("--bos-token", help="the token that begins a document, where it is not known")
    parser.add_argument("--eos-token", help="the token that ends a document, where it is not known")
    parser.add_argument("--paths", nargs="+", default=[], help="for files: globs of text, .jsonl and .parquet")
    parser.add_argument("--path", help="for hub: a data set's name, or a folder")
    parser.add_argument("--name", help="for hub: the data set's configuration")
    parser.add_argument("--split", default="train", help="for hub: the split")
    parser.add_argument("--text-key", default="text", help="the key or column that holds a document's text")
    parser.add_argument("--prompt-key", help="the key of text before it that is read and not predicted")
    parser.add_argument("--messages-key", help="the key of a chat, [{role, content}], whose assistant is trained")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=1 << 28, help="tokens of a shard (default: %(default)s)")
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace, console: Console) -> Manifest:
    """Write `options.out`, or what is missing of it.

    Raises:
        ValueError: options, a document or a folder that cannot be used, in one sentence.
    """
    for key in ("workers", "shard_tokens"):
        if getattr(options, key) < 1:
            raise ValueError(f"--{key.replace('_', '-')} {getattr(options, key)}; give at least 1")
    config = SourceConfig(
        options.source, options.paths, options.path, options.name, options.split, text_key=options.text_key,
        prompt_key=options.prompt_key, messages_key=options.messages_key,
    )  # fmt: skip
    config.check_source("--")
    if options.source == "hub" and Path(options.path).expanduser().resolve() in options.out.resolve().parents:
        raise ValueError(f"--out {options.out} lies in --path {options.path}, which would read it; give one outside")
    call = (options.tokenizer, options.tokenizer_pattern, options.bos_token, options.eos_token)
    tokenizer = load_tokenizer(*call)
    with held_folder(options.out):
        return _prepare_held(options, config, tokenizer, call, console)


def _request(
    options: argparse.Namespace, config: SourceConfig, tokenizer: Tokenizer, stamps: list[list[Any]]
) -> dict[str, Any]:
    """What is prepared and how: the part of it that decides the manifest."""
    keys = [key for key in SOURCES[config.source].keys if key in vars(options)]
    keys = [key for key in keys if key not in ("prompt_key", "messages_key") or getattr(config, key) is not None]
    listing = {"listing_sha256": listing_hash(stamps)} if stamps else {}
    return {
        "version": VERSION,
        "source": {"source": config.source, **{key: getattr(config, key) for key in keys}, **listing},
        "tokenizer": tokenizer.identity,
        "shard_tokens": options.shard_tokens,
    }


def _prepare_held(
    options: argparse.Namespace, config: SourceConfig, tokenizer: Tokenizer, call: TokenizerCall, console: Console
) -> Manifest:
    folder, stamps = options.out, stamp(config)
    request = _request(options, config, tokenizer, stamps)
    if (folder / MANIFEST_FILE).exists():
        return _finished(folder, request, stamps, console)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    records = Records.of(config, tokenizer, tokenizer.vocab_size)
    begun = {**request, "input": stamps}
    writer = ShardWriter(folder, begun, dtype, options.shard_tokens, config.source, records.marks)
    began = time.monotonic()
    copy = _copy_tokenizer(folder, tokenizer)
    try:
        # a hub's units do not know what they take of its files
        total = sum(size for _, size, _ in stamps) if config.source != "hub" else None
        size = _write_all(writer, config, records, options.workers, call, total, console)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    if (changed := _changed(stamps, stamp(config))) is not None:
        raise ValueError(f"{changed} has changed while it was prepared; run again with another --out, and a copy of it")
    if not writer.shards:
        raise ValueError(f"--source {config.source}: there is no document to prepare")
    # how to load the copy, whose name no longer tells the pattern
    settings = {"pattern": tokenizer.identity.get("pattern"), "bos_token": call[2], "eos_token": call[3]}
    manifest = Manifest(
        folder, tokenizer.identity, copy, settings, tokenizer.vocab_size, dtype,
        writer.from_text, request["source"], options.shard_tokens, tuple(writer.shards),
    )  # fmt: skip
    write_whole(folder / INPUT_FILE, json.dumps(stamps).encode())
    writer.seal(manifest.to_json())
    seconds = time.monotonic() - began
    console.print(
        f"{folder}: {manifest.documents:,} documents, {manifest.tokens:,} tokens in {len(manifest.shards)} shards; "
        f"{size / 1e6:,.1f} MB read in {seconds:,.1f} s",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    return manifest


def _changed(before: list[list[Any]], after: list[list[Any]]) -> str | None:
    """The first input file that is not as it was."""
    rest = {name: marks for name, *marks in after}
    gone = next((name for name, *marks in before if rest.pop(name, None) != marks), None)
    return gone if gone is not None else next(iter(rest), None)


def _finished(folder: Path, request: dict[str, Any], stamps: list[list[Any]], console: Console) -> Manifest:
    """A folder that is complete already, if it is this request's of the same input."""
    manifest = read_manifest(folder)
    known = {
        "version": VERSION, "source": manifest.source, "tokenizer": manifest.tokenizer,
        "shard_tokens": manifest.shard_tokens,
    }  # fmt: skip
    differing = [key for key in known if known[key] != request[key]]
    if differing:
        key = differing[0]
        raise ValueError(
            f"{folder} holds tokens prepared with another {key} ({known[key]}; now {request[key]}); give another --out"
        )
    (folder / PROGRESS_FILE).unlink(missing_ok=True)  # killed between the two
    read = folder / INPUT_FILE
    then = json.loads(read.read_bytes()) if read.exists() else stamps  # it may not have been carried along
    changed = [name for (name, *_), before, now in zip(stamps, then, stamps) if before != now]
    if changed:
        raise ValueError(
            f"{changed[0]} has changed since {folder} was prepared ({len(changed)} files have another time); give "
            f"another --out or, if their text is the same, delete {read}"
        )
    manifest.verify(hashes=False)
    console.print(f"{folder}: complete already, {manifest.tokens:,} tokens", highlight=False, markup=False)
    return manifest


def _copy_tokenizer(folder: Path, tokenizer: Tokenizer) -> ShardFile | None:
    """The tokenizer's file, copied beside the shards, so that they can be read without it."""
    path: Path | None = getattr(tokenizer, "path", None)
    if path is None:
        return None
    return write_whole(folder / f"tokenizer{'.json' if path.suffix == '.json' else '.tiktoken'}", path.read_bytes())


def _write_all(
    writer: ShardWriter,
    config: SourceConfig,
    records: Records,
    workers: int,
    call: TokenizerCall,
    total: int | None,
    console: Console,
) -> int:
    """Write every document that no whole shard holds; gives the bytes of input, of which `total` are expected."""
    columns = (TextColumn("{task.fields[written]:,} documents"), BarColumn(), TimeRemainingColumn())
    done = size = seen = 0
    skip = writer.documents
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=total, written=skip)

        def left() -> Iterator[Unit]:
            nonlocal done, size, seen
            for unit in units(config, records):
                size += unit.size
                seen += len(unit.names)
                if seen <= skip:
                    done = seen
                    progress.advance(task, unit.size)
                else:
                    yield unit

        for unit, coded in coded_units(left(), workers, call, records.tokenizer.vocab_size, config):
            writer.add(coded.after(max(0, skip - done)))
            done += len(unit.names)
            progress.update(task, advance=unit.size, written=max(done, skip))
    return size


def main() -> None:
    """The command line; a failure is one sentence."""
    options = parse()
    try:
        prepare(options, Console())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on after the last whole shard", file=sys.stderr)
        sys.exit(130)
