"""The helper in which extractors with a deadline or a memory cap run: `python -m pipelines.host`.

The first request brings the extractor, `{"extractor": ..., "device": ..., "weights": ...}`; each later one
`{"items": [(item key, inputs), ...]}` is answered with the items' outcomes in order.
"""

from __future__ import annotations

from typing import Any

from extractors.child import serve
from pipelines.extraction import Extraction, Outcome

_extraction: Extraction | None = None


def answer(request: dict[str, Any]) -> list[Outcome] | None:
    """Set the extractor up, or run it over items."""
    global _extraction
    if _extraction is None:
        _extraction = Extraction(request["extractor"], request["device"], request["weights"])
        _extraction.load()
        return None
    batch = [_extraction.prepare(item, inputs) for item, inputs in request["items"]]
    return _extraction.run(batch)


if __name__ == "__main__":
    serve(answer)
