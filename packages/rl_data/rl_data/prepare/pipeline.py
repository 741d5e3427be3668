"""The three passes of `prepare_data`: read, select, write.

Memory holds one batch of rows, the n-grams of the held-out prompts, and in the second pass about 40 bytes per row.
"""

import shutil
from pathlib import Path

from .card import write_card
from .config import PrepareConfig
from .output import output_folder
from .reading import Reader
from .report import Report
from .selection import select
from .spool import Spool
from .writing import Writer


def prepare_data(config: PrepareConfig, *, command: str = "") -> Report:
    """Write training and validation files and their data card to `config.out`; return what was done.

    The same configuration and files give the same bytes. Which rows are kept does not depend on their order.

    Args:
        command: how the data card says to repeat this.

    Raises:
        DataError: a file, or without `skip_bad` a row, cannot be used; no row is left for training or validation;
            `config.out` exists.
        ModelFolderError: no tokenizer in `config.tokenizer`.
    """
    with output_folder(Path(config.out), overwrite=config.overwrite) as folder:
        spooled = folder / "spool"
        spooled.mkdir()
        reader = Reader(config, Spool(spooled))
        inputs = [reader.read(file) for file in config.files]
        reader.finish()
        selection = select(reader.spool, config, reader.bands)
        report = Writer(config, reader, selection, folder).write(command, inputs)
        shutil.rmtree(spooled)
        write_card(report, folder)
    return report
