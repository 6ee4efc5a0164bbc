"""A manifest for Kubernetes with the JobSet controller. Pure: a request in, YAML out.

It is written line by line, because half of it is comments; the tests read it with a YAML parser.
"""

from __future__ import annotations

import json
import re

from rallypoint.cli.options import Flag, UsageError, reader, text
from rallypoint.lab.script import COMMON, ScriptOptions

USAGE = """\
usage: rallypoint script jobset --image IMAGE [FLAGS] SCRIPT [ARGUMENTS...]

Print a manifest for Kubernetes, of the kind JobSet, that runs SCRIPT in several pods, with comments
that say what each part is for. It submits nothing: read it, add what your cluster asks for (a
queue, tolerations, volumes), and give it to kubectl. The image has Rallypoint and SCRIPT in it.

Three pods, of which any two can continue:
  rallypoint script jobset --image registry.example.com/digits:1 --nnodes 2:3 train.py > job.yaml
  kubectl create secret generic train-token --from-literal=token=$(openssl rand -hex 16)
  kubectl apply -f job.yaml

Four with a worker for each of their eight GPUs:
  rallypoint script jobset --image registry.example.com/digits:1 --nnodes 4 --nproc-per-node 8 \\
      --gpus-per-node 8 --cpus-per-worker 12 --memory 512Gi train.py --epochs 90 > job.yaml
"""
ANSWERS = "set by Kubernetes for each pod"
OWN = ("--image", *COMMON, "--memory")
_GOODBYE_S = 15  # beyond the time that workers have to end
# A pod's name is NAME-node-0-INDEX-xxxxx, which must be a DNS label.
_LABEL, _LABEL_SIZE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), 63
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTP]i|[kMGTP])?")
# What any version of YAML reads as text without quotation marks.
_PLAIN = re.compile(r"(?![0-9.+]|-[0-9.])[-A-Za-z0-9_./=+:]*[A-Za-z0-9_/]")
_NO_TEXT = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def _memory(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise ValueError(text)
    return text


class JobsetOptions(ScriptOptions):
    """The flags for Kubernetes."""

    image = Flag("the container image", "IMAGE", text, None)
    memory = Flag("memory to request for each pod, as in 8Gi; also its limit", "SIZE",
                  reader(_memory, "{name} is {text!r}; give a size, as in 8Gi."), None)  # fmt: skip


def text_of(options: JobsetOptions) -> str:
    """The manifest."""
    name, cpus, (_, most) = _name(options), options.cpus, options.nnodes
    if options.image is None:
        raise UsageError("--image is missing; it names the container image to run.")
    if options.token_file is not None:
        raise UsageError("the token is in a Secret; leave out --token-file.")
    if not cpus:
        raise UsageError(
            f"--nproc-per-node {options.nproc_per_node} counts a machine's CPUs, but a pod has only"
            " part of a machine; give a number."
        )
    command = options.run(without=OWN)
    return _MANIFEST.format(
        made_by=options.made_by,
        name=name,
        pods=most,
        last=f"{name}-node-0-{most - 1}.{name}",
        grace_s=options.shutdown_s + _GOODBYE_S,
        shutdown_s=options.shutdown_s,
        image=_scalar(options.image),
        command=", ".join(_scalar(_verbatim(word)) for word in command),
        resources="\n".join(_resources(options, cpus)),
    )


def _resources(options: JobsetOptions, cpus: int) -> list[str]:
    memory, gpus = options.memory, options.gpus_per_node
    limits = [] if memory is None else [f"memory: {memory} # /dev/shm is part of it"]
    limits += [f'nvidia.com/gpu: "{gpus}"'] if gpus else []
    requests = [f'cpu: "{cpus}"'] + ([] if memory is None else [f"memory: {memory}"])
    lines = ["resources:", "  requests:", *(f"    {line}" for line in requests)]
    if limits:
        lines += ["  limits:", *(f"    {line}" for line in limits)]
    return [f"                  {line}" for line in lines]


def _name(options: ScriptOptions) -> str:
    """The JobSet's name; from a script's name, the characters that Kubernetes allows."""
    longest = _LABEL_SIZE - len(f"-node-0-{options.nnodes[1] - 1}-xxxxx")
    given = options.job_name
    if given is None:
        usual = re.sub(r"[^a-z0-9]+", "-", options.name.lower()).lstrip("-0123456789")
        return usual[:longest].strip("-") or "train"
    if not _LABEL.fullmatch(given) or len(given) > longest:
        raise UsageError(
            f"--job-name is {given!r}; it must start with a letter and contain "
            f"only a to z, 0 to 9 and -, at most {longest} characters."
        )
    return given


def _verbatim(word: str) -> str:
    """Escape a word, as Kubernetes replaces $(NAME) in a command."""
    return word.replace("$(", "$$(")


def _scalar(text: str) -> str:
    """The text as a YAML scalar."""
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT
    return text if is_plain else json.dumps(text, ensure_ascii=False)


_MANIFEST = """\
{made_by}
#
#     kubectl create secret generic {name}-token --from-literal=token=$(openssl rand -hex 16)
#     kubectl apply -f jobset.yaml
#     kubectl logs --follow --prefix --selector jobset.sigs.k8s.io/jobset-name={name}
#
# Kubernetes 1.31 or newer, with the JobSet controller, which makes the Service by itself.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true # each pod has a name of its own, up to {last}
    publishNotReadyAddresses: true # and has it from the start
  successPolicy:
    operator: Any # 0 means that every worker of the job succeeded
    targetReplicatedJobs: [node]
  failurePolicy:
    maxRestarts: 0 # pods are replaced one by one, below
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {pods}
          parallelism: {pods}
          backoffLimit: 6
          podFailurePolicy:
            rules:
              - action: Ignore # evicted, preempted or drained: replaced, and not counted
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
              - action: FailJob # 1: the job failed for good; 2: its command line is wrong
                onExitCodes:
                  containerName: train
                  operator: In
                  values: [1, 2]
          successPolicy:
            rules:
              - succeededCount: 1
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {grace_s} # {shutdown_s} to end in, and a goodbye
              containers:
                - name: train
                  image: {image}
                  command: [{command}]
                  env:
                    - name: RALLYPOINT_TOKEN # pods without it cannot join
                      valueFrom:
                        secretKeyRef:
                          name: {name}-token
                          key: token
{resources}
"""
