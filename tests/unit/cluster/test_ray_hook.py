"""What Ray starts on a node of a job; on real nodes: tests/slurm/test_ray_job.py."""

from __future__ import annotations

from pathlib import Path

from ray._common.utils import load_class
from ray._private.parameter import RayParams

from scalerl.cluster.ray_hook import for_a_job, leave_out_what_no_run_uses

LAUNCHER = Path(__file__).parents[3] / "scalerl/extras/slurm/scripts/ray.sbatch"


def test_what_no_run_uses_is_left_out() -> None:
    parameters = RayParams(ray_client_server_port=10001)
    leave_out_what_no_run_uses(parameters)
    assert parameters.ray_client_server_port is None
    assert parameters.include_log_monitor is False and parameters.no_monitor is True


def test_what_a_site_asks_for_is_started() -> None:
    parameters = RayParams(ray_client_server_port=10777, include_log_monitor=True, autoscaling_config="cluster.yaml")
    leave_out_what_no_run_uses(parameters)
    assert parameters.ray_client_server_port == 10777
    assert parameters.include_log_monitor is True and parameters.no_monitor is False


def test_the_launcher_names_it() -> None:
    (name,) = {
        word.partition(":-")[2].rstrip("}")
        for word in LAUNCHER.read_text(encoding="utf-8").split()
        if word.startswith("RAY_START_HOOK=")
    }
    assert load_class(name) is for_a_job
