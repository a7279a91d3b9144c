"""A plan as a table to read and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.plan import Plan, PlanLine, StagePlan
from pipelines.progress import span

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {"reuse": "green", "compute": "yellow", "maybe": "cyan", "skip": "red"}
_MEANING = "maybe: an upstream runs; where its record comes out as before, the stored one is reused"


def as_table(plan: Plan, store: str) -> Table:
    """One line per stage, action and reason, and what there is to do in all."""
    from rich.table import Table

    lines = plan.lines()
    actions = {line.action for line in lines}
    notes = [_MEANING] if "maybe" in actions else []
    if untrained := [stage.name for stage in plan.stages if _untrained(stage)]:
        notes.append(f"weights without training: {', '.join(untrained)}")
    if kept := [f"{stage.name} {stage.kept:,}" for stage in plan.stages if stage.kept]:
        notes.append(f"kept in the store, not in this job's source: {', '.join(kept)}")
    if lost := [stage.name for stage in plan.stages if stage.recipe_lost]:
        notes.append(f"recipe gone from the store, written again by a run: {', '.join(lost)}")
    table = Table(
        title=f"{plan.job} -> {store}", title_justify="left", caption="\n".join(notes), caption_justify="left"
    )
    for name in ("stage", "action", "reason"):
        table.add_column(name, overflow="fold")
    for name in ("items", "size", "work"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for line in lines:
        if last and line.stage != last:
            table.add_section()
        guess = "" if line.action == "reuse" else "~"
        work = "" if line.action in ("reuse", "skip") else "?" if line.seconds is None else _about(line.seconds)
        table.add_row(
            "" if line.stage == last else line.stage,
            f"[{_STYLES[line.action]}]{line.action}[/]",
            _escaped(line.reason),
            f"{line.items:,}",
            "" if line.action == "skip" else "?" if line.bytes is None else guess + size(line.bytes),
            work,
        )
        last = line.stage
    table.add_section()
    table.add_row("all", "", totals_text(lines), f"{sum(line.items for line in lines):,}", "", "")
    return table


def items_table(plan: Plan) -> Table:
    """One line per stage and item."""
    from rich.table import Table

    table = Table()
    for name in ("stage", "item", "action", "reason"):
        table.add_column(name, overflow="fold")
    for stage in plan.stages:
        for row in stage.table.select(["item", "action", "reason"]).to_pylist():
            action = f"[{_STYLES[row['action']]}]{row['action']}[/]"
            table.add_row(stage.name, _escaped(row["item"]), action, _escaped(row["reason"]))
    return table


def to_json(plan: Plan, every: bool = False) -> dict[str, Any]:
    """Plain JSON types; sizes in bytes, work in seconds of one worker, null where nothing is known of the past."""
    lines = plan.lines()
    stages = []
    for stage in plan.stages:
        part: dict[str, Any] = {
            "stage": stage.name,
            "recipe": stage.recipe_id,
            "untrained": _untrained(stage),
            "kept": stage.kept,
            "recipe_lost": stage.recipe_lost,
            "lines": [
                {"action": n.action, "reason": n.reason, "items": n.items, "bytes": n.bytes, "seconds": n.seconds}
                for n in lines
                if n.stage == stage.name
            ],
        }
        if every:
            part["items"] = stage.table.select(["item", "action", "reason"]).to_pylist()
        stages.append(part)
    totals = {action: sum(n.items for n in lines if n.action == action) for action in _STYLES}
    return {"job": plan.job, "totals": totals, "stages": stages}


def totals_text(lines: list[PlanLine]) -> str:
    """`12 reuse, 3 compute; ~4 min 5 s of work of one worker`."""
    counts = {action: sum(line.items for line in lines if line.action == action) for action in _STYLES}
    text = ", ".join(f"{count:,} {action}" for action, count in counts.items() if count) or "nothing"
    todo = [line.seconds for line in lines if line.action in ("compute", "maybe")]
    if todo and None not in todo:
        text += f"; {_about(sum(seconds or 0 for seconds in todo))} of work of one worker"
    return text


def size(count: float) -> str:
    """`1.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _about(seconds: float) -> str:
    return f"~{span(seconds)}" if seconds >= 1 else "<1 s"


def _untrained(stage: StagePlan) -> bool:
    return any(weight.startswith("untrained:") for weight in stage.recipe["weights"].values())


def console() -> Console:
    """Standard output; wide where it is a file or a pipe, which have no width of their own."""
    import sys

    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
