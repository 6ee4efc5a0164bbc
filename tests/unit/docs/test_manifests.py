"""What Kubernetes says to the manifests in examples/kubernetes, by the schemas of two versions.

How they would run is held by tests/system/test_kubernetes.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

MANIFESTS = Path(__file__).parents[3] / "examples" / "kubernetes"
OLDEST, NEWEST = "1.31", "1.37"


def documents(name: str) -> dict[str, Any]:
    """By kind."""
    text = (MANIFESTS / name).read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_them(version: str) -> None:
    job_set = documents("jobset.yaml")["JobSet"]
    # JobSet has no schema here, but the Job in it does.
    inner = job_set["spec"]["replicatedJobs"][0]["template"]
    in_a_set = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits"}, **inner}
    for document in (*documents("indexed-job.yaml").values(), in_a_set):
        kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_there_is_not_is_refused() -> None:
    """Else the test above could not fail."""
    job = documents("indexed-job.yaml")["Job"]
    job["spec"]["template"]["spec"]["gracePeriodSeconds"] = 45
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, NEWEST, strict=True)


@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("jobset.yaml", "JobSet", "JobsetV1alpha2JobSet"),
        ("trainjob.yaml", "TrainJob", "TrainerV1alpha1TrainJob"),
        ("trainjob.yaml", "TrainingRuntime", "TrainerV1alpha1TrainingRuntime"),
    ],
)
def test_the_controllers_know_each_field(name: str, kind: str, model: str) -> None:
    document = documents(name)[kind]
    read = getattr(models, model).from_dict(document)
    assert read.to_dict() == document
