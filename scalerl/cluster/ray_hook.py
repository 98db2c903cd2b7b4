"""How `ray start` starts Ray on the nodes of a job: Ray calls `for_a_job` by its name in RAY_START_HOOK."""

from __future__ import annotations

from ray._private.parameter import RayParams

from scalerl.cluster.ray_agents import wait_for_no_agent

# Where Ray's own command serves its client when nobody names a port.
_CLIENT_PORT = 10001


def for_a_job(parameters: RayParams, head: bool) -> None:
    """Starts a node of a job: without what no run uses, and without waiting for agents."""
    leave_out_what_no_run_uses(parameters)
    wait_for_no_agent()


def leave_out_what_no_run_uses(parameters: RayParams) -> None:
    """Starts no server for Ray's client, no monitor of logs and no autoscaler, unless they are asked for.

    A driver is always on a node of its cluster, the nodes are Slurm's, and logs stay in the files of the run.
    Source: `ray start` of Ray 2.60 (ray/scripts/scripts.py), which has an option against the monitors alone.
    """
    if parameters.ray_client_server_port == _CLIENT_PORT:
        parameters.ray_client_server_port = None
    parameters.update_if_absent(include_log_monitor=False)
    if parameters.autoscaling_config is None:
        parameters.no_monitor = True
