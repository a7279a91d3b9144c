"""A file with sound and no picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_sound(path: Path) -> None:
    """A moment of silence."""
    import av

    with av.open(str(path), "w") as output:
        sound = output.add_stream("aac", rate=16000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 16000
        output.mux(sound.encode(silence))
        output.mux(sound.encode(None))
