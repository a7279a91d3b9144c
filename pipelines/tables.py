"""Build the rows of a bulk table in the driver's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipelines.extraction import Failure
from pipelines.plan import row_digest
from pipelines.stage import Table
from pipelines.worker import Work, failed_row, new_row
from storage.manifest import Row
from storage.reader import open as open_store
from storage.writer import ShardWriter


def build_table(table: Table, url: str, recipe: str, works: Sequence[Work], run: str) -> Iterator[list[Row]]:
    """Write records of a table and give their rows, shard by shard; last those of items it gave nothing for.

    Args:
        table: the table; it reads the parents' records as they are committed in the store.
        url: the store.
        recipe: recipe id.
        works: the items to make.
        run: id of the run, for the rows.

    Raises:
        CacheError: the store can't be written, or a record does not fit the table's schema.
    """
    planned = {work.item: work for work in works}
    now = {item: row_digest(digest) for item, digest, _ in table.items() if item in planned}
    left = {
        item: work if now.get(item) == work.inputs else replace(work, fingerprint=bytes(16), inputs=bytes(16))
        for item, work in planned.items()
    }  # a row that has changed since the plan stands under no fingerprint
    writer = ShardWriter(url, table.name, table.schema)
    for item, record in table.build(set(left), _parents(table, url)):
        writer.add(new_row(table.name, recipe, run, left.pop(item)), record)
        if rows := writer.written():
            yield rows
    yield writer.flush()
    cause = Failure("NoRow", f"{table.name} gave no row for it")
    yield [failed_row(new_row(table.name, recipe, run, work), cause) for work in left.values()]


def _parents(table: Table, url: str) -> Mapping[str, Any]:
    if not table.of:
        return {}
    cache = open_store(url)
    return cache[table.of] if table.of in cache.stages else {}
