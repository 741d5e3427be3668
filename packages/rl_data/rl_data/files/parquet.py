"""Parquet files, read one record batch at a time."""

from pathlib import Path

from ..errors import DataError
from .arrow import BATCH_SIZE, ArrowTable, arrow_table
from .table import OnBad, first_line, refuse


def open_parquet(path: Path, file: str, on_bad: OnBad = refuse) -> ArrowTable:
    """The table of a parquet file. Raises DataError if it cannot be read or has no rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{file}: cannot be read as parquet ({first_line(error)}). Copy it again if it is incomplete; the names of "
            "other files end in .jsonl, .json or .csv, or in these and .gz.",
            file=file,
        ) from error
    if parquet.metadata.num_rows == 0:
        raise DataError(f"{file}: the file has no rows. Give a file with at least one.", file=file)
    return arrow_table(
        file,
        parquet.schema_arrow,
        lambda columns: parquet.iter_batches(batch_size=BATCH_SIZE, columns=list(columns)),
        on_bad,
    )
