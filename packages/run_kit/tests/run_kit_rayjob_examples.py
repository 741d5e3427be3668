"""Manifests with every field that `plinth rayjob` writes."""

from run_kit.cluster.app import App
from run_kit.cluster.rayjob import RayJobConfig, manifest

APP = App(
    arguments=("toy", "trainer.output_dir=/data/outputs"),
    config={
        "trainer": {
            "experiment": "toy",
            "output_dir": "/data/outputs",
            "resume": "never",
            "ray_address": None,
            "save_freq": 0,
        }
    },
)
SMALL = RayJobConfig(image="registry/plinth:0.2")
FULL = RayJobConfig(
    image="registry/plinth:0.2",
    nodes=4,
    gpus_per_node=8,
    claim="models",
    name="math",
    namespace="research",
    time_limit_s=86400,
    node_selector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
)
EXAMPLES = [manifest(config, APP) for config in (SMALL, FULL)]
