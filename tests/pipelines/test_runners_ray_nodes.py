"""A node of the cluster goes away in the middle of a run."""

from __future__ import annotations

import threading
import time

import pytest

from pipelines.stage import Stage
from tests.pipelines.fakes import Folder, Numbers, Sums
from tests.pipelines.running import Runs, counts, job

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def two_nodes(monkeypatch):
    """A cluster of two nodes with a CPU each, which notices a dead node within seconds."""
    for name, value in {"initial_delay_ms": 1000, "period_ms": 1000, "failure_threshold": 3}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from pipelines.runners.ray_session import import_ray

    ray = import_ray()
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    other = cluster.add_node(**node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster, other
    ray.shutdown()
    cluster.shutdown()


def test_dead_node_costs_time_and_no_records(two_nodes, tmp_path):
    from pipelines.runners.ray import RayRunner

    cluster, other = two_nodes
    source = Folder.make(tmp_path / "raw", {f"{i:03d}": "slow:0.05" for i in range(200)})
    runs = Runs(tmp_path)

    def kill() -> None:
        time.sleep(5)
        cluster.remove_node(other, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    summary = runs(job(source, Stage(Numbers()), Stage(Sums())), RayRunner())
    killer.join()
    assert counts(summary, "numbers") == {"made": 200}
    assert counts(summary, "sums") == {"made": 200}
    assert summary.exit_code == 0
