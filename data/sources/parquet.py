"""Documents in parquet files: a text or a tokens column, a prompt's beside it or a chat's, one document a row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from data.sources.records import Records

_BATCH = 256  # rows decoded at a time while a file is read in order
_STRING_TYPES = ("string", "large_string", "string_view")


class ParquetRows:
    """The documents' columns of one file.

    In order, memory is that of a batch of rows; in any order, of row groups decoded whole, which the caller keeps:
    files with row groups of gigabytes are better prepared (`python -m data.prepare`).

    Raises:
        ValueError: a file that is no parquet, or one without the column; the sentence names the columns there are.
    """

    def __init__(self, path: str, name: str, records: Records) -> None:
        from pyarrow import parquet  # only where it is chosen

        try:
            self._file: Any = parquet.ParquetFile(path)
        except Exception as error:  # pyarrow's own classes
            raise ValueError(f"{name} is no parquet file ({str(error).splitlines()[0]})") from None
        schema = self._file.schema_arrow
        self._name = name
        self.columns = records.columns(list(schema.names), name)
        for column in self.columns:
            if "." in column:
                raise ValueError(f"{name}: column {column!r} has a dot, which parquet reads as a path; rename it")
            kind = str(schema.field(column).type)
            if column in (records.text_key, records.prompt_key) and kind not in _STRING_TYPES:
                raise ValueError(f"{name}: column {column!r} holds {kind}, expected text; set data.text_key")
        self.rows = self._file.metadata.num_rows

    def records(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(row group, row in it, {column: value}) of every row, in order."""
        for group in range(self._file.num_row_groups):
            row = 0
            for batch in self._batches(group):
                for values in zip(*batch.columns):
                    yield group, row, self._record(values)
                    row += 1

    def group(self, group: int) -> tuple[Any, int]:
        """A row group decoded whole, and its bytes."""
        with self._reading():
            columns = self._file.read_row_group(group, columns=self.columns).columns
        return columns, sum(column.nbytes for column in columns)

    def record(self, rows: Any, row: int) -> dict[str, Any]:
        """A row of what `group` gave, as {column: value}."""
        return self._record([column[row] for column in rows])

    def _batches(self, group: int) -> Iterator[Any]:
        batches = self._file.iter_batches(batch_size=_BATCH, row_groups=[group], columns=self.columns)
        while True:
            with self._reading():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A page that cannot be decoded is an error of one sentence that names the file."""
        try:
            yield
        except Exception as error:  # pyarrow's own classes
            raise ValueError(f"{self._name} is damaged ({str(error).splitlines()[0]})") from None

    def _record(self, values: Sequence[Any]) -> dict[str, Any]:
        return {column: self._plain(value) for column, value in zip(self.columns, values, strict=True)}

    def _plain(self, value: Any) -> Any:
        """Text as str; a list of integers as an array, without an object for each."""
        values = getattr(value, "values", None)  # of a list
        if values is None or values.null_count or values.type.num_fields:  # a chat's messages have fields
            return value.as_py()
        array = values.to_numpy(zero_copy_only=False)
        return array if isinstance(array, np.ndarray) and array.dtype.kind in "iu" else value.as_py()

    def close(self) -> None:
        self._file.close()
