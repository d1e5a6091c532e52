"""Images named by a list: root/<split>.csv with the columns path and label."""

from __future__ import annotations

import csv
import pathlib

from adder_flax.data._collection import (
    classes_of,
    numbered,
    reference_split,
    register_collection,
)
from adder_flax.data._folder import FolderRecords
from adder_flax.data._source import DataError
from adder_flax.text import printable


class ImageList:
    """The lists of a folder. Paths begin at that folder, unless they are absolute.

    Args:
        root: the folder that holds them.

    Raises:
        DataError: there are none, or they lack a column.
    """

    def __init__(self, root: str | pathlib.Path):
        self._root = pathlib.Path(root)
        self.splits = tuple(sorted(path.stem for path in self._root.glob("*.csv")))
        if not self.splits:
            raise DataError(
                f"Expected {printable(root)}/<split>.csv with the columns path and label, got no "
                "such file. Write train.csv and val.csv."
            )
        self._reference = reference_split(self.splits)
        self.label_names = classes_of(label for _, label in self._rows(self._reference))

    def records(self, split: str) -> FolderRecords:
        """The images of a split, in the order of its list.

        Raises:
            DataError: no row, or a label that training lacks.
        """
        rows = self._rows(split)
        labels = numbered(
            (label for _, label in rows), self.label_names, f"{split}.csv", self._reference
        )
        paths = (str(self._root / path) for path, _ in rows)
        return FolderRecords(list(zip(paths, labels, strict=True)))

    def _rows(self, split: str) -> list[tuple[str, str]]:
        path = self._root / f"{split}.csv"
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            if not {"path", "label"} <= set(columns):
                raise DataError(
                    f"Expected the columns path and label in {printable(path)}, got "
                    f"{list(columns)[:10]}. Name them in its first line."
                )
            rows = [(row["path"], row["label"]) for row in reader]
        if bad := next((n for n, row in enumerate(rows, 2) if not all(row)), None):
            raise DataError(
                f"Expected a path and a label in each row of {printable(path)}, got none in line "
                f"{bad}. Correct it."
            )
        if not rows:
            raise DataError(f"Expected rows in {printable(path)}, got none. Add images.")
        return rows


register_collection("image_list", ImageList, "folder of <split>.csv")
