"""Reads a manifest by the software that it is for: `python -m tests.submission TARGET FILE`.

Runs in an environment that has that software, and needs nothing of this project.
"""

import sys
from importlib import import_module
from pathlib import Path


def read_kubernetes(text):
    """By the models of `kubeflow-trainer-api`, which leave out what they do not know."""
    yaml, models = import_module("yaml"), import_module("kubeflow_trainer_api.models")
    for found in yaml.safe_load_all(text):
        prefix = "JobsetV1alpha2" if found["kind"] == "JobSet" else "TrainerV1alpha1"
        model = getattr(models, prefix + found["kind"])
        assert (read := model.from_dict(found).to_dict()) == found, f"{found} is read as {read}"


def read_skypilot(text):
    """By SkyPilot's own schema, then as a task."""
    found = import_module("yaml").safe_load(text)
    validate, schemas = import_module("jsonschema").validate, import_module("sky.utils.schemas")
    validate(found, schemas.get_task_schema())
    validate(found["resources"], schemas.get_resources_schema())
    for storage in found.pop("file_mounts").values():  # a bucket would be looked up
        validate(storage, schemas.get_storage_schema())
    task = import_module("sky").Task.from_yaml_config(dict(found))
    assert task.num_nodes == found["num_nodes"], task


def read_torchx(text):
    """As a component, by TorchX's own check and the scheduler of this machine."""
    component = {}
    exec(compile(text, "component", "exec"), component)
    validate = import_module("torchx.specs.file_linter").validate
    file = Path(sys.argv[2])
    assert not (wrong := validate(str(file), "train")), wrong
    with import_module("torchx.runner").get_runner() as runner:
        runner.dryrun(component["train"](), "local_cwd")


TARGETS = {
    "kubeflow": (read_kubernetes, "kubeflow_trainer_api"),
    "jobset": (read_kubernetes, "kubeflow_trainer_api"),
    "skypilot": (read_skypilot, "sky"),
    "torchx": (read_torchx, "torchx"),
}
"""The reader of each, and the package that it imports."""

if __name__ == "__main__":
    read, _ = TARGETS[sys.argv[1]]
    read(Path(sys.argv[2]).read_text(encoding="utf-8"))
