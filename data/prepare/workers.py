"""Worker processes that code units in order, and end with the process that started them, however that ends."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from data.config import SourceConfig
from data.prepare.units import Coded, Unit, encode_unit
from data.sources.records import Records
from data.tokenizers.table import load_tokenizer
from data.tokenizers.tokenizer import Tokenizer

TokenizerCall = tuple[str, str | None, str | None, str | None]  # what data.tokenizer.load_tokenizer is called with


def coded_units(
    units: Iterator[Unit], workers: int, call: TokenizerCall, vocab_size: int, config: SourceConfig
) -> Iterator[tuple[Unit, Coded]]:
    """Each unit and its documents as ids, in the order of `units`, whatever the number of workers; one codes here.

    Raises:
        ValueError: a document that is broken; or a worker that died.
    """
    if workers == 1:
        records = Records.of(config, load_tokenizer(*call), vocab_size)
        for unit in units:
            yield unit, encode_unit(unit, records)
        return
    context = multiprocessing.get_context("spawn")
    connections: list[Connection] = []
    processes = []
    try:
        for _ in range(workers):
            # Only we hold the other end: a worker reads its end of file when we are gone, even killed.
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, call, vocab_size, config), daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        yield from _in_turn(units, connections)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _in_turn(units: Iterator[Unit], connections: list[Connection]) -> Iterator[tuple[Unit, Coded]]:
    """Unit i goes to worker i modulo their number, and comes back before the worker gets another."""
    waiting: list[Unit | None] = [None] * len(connections)
    turn = 0
    for unit in units:
        before = waiting[turn]
        if before is not None:
            yield before, _receive(connections[turn])
        connections[turn].send(unit)
        waiting[turn] = unit
        turn = (turn + 1) % len(connections)
    for _ in connections:
        before = waiting[turn]
        if before is not None:
            yield before, _receive(connections[turn])
        turn = (turn + 1) % len(connections)


def _receive(connection: Connection) -> Coded:
    try:
        answer: Any = connection.recv()
    except (EOFError, ConnectionResetError):
        raise ValueError("a worker died, perhaps for lack of memory; run again with fewer --workers") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _work(connection: Connection, call: TokenizerCall, vocab_size: int, config: SourceConfig) -> None:
    """A worker's life: units in, ids or an error out, until the other end closes."""
    try:
        tokenizer: Tokenizer = load_tokenizer(*call)
        records = Records.of(config, tokenizer, vocab_size)
        while True:
            unit = connection.recv()
            try:
                answer: Any = encode_unit(unit, records)
            except (ValueError, OSError) as error:
                answer = ValueError(str(error))
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return
