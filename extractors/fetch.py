"""Files named by URL: fetched once into the user's cache folder, then the local copy is used."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from extractors.errors import WeightsError


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/scenecache`, or `~/.cache/scenecache`: what is there can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "scenecache"


def fetched(url: str) -> Path:
    """Local copy of a file; a later call gives the same one without looking at the URL again.

    Copies are in `weights` of the cache folder: remove one to have it fetched anew.

    Args:
        url: http, https or file, or what fsspec and its packages open (s3, gs ...).

    Raises:
        WeightsError: it can't be fetched whole.
    """
    folder = cache_folder() / "weights"
    name = re.sub(r"[^\w.-]", "_", url.partition("?")[0].rpartition("/")[2])[-100:]
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{name}"
    if path.is_file():
        return path
    part = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _opened(url) as remote, tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            part = file.name
            shutil.copyfileobj(remote, file, 1 << 20)
            if left := getattr(remote, "length", None):
                raise OSError(f"the transfer ended {left} bytes too early")
        os.replace(part, path)
    except Exception as error:  # packages that open URLs raise what they like
        hint = "" if isinstance(error, OSError) else ", or install what opens such URLs"
        raise WeightsError(f"{url} can't be fetched ({error}): download the file and give its path{hint}") from error
    finally:
        if part:
            with suppress(FileNotFoundError):
                os.unlink(part)
    return path


def _opened(url: str) -> IO[bytes]:
    if re.match(r"(https?|file)://", url):
        import urllib.request

        return cast(IO[bytes], urllib.request.urlopen(url, timeout=60))
    import fsspec

    opened: Any = fsspec.open(url, "rb").open()
    return cast(IO[bytes], opened)
