"""A manifest in memory, for tests of the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from storage.files import FileInfo
from storage.fingerprint import recipe_id
from storage.manifest import ROW_SCHEMA, Row


@dataclass
class MemoryHistory:
    """Rows in the order of their commits, and the sizes of the shards that exist."""

    committed: list[Row] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> MemoryHistory:
        return self

    def files(self, stage: str) -> dict[str, FileInfo]:
        return {name: FileInfo(size, 0.0) for name, size in self.sizes.items() if name.startswith(f"{stage}/")}

    def save_recipe(self, recipe: dict[str, Any]) -> str:
        self.recipes[recipe_id(recipe)] = recipe
        return recipe_id(recipe)

    def find_recipe(self, id: str) -> dict[str, Any] | None:
        return self.recipes.get(id)

    def of(self, stage: str, item: str) -> list[Row]:
        """All rows of an item, newest first."""
        return [row for row in reversed(self.committed) if (row.stage, row.item) == (stage, item)]

    def _table(self, rows: list[Row], columns: Iterable[str] | None) -> pa.Table:
        table = pa.Table.from_pylist([asdict(row) for row in rows], ROW_SCHEMA)
        return table if columns is None else table.select(list(columns))

    def rows(self, stage: str, columns: Iterable[str] | None = None, encoded: bool = False) -> pa.Table:
        items = sorted({row.item for row in self.committed if row.stage == stage})
        return self._table([row for item in items for row in self.of(stage, item)], columns)

    def latest(self, stage: str, columns: Iterable[str] | None = None, encoded: bool = False) -> pa.Table:
        items = sorted({row.item for row in self.committed if row.stage == stage})
        return self._table([self.of(stage, item)[0] for item in items], columns)
