"""SQA3D (Ma et al., ICLR 2023): situated questions in ScanNet scans, and the features that its models read.

To be given: `source.root` (folder of ScanNet scans), `sqa3d_questions.root` (folder of the question files) and the
weights of votenet, bev_grid and clip_grid (`untrained:0` runs them without training).
"""

from pipelines.job_spec import JobSpec

SQA3D = JobSpec.model_validate(
    {
        "name": "sqa3d",
        "source": {"type": "scannet"},
        "stages": {
            "scan_info": {},  # axis alignment and bounds: situation poses need them
            "scan_objects": {},  # annotated boxes, to link answers to objects afterwards
            "video": {},  # the first of every 20 frames, 224x224
            "bev_render": {},  # bird's-eye view by Blender, SQA3D's look
            "votenet": {},  # 256 object proposals of 128 values (ScanQA's head)
            "bev_grid": {"extractor": "timm_grid", "of": ["bev_render"], "model": "pvt_v2_b2"},  # MCAN's (49, 512)
            "clip_grid": {"extractor": "clipbert_grid", "of": ["video"]},  # ClipBERT's (frame, 7, 7, 768)
        },
        "tables": {"sqa3d_questions": {}},
    }
)
