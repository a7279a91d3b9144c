"""NuScenes-QA (Qian et al., AAAI 2024): questions about driving scenes, and the object features that its models read.

To be given: `source.root` (folder of nuScenes), `nuscenes_questions.root` (folder of the question files), the weights
of centerpoint, bevdet and msmdfusion (`untrained:0` runs them without training) and the word vectors of groundtruth.
MSMDFusion needs virtual points: files beside the samples, or `virtual_points.extractor=virtual_points` and
`source.masks`.
"""

from pipelines.job_spec import JobSpec

NUSCENES_QA = JobSpec.model_validate(
    {
        "name": "nuscenes-qa",
        "source": {"type": "nuscenes"},
        "stages": {
            "centerpoint": {},  # 80 objects of 512 values, from ten sweeps
            "bevdet": {},  # the same of 256 values, from six cameras
            "virtual_points": {"extractor": "virtual_points_files"},
            "msmdfusion": {},  # the same of 512 values, from both
            "groundtruth": {},  # annotated objects as words
        },
        "tables": {"nuscenes_questions": {}},
    }
)
