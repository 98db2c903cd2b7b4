"""The metrics that an MLflow store has of runs: reads them back, and removes those of steps that are done again."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

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


def remove_metrics(
    client: MlflowClient, run_id: str, *, first_step: int, last_step: int | None = None, keys: Collection[str] = ()
) -> None:
    """Removes the points of a run from first_step to last_step, so that these steps have no two values.

    last_step: None: all behind first_step, too.  keys: of these metrics alone; (): of all.
    Does nothing where the store is no database that this process opens: MLflow's servers have no call for it.
    """
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = client._tracking_client.store
    if not isinstance(store, SqlAlchemyStore):
        return

    def chosen(table: type[SqlMetric | SqlLatestMetric]) -> list[Any]:
        limits = [table.run_uuid == run_id, table.step >= first_step]
        if last_step is not None:
            limits.append(table.step <= last_step)
        if keys:
            limits.append(table.key.in_(keys))
        return limits

    with store.ManagedSessionMaker(read_only=False) as session:
        session.query(SqlMetric).filter(*chosen(SqlMetric)).delete(synchronize_session=False)
        # The value that lists of runs show: the last one that is left.
        for latest in session.query(SqlLatestMetric).filter(*chosen(SqlLatestMetric)).all():
            left = session.query(SqlMetric).filter(SqlMetric.run_uuid == run_id, SqlMetric.key == latest.key)
            newest = left.order_by(SqlMetric.step.desc(), SqlMetric.timestamp.desc(), SqlMetric.value.desc()).first()
            if newest is None:
                session.delete(latest)
            else:
                latest.step, latest.timestamp = newest.step, newest.timestamp
                latest.value, latest.is_nan = newest.value, newest.is_nan
