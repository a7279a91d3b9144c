"""Lift, splat (Philion and Fidler 2020) as BEVDet does it: image features, spread over depth, are summed on the ground.

Every image cell has a column of points, one per depth; a point falls into one cell of the ground or off it. Which cell
depends on calibration alone, so it is found once per key frame on the CPU, in float32 and in the reference's order of
operations: every device gets the same cells. Maps are (C, H, W), H = y, W = x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEPTHS = 59  # bins at 1, 2 ... 59 m
STRIDE = 16  # pixels between image cells


@dataclass(frozen=True)
class Ground:
    """The cells that points are summed in, one layer thick.

    Attributes:
        lower: x, y, z in metres where indices start.
        step: sides of a cell in metres.
        size: number of cells along x, y, z.
    """

    lower: tuple[float, float, float]
    step: tuple[float, float, float]
    size: tuple[int, int, int]

    def constants(self) -> dict[str, Tensor]:
        """`dx`, `bx`, `nx` as first-generation checkpoints hold them: step, middle of the first cell, size."""
        middle = [low + step / 2 for low, step in zip(self.lower, self.step, strict=True)]
        return {"dx": torch.tensor(self.step), "bx": torch.tensor(middle), "nx": torch.tensor(self.size)}


def frustum(height: int, width: int) -> Tensor:
    """(depth, row, column, 3) float32: x and y in pixels of the network's image, depth in metres.

    The outermost cells lie on the image's edge, not half a stride inside it.
    """
    d, y, x = torch.meshgrid(
        torch.arange(1, DEPTHS + 1, dtype=torch.float32),
        torch.linspace(0, height - 1, height // STRIDE),
        torch.linspace(0, width - 1, width // STRIDE),
        indexing="ij",
    )
    return torch.stack([x, y, d], -1)


def place(points: Tensor, rots: Tensor, trans: Tensor, intrins: Tensor, post_rot: Tensor, post_tran: Tensor) -> Tensor:
    """Points of a frustum in space.

    Args:
        points: (depth, row, column, 3), see `frustum`.
        rots, trans: (camera, 3, 3) and (camera, 3), camera -> frame of the result.
        intrins: (camera, 3, 3).
        post_rot, post_tran: (3, 3) and (3,), pixels of the file -> pixels of the network's image.

    Returns:
        (camera, depth, row, column, 3) float32, metres.
    """
    undone = (torch.inverse(post_rot) @ (points - post_tran).unsqueeze(-1)).squeeze(-1)
    rays = torch.cat([undone[..., :2] * undone[..., 2:], undone[..., 2:]], -1)
    turn = rots @ torch.inverse(intrins)
    return (turn[:, None, None, None] @ rays.unsqueeze(-1)).squeeze(-1) + trans[:, None, None, None]


def ground_cells(points: Tensor, ground: Ground) -> Tensor:
    """Which cell each point falls into.

    Indices are cut towards zero as in the reference, so a cell that starts an axis reaches one step further out.

    Args:
        points: (..., 3) float32.

    Returns:
        (...) int32, y * nx + x; ny * nx for a point off the ground, or not finite.
    """
    constants = ground.constants()
    lower = constants["bx"] - constants["dx"] / 2
    index = ((points - lower) / constants["dx"]).trunc()
    nx, ny, _ = ground.size
    inside = ((index >= 0) & (index < constants["nx"])).all(-1)
    return torch.where(inside, index[..., 1] * nx + index[..., 0], nx * ny).to(torch.int32)


def splat(depth: Tensor, context: Tensor, cells: Tensor, ground: Ground) -> Tensor:
    """Sum depth times context over the points in each cell.

    One depth at a time: the points of all depths at once would take 64 MB per key frame, and more time.

    Args:
        depth: (B, camera, depth, row, column), how much of an image cell is at each depth.
        context: (B, camera, C, row, column).
        cells: (B, camera, depth, row, column) integers of `ground_cells`.

    Returns:
        (B, C, ny, nx) float32, also of inputs in half precision.
    """
    batch, _, channels = context.shape[:3]
    nx, ny, _ = ground.size
    rows = context.movedim(2, -1).reshape(-1, channels)
    first = torch.arange(batch, device=cells.device)[:, None, None, None, None] * (nx * ny + 1)
    flat = (cells + first).movedim(2, 0).flatten(1)
    shares = depth.movedim(2, 0).reshape(len(flat), -1, 1)
    sums = rows.new_zeros(batch * (nx * ny + 1), channels, dtype=torch.float32)
    for index, share in zip(flat, shares, strict=True):
        points = (rows * share).float()
        if sums.is_cuda:  # CUDA's index_add_ sums in an order of its own, other every time; this does not
            sums.index_put_((index,), points, accumulate=True)
        else:
            sums.index_add_(0, index, points)
    return sums.view(batch, -1, channels)[:, :-1].mT.reshape(batch, channels, ny, nx)
