"""SQA3D (Ma et al., ICLR 2023): situated questions in ScanNet scans, and the features that its models read.

To be given: `source.root` (folder of ScanNet scans), `sqa3d_questions.root` (folder of the question files) and the
weights of votenet, bev_grid and clip_grid (`untrained:0` runs them without training).
"""

from extractors.bev_render import BevRender
from extractors.image_grid import ClipBertGrid, TimmGrid
from extractors.scan_info import ScanInfo
from extractors.video import Video
from extractors.votenet import VoteNet
from pipelines.job_spec import JobSpec, SourceSpec, StageSpec, TableSpec
from pipelines.questions.sqa3d import SQA3DQuestions
from pipelines.sources.scannet import ScanNet

SQA3D = JobSpec(
    name="sqa3d",
    source=SourceSpec(type=ScanNet),
    stages={
        "scan_info": StageSpec(extractor=ScanInfo),  # axis alignment and bounds: situation poses need them
        "video": StageSpec(extractor=Video),  # the first of every 20 frames, 224x224
        "bev_render": StageSpec(extractor=BevRender),  # bird's eye view by Blender
        "votenet": StageSpec(extractor=VoteNet),  # 256 object proposals of 128 values (ScanQA's head)
        "bev_grid": StageSpec(extractor=TimmGrid, of=("bev_render",), model="pvt_v2_b2"),  # MCAN's (49, 512)
        "clip_grid": StageSpec(extractor=ClipBertGrid, of=("video",)),  # ClipBERT's (frame, 7, 7, 768)
    },
    tables={"sqa3d_questions": TableSpec(type=SQA3DQuestions)},
)
