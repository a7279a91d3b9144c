"""Reading: by random key, and a shuffled epoch of padded batches, against memmap, npz and other loaders.

By key: records of 80 objects x 512 float16. Every reader knows its keys through a dict, and every read ends in an
array that owns its memory. Epoch: the same objects, 20 to 80 a record; 2 workers that stay alive, batches of 64
padded to the longest record, each peer with its own loader where it has one and the same padding code.

Every peer is local, uncompressed and in the page cache, with its own default shard size; where its settings matter,
the fastest documented one was taken (see each peer). Peers come with `pip install -e '.[bench]'`; one that is not
installed is reported as missing. A peer that is faster by hand-written unpacking is reported in the figures.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import numpy as np

DIM, OBJECTS, BATCH, WORKERS = 512, 80, 64, 2
NPZ_FILES = 500  # each is read on its own, so their number changes nothing but the time to write them
Read = Callable[[int], np.ndarray]


class Npz:
    """One .npz a record with an object array of dicts, as NuScenes-QA ships its features; np.load by file name."""

    def __init__(self, folder: Path, records: list[np.ndarray]) -> None:
        self.folder = folder
        for i, record in enumerate(records[:NPZ_FILES]):
            rows = [{"feats": feats, "box": np.zeros(9, np.float32), "label": 0} for feats in record]
            np.savez(folder / f"scene{i:06}.npz", results=np.array(rows, object))

    def reader(self) -> Read:
        def read(i: int) -> np.ndarray:
            with np.load(self.folder / f"scene{i:06}.npz", allow_pickle=True) as file:
                return np.stack([row["feats"] for row in file["results"]])

        return read


class Memmap:
    """One raw array, with a dict from key to row."""

    def __init__(self, folder: Path, records: list[np.ndarray]) -> None:
        raw = np.memmap(folder / "raw", np.float16, "w+", shape=(len(records), OBJECTS, DIM))
        for i, record in enumerate(records):
            raw[i] = record
        raw.flush()
        self.data = np.memmap(folder / "raw", np.float16, "r", shape=raw.shape)
        self.keys = [f"scene{i:06}" for i in range(len(records))]
        self.row = {key: i for i, key in enumerate(self.keys)}

    def reader(self) -> Read:
        data, keys, row = self.data, self.keys, self.row
        return lambda i: np.array(data[row[keys[i]]])


class Ours:
    def __init__(self, folder: Path, records: list[np.ndarray]) -> None:
        import storage
        from storage.manifest import Manifest, Row
        from storage.schema import Column, Schema
        from storage.writer import ShardWriter

        schema = Schema({"feature": Column((DIM,), "float16")}, element="object")
        writer = ShardWriter(folder, "objects", schema)
        for i, record in enumerate(records):
            writer.add(Row("objects", f"scene{i:06}", b"benchmark", b"", "benchmark", "ok"), {"feature": record})
        Manifest(folder).commit(writer.flush())
        self.records = storage.open(folder)["objects"].select("feature")
        self.keys = list(self.records)  # sorted, so in the order of the records

    def reader(self) -> Read:
        records, keys = self.records, self.keys
        return lambda i: np.array(records[keys[i]]["feature"])

    def loader(self) -> Iterable[Any]:
        from storage.torch_data import Stream

        return Stream(self.records, BATCH, seed=0, num_workers=WORKERS, persistent_workers=True)

    @staticmethod
    def objects(batch: Any) -> int:
        return int(batch["object_mask"].sum())


def pad(arrays: list[np.ndarray]) -> tuple[Any, Any]:
    """The batch code that all peers get: one buffer, zeros behind each record, and a mask."""
    import torch

    counts = torch.tensor([len(a) for a in arrays])
    out = torch.empty(len(arrays), int(counts.max()), DIM, dtype=torch.float16)
    for row, array in zip(out.numpy(), arrays, strict=True):
        row[: len(array)] = array
        row[len(array) :] = 0
    return out, torch.arange(out.shape[1]) < counts[:, None]


def pad_x(samples: list[dict[str, Any]]) -> tuple[Any, Any]:
    return pad([sample["x"] for sample in samples])


def pad_flat(samples: list[dict[str, Any]]) -> tuple[Any, Any]:
    return pad([np.asarray(sample["x"]).reshape(-1, DIM) for sample in samples])


def pad_bytes(samples: list[dict[str, Any]]) -> tuple[Any, Any]:
    return pad([np.frombuffer(sample["x"], np.float16).reshape(-1, DIM) for sample in samples])


class Peer:
    @staticmethod
    def objects(batch: Any) -> int:
        return int(batch[1].sum())


class LitData(Peer):
    """optimize() with its default chunks; `batch_decode=0` for reads by index, where the default decodes many items."""

    module = "litdata"

    def __init__(self, folder: Path, records: list[np.ndarray]) -> None:
        import litdata

        self.folder, self.count = str(folder), len(records)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            litdata.optimize(
                lambda i: {"x": records[i]}, list(range(len(records))), self.folder,
                num_workers=1, chunk_bytes="64MB", start_method="fork",
            )  # fmt: skip

    def reader(self) -> Read:
        import litdata

        dataset = litdata.StreamingDataset(self.folder, batch_decode=0)
        return lambda i: owned(dataset[i]["x"])

    def loader(self) -> Iterable[Any]:
        import litdata

        dataset = litdata.StreamingDataset(self.folder, shuffle=True, drop_last=False)
        return litdata.StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, collate_fn=pad_x
        )


class Mosaic(Peer):
    """MDS shards of the default size with ndarray columns. StreamingDataset by index is faster than LocalDataset."""

    module = "streaming"

    def __init__(self, folder: Path, records: list[np.ndarray]) -> None:
        from streaming import MDSWriter

        self.folder = str(folder)
        fixed = len({len(record) for record in records}) == 1
        encoding = f"ndarray:float16:{OBJECTS},{DIM}" if fixed else "ndarray:float16"
        with MDSWriter(out=self.folder, columns={"x": encoding}) as writer:
            for record in records:
                writer.write({"x": record})

    def reader(self) -> Read:
        from streaming import StreamingDataset

        dataset = StreamingDataset(local=self.folder, batch_size=1)
        return lambda i: owned(dataset[i]["x"])

    def loader(self) -> Iterable[Any]:
        from streaming import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(local=self.folder, shuffle=True, batch_size=BATCH)
        return StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, collate_fn=pad_x
        )


class HuggingFace(Peer):
    """Arrow on disk, memory-mapped, `with_format("numpy")`; flat lists, which decode faster than Array2D."""

    module = "datasets"

    def __init__(self, folder: Path, records: list[np.ndarray]) -> None:
        import datasets
        import pyarrow as pa

        datasets.disable_progress_bars()
        lengths = [record.size for record in records]
        values = pa.array(np.concatenate(records).ravel())
        if len(set(lengths)) == 1:
            column = pa.FixedSizeListArray.from_arrays(values, lengths[0])
        else:
            column = pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), values)
        datasets.Dataset(pa.table({"x": column})).save_to_disk(folder / "saved")
        self.dataset = datasets.load_from_disk(folder / "saved")

    def reader(self) -> Read:
        dataset = self.dataset.with_format("numpy", dtype=np.float16)
        return lambda i: owned(dataset[i]["x"].reshape(-1, DIM))

    def by_hand(self) -> Read:
        """Arrow's own buffers, unpacked by knowing their layout; lists of one fixed length only."""
        dataset = self.dataset.with_format("arrow")
        return lambda i: np.array(dataset[i]["x"].chunk(0).flatten().to_numpy()).reshape(-1, DIM)

    def loader(self) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        dataset = self.dataset.with_format("numpy", dtype=np.float16)
        return DataLoader(
            dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, collate_fn=pad_flat
        )


class Lance(Peer):
    """Fixed-size lists and `take` by index; bytes for its own loader, which turns each row into Python values."""

    module = "lance"

    def __init__(self, folder: Path, records: list[np.ndarray]) -> None:
        import lance
        import pyarrow as pa

        self.folder = str(folder / "data.lance")
        if len({len(record) for record in records}) == 1:
            values = pa.array(np.concatenate(records).ravel())
            column = pa.FixedSizeListArray.from_arrays(values, OBJECTS * DIM)
        else:
            column = pa.array([record.tobytes() for record in records], pa.large_binary())
        lance.write_dataset(pa.table({"x": column}), self.folder)

    def reader(self) -> Read:
        import lance

        dataset = lance.dataset(self.folder)

        def read(i: int) -> np.ndarray:
            column = dataset.take([i], columns=["x"])["x"].chunk(0)
            return np.array(column.flatten().to_numpy()).reshape(-1, DIM)

        return read

    def loader(self) -> Iterable[Any]:
        from lance.torch.data import SafeLanceDataset, get_safe_loader

        dataset = SafeLanceDataset(self.folder)
        return get_safe_loader(dataset, batch_size=BATCH, num_workers=WORKERS, shuffle=True, collate_fn=pad_bytes)


def some_objects(rng: np.random.Generator, count: int) -> np.ndarray:
    """(count, DIM) float16: any bits that are a finite number, which are quick to draw."""
    return rng.integers(0, 0x7C00, (count, DIM), np.uint16).view(np.float16)


def owned(array: np.ndarray) -> np.ndarray:
    """The array itself where its memory is its own to change, else a copy."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return array if base.flags.owndata and array.flags.writeable else np.array(array)


SOURCES: dict[str, Any] = {"ours": Ours, "memmap": Memmap, "npz": Npz}
PEERS: dict[str, Any] = {"litdata": LitData, "mosaicml-streaming": Mosaic, "datasets": HuggingFace, "pylance": Lance}


def quiet() -> None:
    """Keep the peers' messages out of the output."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"LANCE_LOG": "error", "HF_HUB_OFFLINE": "1", "RUST_LOG": "error"}


def main() -> None:
    options = harness.options(__doc__)
    quiet()
    count, reads, repeats = (4000, 500, 5) if options.quick else (8000, 2000, 11)
    peers = {name: peer for name, peer in PEERS.items() if importlib.util.find_spec(peer.module)}
    missing = sorted(PEERS.keys() - peers)
    if missing:
        print(f"not installed, so not compared: {', '.join(missing)} (pip install -e '.[bench]')", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="scenecache-read-") as folder:
        by_key, by_key_figures = random_reads(Path(folder) / "key", count, reads, repeats, peers)
        epoch, epoch_figures = epochs(Path(folder) / "epoch", count // 2, 3 if options.quick else 7, peers)
    figures = {
        "records_by_key": count, "records_an_epoch": count // 2, **by_key_figures, **epoch_figures,
        "peers": harness.versions(*PEERS), "peers_missing": missing,
    }  # fmt: skip
    harness.emit("read", by_key | epoch, figures)


def random_reads(
    folder: Path, count: int, reads: int, repeats: int, peers: dict[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Each reader has a process of its own, so that the threads which some of them start disturb nobody else."""
    print("by random key", file=sys.stderr)
    context = multiprocessing.get_context("spawn")
    pipes, children = {}, []
    for name in ("ours", "memmap", "npz", *peers):
        (folder / name).mkdir(parents=True)
        pipes[name], theirs = context.Pipe()
        children.append(context.Process(target=serve, args=(theirs, name, folder / name, count, reads)))
        children[-1].start()
        theirs.close()
        pipes[name].recv()  # it has written its files: one after the other, none while another is timed

    def ask(name: str, by_hand: bool = False) -> Callable[[], float]:
        def run() -> float:
            pipes[name].send(by_hand)
            return float(pipes[name].recv())

        return run

    runs = {name: ask(name) for name in pipes}
    if "datasets" in pipes:
        runs["datasets, arrow by hand"] = ask("datasets", by_hand=True)
    seconds = harness.compare(runs, repeats)
    for pipe, child in zip(pipes.values(), children, strict=True):
        pipe.close()
        child.join()
    ratios = {
        "ours_vs_memmap": seconds["memmap"] / seconds["ours"],
        "ours_vs_npz": seconds["npz"] / seconds["ours"],
    }
    if peers:
        ratios["ours_vs_best_loader"] = min(seconds[name] for name in peers) / seconds["ours"]
    return ratios, {"read_us": {name: s * 1e6 for name, s in seconds.items()}}


def serve(pipe: Connection, name: str, folder: Path, count: int, reads: int) -> None:
    """Write the records and check what is read, then time a round of reads whenever asked; answers seconds a read."""
    quiet()
    rng = np.random.default_rng(0)
    records = [some_objects(rng, OBJECTS) for _ in range(count)]
    indices = rng.integers(0, count, reads).tolist()
    if name in ("npz", "pylance"):  # where a read takes long, fewer of them
        indices = [i % NPZ_FILES if name == "npz" else i for i in indices[: max(reads // 20, 50)]]
    source = (SOURCES | PEERS)[name](folder, records)
    readers = [source.reader()] + ([source.by_hand()] if name == "datasets" else [])
    for read in readers:
        for i in indices:  # all of them, so that the pages of mapped files are in this process, as in a second epoch
            array = read(i)
            if not np.array_equal(array, records[i]) or array.dtype != np.float16 or not array.flags.writeable:
                raise SystemExit(f"{name} does not give record {i} as an owned float16 array")
    del records
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            read = readers[pipe.recv()]
            start = time.perf_counter()
            for i in indices:
                read(i)
            pipe.send((time.perf_counter() - start) / len(indices))


def epochs(folder: Path, count: int, repeats: int, peers: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    print(f"epoch of {count} records", file=sys.stderr)
    rng = np.random.default_rng(1)
    counts = rng.integers(20, OBJECTS + 1, count)
    records = [some_objects(rng, n) for n in counts]
    total = int(counts.sum())
    runs: dict[str, Callable[[], None]] = {}

    def run(loader: Iterable[Any], objects: Callable[[Any], int], name: str) -> Callable[[], None]:
        def epoch() -> None:
            seen = sum(objects(batch) for batch in loader)
            if seen != total:
                raise SystemExit(f"{name} gave {seen} objects in an epoch, expected {total}")

        return epoch

    for name, make in {"ours": Ours, **peers}.items():
        (folder / name).mkdir(parents=True)
        source = make(folder / name, records)
        runs[name] = run(source.loader(), source.objects, name)
    seconds = harness.compare(runs, repeats)
    figures = {"epoch_records_per_s": {name: count / s for name, s in seconds.items()}}
    if not peers:
        return {}, figures
    return {"epoch_vs_best_loader": min(seconds[name] for name in peers) / seconds["ours"]}, figures


if __name__ == "__main__":
    main()
