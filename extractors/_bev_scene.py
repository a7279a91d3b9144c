# SPDX-License-Identifier: GPL-3.0-or-later
#
# _bev_scene.py: a program that renders triangle meshes from above with Blender.
# Copyright (C) 2026 the scenecache authors
#
# This program is free software: you can redistribute it and/or modify it under the terms of the
# GNU General Public License as published by the Free Software Foundation, either version 3 of the
# License, or (at your option) any later version.
#
# This program is distributed in the hope that it will be useful, but WITHOUT ANY WARRANTY; without
# even the implied warranty of MERCHANTABILITY or FITNESS FOR A PARTICULAR PURPOSE. See the GNU
# General Public License (LICENSE.GPL-3.0 in this folder) for more details.
"""Render meshes from above in one Blender that stays alive.

A program of its own (`python _bev_scene.py`), because Blender's Python module is under the GPL: it imports
nothing of scenecache, and nothing of scenecache imports it. It talks over stdin and stdout, one message after the
other: 8 bytes of length, little endian, then that many bytes of pickle (protocol 5). Each request, a dict, gets one
reply, a dict; end of input ends the program.

A request holds
    xyz (vertex, 3) float32      metres, z up, the middle of the box at the origin
    rgb (vertex, 3) uint8        sRGB
    faces (face, 3) int32
    look                         `official`: lit and composited as in SQA3D; `flat`: bare vertex colours on white
    engine                       `CYCLES` or `BLENDER_WORKBENCH` (flat only; aborts the process where GL does not work)
    camera_z, lens_mm, sensor_mm, width, height, samples, seed, denoise
    threads                      0: one per core
    blender                      series of Blender that must make the picture, such as `4.5`
The reply holds
    png bytes                    8-bit; RGBA and opaque (official), RGB (flat)
    projection (4, 4) float64    Blender's own camera projection, OpenGL convention
    blender str                  version
or, where something went wrong, `error` (a class name), `text` and `traceback`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import signal
import sys
import tempfile
import traceback
from typing import Any, BinaryIO

# Facts of the scene that SQA3D renders in (its .blend, read with Blender): where the light is relative to the centred
# mesh, in metres, and how strong; it is not scaled with the mesh.
LIGHT_LOCATION = (4.076245307922363, 1.0054539442062378, 5.903861999511719)
LIGHT_WATT = 1000.0
LIGHT_RADIUS = 0.1
WORLD_GREY = 0.0508761
WORLD_STRENGTH = 8.0
PRINCIPLED = {"Metallic": 0.0, "Roughness": 0.4, "Specular IOR Level": 0.5, "IOR": 1.45, "Alpha": 1.0}
PREMULTIPLIED = 0.975  # "premultiplied" factor of the alpha-over node
# The file has 1.0. Blender 4.5 dithers that down to 254 in 8 % of the pixels, 4.4 left the ground pure white.
GROUND = 1.0035

CYCLES_OFFICIAL = {
    "sampling_pattern": "TABULATED_SOBOL",
    "use_light_tree": False,
    "light_sampling_threshold": 0.01,
    "use_adaptive_sampling": True,
    "adaptive_threshold": 0.1,
    "adaptive_min_samples": 0,
    "max_bounces": 12,
    "diffuse_bounces": 4,
    "glossy_bounces": 4,
    "transmission_bounces": 12,
    "volume_bounces": 0,
    "transparent_max_bounces": 8,
    "sample_clamp_direct": 0.0,
    "sample_clamp_indirect": 10.0,
    "caustics_reflective": True,
    "caustics_refractive": True,
    "pixel_filter_type": "BLACKMAN_HARRIS",
    "filter_width": 1.5,
    "denoiser": "OPENIMAGEDENOISE",
    "denoising_input_passes": "RGB_ALBEDO_NORMAL",
    "denoising_prefilter": "ACCURATE",
    "denoising_quality": "HIGH",
}
CYCLES_FLAT = {
    "use_adaptive_sampling": False,
    "max_bounces": 0,
    "sampling_pattern": "TABULATED_SOBOL",
    "pixel_filter_type": "BOX",
    "filter_width": 0.01,
}


def main() -> None:
    """Answer requests until the input ends."""
    die_with_parent()
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Blender prints on fd 1, which would damage a message
    while (request := read(requests)) is not None:
        try:
            reply = render(request)
        except Exception as error:
            reply = {"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
        message = pickle.dumps(reply, protocol=5)
        replies.write(len(message).to_bytes(8, "little") + message)
        replies.flush()
    os._exit(0)  # Blender has nothing to save, and its own way out can crash


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next request, None at the end of the input."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    return pickle.loads(stream.read(int.from_bytes(header, "little")))


@functools.cache
def start_blender() -> Any:
    """Import Blender, free of the user's preferences."""
    try:
        import bpy
    except ImportError as error:
        raise MissingPackage(f"Blender can't be imported ({error}): pip install 'scenecache[render]'") from error
    bpy.ops.wm.read_factory_settings(use_empty=True)
    return bpy


class MissingPackage(ImportError):
    """Blender is not installed, or lacks a library of the system."""


def render(request: dict[str, Any]) -> dict[str, Any]:
    """Build the scene anew and render it."""
    bpy = start_blender()
    if not bpy.app.version_string.startswith(request["blender"] + "."):
        raise MissingPackage(
            f"Blender {bpy.app.version_string} is installed, Blender {request['blender']} is asked for and makes other "
            f"pictures: pip install 'bpy=={request['blender']}.*', or set blender to '{bpy.app.version_string[:3]}'"
        )
    import numpy as np

    bpy.ops.wm.read_homefile(use_factory_startup=True, use_empty=True)  # nothing is left of the scene before
    scene = bpy.context.scene
    mesh = add_mesh(scene, request)
    if request["look"] == "official":
        light_and_composite(scene, mesh)
    else:
        show_bare_colors(scene, mesh)
    camera = add_camera(scene, request)
    set_engine(scene, request)

    with tempfile.TemporaryDirectory(prefix="bev-") as folder:
        scene.render.filepath = os.path.join(folder, "image.png")
        bpy.ops.render.render(write_still=True)
        with open(scene.render.filepath, "rb") as file:
            png = bare_png(file.read())
    depsgraph = bpy.context.evaluated_depsgraph_get()
    projection = camera.calc_matrix_camera(depsgraph, x=request["width"], y=request["height"])
    return {"png": png, "projection": np.array(projection, np.float64), "blender": bpy.app.version_string}


def bare_png(png: bytes) -> bytes:
    """Only the chunks that make the picture: Blender adds the date, the time it took and the name of the file."""
    kept, at = [png[:8]], 8
    while at < len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")  # length, type, data, checksum
        if png[at + 4 : at + 5].isupper():  # critical, by the PNG specification
            kept.append(png[at:end])
        at = end
    return b"".join(kept)


def add_mesh(scene: Any, request: dict[str, Any]) -> Any:
    """Make the mesh object, flat shaded, with its colours, as Blender's PLY importer would."""
    import bpy
    import numpy as np

    xyz, rgb, faces = request["xyz"], request["rgb"], request["faces"]
    mesh = bpy.data.meshes.new("scan")
    mesh.vertices.add(len(xyz))
    mesh.loops.add(faces.size)
    mesh.polygons.add(len(faces))
    # By attribute, foreach_set is one copy; by `vertices` and `loops` it is a loop: 80 ms for 150,000 vertices.
    mesh.attributes["position"].data.foreach_set("vector", xyz.ravel())
    mesh.attributes[".corner_vert"].data.foreach_set("value", faces.ravel())
    mesh.attributes.new("sharp_face", "BOOLEAN", "FACE").data.foreach_set("value", np.ones(len(faces), bool))
    mesh.polygons.foreach_set("loop_start", np.arange(0, faces.size, 3, dtype=np.int32))
    mesh.update(calc_edges=True)

    srgb = np.arange(256) / 255
    linear = np.where(srgb < 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4).astype(np.float32)
    rgba = np.ones((len(rgb), 4), np.float32)
    rgba[:, :3] = linear[rgb]
    colors = mesh.color_attributes.new("Col", "FLOAT_COLOR", "POINT")
    colors.data.foreach_set("color", rgba.ravel())
    mesh.color_attributes.active_color = colors
    mesh.color_attributes.render_color_index = 0

    scene.collection.objects.link(bpy.data.objects.new("scan", mesh))
    return mesh


def light_and_composite(scene: Any, mesh: Any) -> None:
    """SQA3D's grey world, point light, glossy material and white ground."""
    import bpy

    material = bpy.data.materials.new("scan")
    material.use_nodes = True
    nodes, links = material.node_tree.nodes, material.node_tree.links
    surface = next(node for node in nodes if node.type == "BSDF_PRINCIPLED")
    for name, value in PRINCIPLED.items():
        surface.inputs[name].default_value = value
    color = nodes.new("ShaderNodeVertexColor")  # an empty name: the mesh's render colour
    links.new(color.outputs["Color"], surface.inputs["Base Color"])
    mesh.materials.append(material)

    world = bpy.data.worlds.new("world")
    world.use_nodes = True
    background = next(node for node in world.node_tree.nodes if node.type == "BACKGROUND")
    background.inputs["Color"].default_value = (WORLD_GREY, WORLD_GREY, WORLD_GREY, 1.0)
    background.inputs["Strength"].default_value = WORLD_STRENGTH
    scene.world = world

    lamp = bpy.data.lights.new("light", "POINT")
    lamp.energy, lamp.shadow_soft_size = LIGHT_WATT, LIGHT_RADIUS
    light = bpy.data.objects.new("light", lamp)
    light.location = LIGHT_LOCATION
    scene.collection.objects.link(light)

    scene.render.film_transparent = True
    scene.render.dither_intensity = 1.0
    scene.use_nodes = True
    tree = scene.node_tree
    tree.nodes.clear()
    layers = tree.nodes.new("CompositorNodeRLayers")
    over = tree.nodes.new("CompositorNodeAlphaOver")
    over.use_premultiply, over.premul = False, PREMULTIPLIED
    over.inputs[0].default_value = 1.0
    over.inputs[1].default_value = (GROUND, GROUND, GROUND, 1.0)
    out = tree.nodes.new("CompositorNodeComposite")
    tree.links.new(layers.outputs["Image"], over.inputs[2])
    tree.links.new(over.outputs["Image"], out.inputs["Image"])


def show_bare_colors(scene: Any, mesh: Any) -> None:
    """The vertex colours as they are, on white, without any light."""
    import bpy

    material = bpy.data.materials.new("scan")
    material.use_nodes = True
    nodes, links = material.node_tree.nodes, material.node_tree.links
    nodes.clear()
    color, emission = nodes.new("ShaderNodeVertexColor"), nodes.new("ShaderNodeEmission")
    out = nodes.new("ShaderNodeOutputMaterial")
    links.new(color.outputs["Color"], emission.inputs["Color"])
    links.new(emission.outputs["Emission"], out.inputs["Surface"])
    mesh.materials.append(material)

    world = bpy.data.worlds.new("world")
    world.color = (1.0, 1.0, 1.0)  # what Workbench shows
    world.use_nodes = True  # what Cycles shows
    background = next(node for node in world.node_tree.nodes if node.type == "BACKGROUND")
    background.inputs["Color"].default_value = (1.0, 1.0, 1.0, 1.0)
    scene.world = world
    scene.render.dither_intensity = 0.0

    shading = scene.display.shading
    shading.light, shading.color_type = "FLAT", "VERTEX"
    shading.show_object_outline = False
    scene.display.render_aa = "OFF"


def add_camera(scene: Any, request: dict[str, Any]) -> Any:
    """A camera above the origin that looks down: image right is +x, image up is +y."""
    import bpy

    lens = bpy.data.cameras.new("camera")
    lens.lens, lens.sensor_width, lens.sensor_fit = request["lens_mm"], request["sensor_mm"], "AUTO"
    lens.clip_start, lens.clip_end = 0.1, 1000.0
    camera = bpy.data.objects.new("camera", lens)
    camera.location = (0.0, 0.0, request["camera_z"])
    scene.collection.objects.link(camera)
    scene.camera = camera
    return camera


def set_engine(scene: Any, request: dict[str, Any]) -> None:
    """Engine, samples, size and file format."""
    scene.render.engine = request["engine"]
    if request["engine"] == "CYCLES":
        cycles = scene.cycles
        for name, value in (CYCLES_OFFICIAL if request["look"] == "official" else CYCLES_FLAT).items():
            setattr(cycles, name, value)
        cycles.device = "CPU"
        cycles.samples, cycles.seed, cycles.use_denoising = request["samples"], request["seed"], request["denoise"]
    scene.render.resolution_x, scene.render.resolution_y = request["width"], request["height"]
    scene.render.resolution_percentage = 100
    scene.render.threads_mode = "FIXED" if request["threads"] else "AUTO"
    if request["threads"]:
        scene.render.threads = request["threads"]
    scene.view_settings.view_transform, scene.view_settings.look = "Standard", "None"
    scene.view_settings.exposure, scene.view_settings.gamma = 0.0, 1.0
    scene.render.image_settings.file_format = "PNG"
    scene.render.image_settings.color_mode = "RGBA" if request["look"] == "official" else "RGB"
    scene.render.image_settings.color_depth = "8"
    scene.render.image_settings.compression = 15


if __name__ == "__main__":
    main()
