"""PLY meshes and point clouds of any dialect, and ScanNet's own dialect written.

Binary vertices are read as one block, so are binary faces that are all triangles; ASCII is parsed by numpy. Binary
meshes with other polygons go through plyfile, which is slow and general. Polygons become triangle fans.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from extractors.errors import EmptyInput, InvalidValues, MissingFile, TruncatedFile, UnsupportedFile
from extractors.inputs import Scan

_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2", "ushort": "u2",
    "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4", "float": "f4", "float32": "f4",
    "double": "f8", "float64": "f8",
}  # fmt: skip
_ORDERS = {"binary_little_endian": "<", "binary_big_endian": ">", "ascii": ""}
_COLORS = (("red", "green", "blue"), ("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue"))
_INDICES = ("vertex_indices", "vertex_index")
_LONGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class _Property:
    name: str
    dtype: str
    count: str = ""  # dtype of the length, for lists


@dataclass(frozen=True)
class _Element:
    name: str
    size: int
    properties: tuple[_Property, ...]

    def dtype(self, order: str, list_length: int) -> np.dtype:
        """Packed dtype of one row whose lists all have `list_length` values."""
        fields: list[Any] = []
        for p in self.properties:
            if p.count:
                fields.append((f"{p.name} count", order + p.count))
                fields.append((p.name, order + p.dtype, (list_length,)))
            else:
                fields.append((p.name, order + p.dtype))
        return np.dtype(fields)


def read_ply(path: str | Path, axis_align: np.ndarray | None = None) -> Scan:
    """Read a mesh or point cloud.

    Extra properties and elements are ignored. Colours may be bytes, 16-bit or floats in 0..1. Polygons become
    triangle fans. Vertices that are NaN or infinite are kept as they are: whether they are usable is for the
    extractor to say.

    Args:
        path: a `.ply` file.
        axis_align: (4, 4) raw scan frame -> axis-aligned frame, handed on.

    Raises:
        MissingFile, EmptyInput: no such file, no bytes or no vertices.
        UnsupportedFile: not a PLY file, or one without x, y, z.
        TruncatedFile: the file ends before its header says it should.
        InvalidValues: a face names a vertex that is not there.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFile(f"{path}: no such file; download the scan's mesh or leave the scene out")
    with path.open("rb") as file:
        order, elements = _read_header(path, file)
        vertex = next((e for e in elements if e.name == "vertex"), None)
        if vertex is None or not vertex.size:
            raise EmptyInput(f"{path}: no vertices")
        if any(e.name == "tristrips" and e.size for e in elements):
            raise UnsupportedFile(f"{path}: triangle strips are not read; save it with a face list")
        names = {p.name for p in vertex.properties}
        if not {"x", "y", "z"} <= names:
            raise UnsupportedFile(f"{path}: vertices have {sorted(names)}, need x, y, z")
        body = file.tell()
        rows, faces = _read_simple(path, file, order, elements) or _read_any(path, order, elements, body)
    xyz = _stack(rows, ("x", "y", "z")).astype(np.float32, copy=False)
    color_names = next((c for c in _COLORS if set(c) <= names), None)
    rgb = _bytes(_stack(rows, color_names)) if color_names else None
    normals = _stack(rows, ("nx", "ny", "nz")).astype(np.float32) if {"nx", "ny", "nz"} <= names else None
    if len(faces) and not (faces.min() >= 0 and faces.max() < len(xyz)):
        raise InvalidValues(f"{path}: faces name vertices {faces.min()} to {faces.max()}, there are {len(xyz)}")
    return Scan(xyz, rgb, faces.astype(np.int32, copy=False), axis_align, normals=normals)


def write_ply(path: str | Path, xyz: np.ndarray, rgb: np.ndarray, faces: np.ndarray) -> None:
    """Write ScanNet's dialect: binary, vertices of 7 properties (x y z red green blue alpha), triangles.

    Args:
        xyz: (vertex, 3) float, metres.
        rgb: (vertex, 3) uint8.
        faces: (face, 3) vertex indices.
    """
    vertex = np.zeros(len(xyz), [(n, "<f4") for n in "xyz"] + [(n, "u1") for n in ("red", "green", "blue", "alpha")])
    for i, (position, color) in enumerate(zip("xyz", ("red", "green", "blue"), strict=True)):
        vertex[position], vertex[color] = xyz[:, i], rgb[:, i]
    vertex["alpha"] = 255
    face = np.zeros(len(faces), [("count", "u1"), ("indices", "<i4", 3)])
    face["count"], face["indices"] = 3, faces
    properties = [f"property float {n}" for n in "xyz"] + [
        f"property uchar {n}" for n in ("red", "green", "blue", "alpha")
    ]
    header = [
        "ply", "format binary_little_endian 1.0", f"element vertex {len(xyz)}", *properties,
        f"element face {len(faces)}", "property list uchar int vertex_indices", "end_header", "",
    ]  # fmt: skip
    with Path(path).open("wb") as file:
        file.write("\n".join(header).encode())
        file.write(vertex.tobytes())
        file.write(face.tobytes())


def _read_header(path: Path, file: IO[bytes]) -> tuple[str, list[_Element]]:
    first = file.readline(80)
    if not first:
        raise EmptyInput(f"{path}: zero bytes; download it again")
    if first.rstrip() != b"ply":
        raise UnsupportedFile(f"{path}: not a PLY file (starts with {first[:16]!r})")
    order, elements = None, []
    while True:
        line = file.readline(4096)
        if not line.endswith(b"\n") or file.tell() > _LONGEST_HEADER:
            raise TruncatedFile(f"{path}: the header has no end_header line; download it again")
        words = line.decode("latin-1").split()
        try:
            match words:
                case ["end_header"]:
                    break
                case ["format", kind, _]:
                    order = _ORDERS[kind]
                case ["element", name, size]:
                    elements.append(_Element(name, int(size), ()))
                    if int(size) < 0:
                        raise ValueError
                case ["property", *rest]:
                    match rest:
                        case ["list", count, dtype, name]:
                            new = _Property(name, _TYPES[dtype], _TYPES[count])
                        case [dtype, name]:
                            new = _Property(name, _TYPES[dtype])
                        case _:
                            raise ValueError
                    last = elements.pop()
                    elements.append(_Element(last.name, last.size, (*last.properties, new)))
                case [] | ["comment", *_] | ["obj_info", *_]:
                    pass
                case _:
                    raise ValueError
        except (KeyError, ValueError, IndexError) as error:
            raise UnsupportedFile(f"{path}: cannot read the header line {line.decode('latin-1').strip()!r}") from error
    if order is None:
        raise UnsupportedFile(f"{path}: the header has no format line")
    return order, elements


def _read_simple(
    path: Path, file: IO[bytes], order: str, elements: list[_Element]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Vertices and faces of ASCII files, and of binary ones whose faces are all triangles; None for others."""
    rows, faces = None, np.empty((0, 3), np.int64)
    for element in elements:
        if rows is not None and (element.name != "face" or not element.size):
            continue  # an element that nobody asked for, or no faces
        if not element.properties:
            continue
        lists = [p.name for p in element.properties if p.count]
        index = next((n for n in _INDICES if n in lists), "")
        dtype = element.dtype(order, list_length=3)
        if element.name != "face" and lists:
            return None
        start = file.tell()
        block = _read_binary(path, file, element, dtype) if order else _read_text(file, element, dtype)
        uniform = block is not None and not any((block[f"{n} count"] != 3).any() for n in lists)
        if element.name == "face" and not (uniform and index):
            if order:
                return None
            file.seek(start)
            return (rows, _fans(_read_polygons(path, file, element))) if rows is not None else None
        if block is None or len(block) < element.size:
            file.seek(-1, os.SEEK_END)
            cut = block is not None or file.read() != b"\n"
            found = "unequal rows" if block is None else f"{len(block)} of {element.size} rows"
            kind = TruncatedFile if cut else UnsupportedFile
            raise kind(f"{path}: element {element.name} has {found}; download it again")
        if element.name == "vertex":
            rows = block
        elif element.name == "face":
            faces = block[index].astype(np.int64)
            break
    return None if rows is None else (rows, faces)


def _read_binary(path: Path, file: IO[bytes], element: _Element, dtype: np.dtype) -> np.ndarray | None:
    left = path.stat().st_size - file.tell()
    if left < element.size * dtype.itemsize and any(p.count for p in element.properties):
        return None  # lists of other lengths may take less room than triangles: the general reader decides
    return np.fromfile(file, dtype, min(element.size, left // dtype.itemsize))


def _read_text(file: IO[bytes], element: _Element, dtype: np.dtype) -> np.ndarray | None:
    """Rows of an ASCII element, fewer at the end of the file; None where a row has another length."""
    if not element.size:
        return np.empty(0, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "input contained no data": the caller counts the rows
        try:
            rows = min(element.size, os.fstat(file.fileno()).st_size)  # numpy makes room for all of them
            return np.loadtxt(file, dtype, comments=None, max_rows=rows, ndmin=1)
        except ValueError:
            return None


def _read_polygons(path: Path, file: IO[bytes], element: _Element) -> list[np.ndarray]:
    """Index lists of an ASCII face element. What a line has behind them is not looked at: some writers disagree with
    their own header there."""
    polygons: list[np.ndarray] = []
    while len(polygons) < element.size:
        line = file.readline()
        if not line:
            raise TruncatedFile(f"{path}: {len(polygons)} of {element.size} faces; download it again")
        words, at = line.split(), 0
        if not words:
            continue
        try:
            for p in element.properties:
                count = int(words[at]) if p.count else 1
                if p.name in _INDICES:
                    polygons.append(np.array([int(w) for w in words[at + 1 : at + 1 + count]], np.int64))
                    if len(polygons[-1]) != count:
                        raise IndexError
                    break
                at += count + bool(p.count)
            else:
                return []
        except (ValueError, IndexError) as error:
            kind = UnsupportedFile if line.endswith(b"\n") else TruncatedFile
            raise kind(f"{path}: face {len(polygons)} cannot be read: {line[:60]!r}") from error
    return polygons


def _read_any(path: Path, order: str, elements: list[_Element], body: int) -> tuple[np.ndarray, np.ndarray]:
    """Vertices and triangulated faces of any PLY file; `body` is where its header ends."""
    import plyfile

    left = path.stat().st_size - body
    for element in elements:  # plyfile makes room for as many rows as the header says
        row = sum(np.dtype(p.count or p.dtype).itemsize if order else 1 for p in element.properties)
        if element.size * row > left:
            raise TruncatedFile(
                f"{path}: {left} bytes for {element.size} rows of element {element.name}; download it again"
            )
    try:
        data = plyfile.PlyData.read(str(path))
        rows = data["vertex"].data
        faces = data["face"].data if "face" in data else np.empty(0, [(_INDICES[0], object)])
        lists = next((faces[n] for n in _INDICES if n in (faces.dtype.names or ())), None)
    except plyfile.PlyElementParseError as error:
        kind = TruncatedFile if "early end" in str(error) else UnsupportedFile
        raise kind(f"{path}: {error}; download it again") from error
    except (plyfile.PlyParseError, ValueError, UnicodeDecodeError) as error:
        raise UnsupportedFile(f"{path}: {error}") from error
    return rows, _fans(list(lists)) if lists is not None else np.empty((0, 3), np.int64)


def _fans(polygons: list[np.ndarray]) -> np.ndarray:
    """Triangles (first, k, k + 1) of polygons, in their order; those with fewer than 3 corners give none."""
    triangles = [
        np.stack([np.full(len(p) - 2, p[0], np.int64), p[1:-1].astype(np.int64), p[2:].astype(np.int64)], 1)
        for p in polygons
        if len(p) > 2
    ]
    return np.concatenate(triangles) if triangles else np.empty((0, 3), np.int64)


def _stack(rows: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    out = np.empty((len(rows), len(names)), rows.dtype[names[0]].newbyteorder("="))
    for i, name in enumerate(names):
        out[:, i] = rows[name]
    return out


def _bytes(colors: np.ndarray) -> np.ndarray:
    if colors.dtype == np.uint8:
        return colors
    if colors.dtype.kind == "f":  # 0..1, unless some value says 0..255
        colors = np.nan_to_num(colors) * (255 if np.nanmax(colors, initial=0) <= 1 else 1)
        return np.clip(np.rint(colors), 0, 255).astype(np.uint8)
    scale = 257 if colors.dtype == np.uint16 else 1
    return np.clip(colors // scale, 0, 255).astype(np.uint8)
