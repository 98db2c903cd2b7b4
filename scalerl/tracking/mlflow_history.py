"""What an MLflow store has of runs, read back."""

from __future__ import annotations

Histories = dict[str, dict[int, dict[str, float]]]


def read_histories(tracking_uri: str) -> Histories:
    """Reads all runs of a store: run id -> step -> metrics, the last value where a step has several."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    histories: Histories = {}
    for run in client.search_runs(experiments):
        steps = histories.setdefault(run.info.run_id, {})
        for key in run.data.metrics:
            for entry in client.get_metric_history(run.info.run_id, key):
                steps.setdefault(entry.step, {})[key] = entry.value
    return histories
