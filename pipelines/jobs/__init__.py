"""Jobs by name, for the command line."""

from pipelines.jobs.nuscenes_qa import NUSCENES_QA
from pipelines.jobs.sqa3d import SQA3D

JOBS = {"sqa3d": SQA3D, "nuscenes-qa": NUSCENES_QA}
