"""The flags of `rallypoint run`: torchrun's and ours, as a table in the order of the help text.

run.py, nodes.py and workers.py interpret them; docs/torchrun-differences.md lists where a meaning
differs from torchrun's.
"""

from __future__ import annotations

from rallypoint.cli.options import HELP, Flag, FlagGroup
from rallypoint.cli.token_flag import TOKEN_FLAG

# For a launcher that starts launchers on other hosts; see cli/remote/.
HOSTS = (
    Flag("--hosts", "start a launcher on each of these hosts by ssh; use names that all\n"
         "hosts can resolve, optionally with --nproc-per-node, as in a,user@b:4", "A,B:N,...",
         elsewhere=("-H", "--host", "-hosts", "-w", "--nodelist")),
    Flag("--hostfile", "read the hosts from a file of lines HOST, HOST:N or HOST slots=N", "FILE",
         elsewhere=("-f", "-hostfile", "--machinefile", "-machinefile")),
    Flag("--rsh", "command that runs a program on a host; the host's name replaces\n"
         "{host} or is appended (default: ssh)", "COMMAND"),
    Flag("--env", "also pass this environment variable to the workers on all hosts; may\n"
         "be repeated (always passed: RALLYPOINT_*, OMP_*, NCCL_* and others;\n"
         "see docs/reference/environment.md)", "NAME",
         repeats=True),
)  # fmt: skip

# Resources that agents reserve on Ray; see cli/ray/.
RAY = (
    Flag("--cpus-per-node", "CPUs to reserve on each node (default: one for each worker)", "N"),
    Flag("--gpus-per-node", "GPUs to reserve on each node (default: one for each worker, if the\n"
         "cluster has GPUs)", "N"),
)  # fmt: skip

GROUPS = (
    FlagGroup("Number of workers", (
        Flag("--nproc-per-node", (
            "workers on this machine: a number; 'cpu' for one per usable CPU;\n'gpu' or 'xpu' "
            "for one per device; 'auto' for one per device, or\nper CPU without devices (default "
            "1)"
        ), "N", elsewhere=(
            *("-n", "-np", "--np", "-p", "--nproc", "--nprocs", "--ntasks", "--ntasks-per-node"),
            *("--num-gpus", "--num-processes", "--num-proc", "--num-procs", "--num-workers"),
            *("-ppn", "--ppn", "--gpus", "--devices"),
        )),
        Flag("--nnodes", "number of machines, or its minimum and maximum (default 1; with\n"
             "--hosts all of them; MIN: is allowed)", "N|MIN:MAX",
             elsewhere=("-N", "--nodes", "--num-nodes", "--num-machines")),
        Flag("--role", "name of what the workers do, for ROLE_NAME (default 'default')", "NAME"),
    )),
    FlagGroup("What runs", (
        Flag("--module", "SCRIPT is a module, as in python -m", short="-m"),
        Flag("--no-python", "SCRIPT is an executable program, not a Python script"),
        Flag("--run-path", "run SCRIPT with runpy.run_path inside the interpreter"),
        Flag("--as-gloo", "run PyTorch's gloo process groups on Rallypoint's engine; set it on\n"
             "all machines alike (RALLYPOINT_AS_GLOO=1)"),
        Flag("--virtual-local-rank", "each worker sees only one device, as device 0, and has\n"
             "LOCAL_RANK=0"),
        Flag("--numa-binding", "bind workers to CPUs near their GPU: node, socket, exclusive (a\n"
             "share of the node's cores) or core-complex (cores with one cache)", "MODE"),
        Flag("--start-method", "ignored, for torchrun's sake: workers are always new interpreters",
             "METHOD"),
    )),
    FlagGroup("Failures and shutdown", (
        Flag("--max-restarts", "how many times to restart all workers after one fails\n"
             "(default 0)", "N"),
        Flag("--spares", "workers to start beyond --nproc-per-node, which wait to replace lost\n"
             "ones; for scripts that use rallypoint.elastic (default 0)", "N"),
        Flag("--shutdown-timeout", "time for workers to end before they are killed (default 30)",
             "SECONDS"),
        Flag("--on-hang", "when the job hangs: 'report' says why, in one line (default);\n"
             "'restart' ends the workers as if one had failed; 'stop' ends the\n"
             "job; 'off' does not watch for hangs", "WHAT"),
        Flag("--hang-after", "a job counts as hanging when ranks have waited for at least this\n"
             "long, and ten times longer than before (default 30); a tenth is enough\n"
             "where they wait for one that a signal has stopped", "SECONDS"),
        Flag("--signals-to-handle", "signals that stop the job and are forwarded to the workers\n"
             "(default SIGTERM,SIGINT,SIGHUP,SIGQUIT)", "NAMES"),
        Flag("--monitor-interval", "ignored, for torchrun's sake: workers are watched, not polled",
             "SECONDS"),
    )),
    FlagGroup("Output and logs", (
        Flag("--log-dir", "keep logs below DIR, in RUN-ID_RANDOM/attempt_N/LOCAL-RANK/", "DIR"),
        Flag("--redirects", "streams to write to stdout.log and stderr.log instead of here:\n"
             "0 none, 1 stdout, 2 stderr, 3 both, or by local rank, as in 0:1,1:3", "WHICH",
             short="-r"),
        Flag("--tee", "streams to write to files and also here, with a prefix (values as\n"
             "for --redirects)", "WHICH",
             short="-t"),
        Flag("--log-prefix", "start each line shown here with FORMAT, which may use\n"
             "{rank}, {local_rank}, {role} and {host}, as in '{host}:{rank}: '", "FORMAT"),
        Flag("--log-line-prefix-template", "start teed lines with TEMPLATE, which may use\n"
             "${rank}, ${local_rank}, ${role_name} and ${hostname}, as in\n"
             "'${hostname}:${rank}: '\n"
             "(default '[${role_name}${local_rank}]:')", "TEMPLATE"),
        Flag("--local-ranks-filter", "show only the output of these local ranks, as in 0,1",
             "RANKS"),
        Flag("--duplicate-stdout-filters", (
            "also write teed lines of stdout that contain one of these texts "
            "to\nattempt_N/filtered_stdout.log; ',,' stands for a comma"
        ), "TEXTS"),
        Flag("--duplicate-stderr-filters", "the same for stderr", "TEXTS"),
        Flag("--logs-specs", "for torchrun's sake: only 'default' is accepted", "NAME"),
        Flag("--quiet", "print only what ended the job", short="-q"),
        Flag("--verbose", "print each decision and its reason", short="-v"),
        Flag("--json-events", "append events to FILE, one JSON object per line", "FILE"),
        Flag("--event-log-handler", "'console' prints events as JSON on stderr; 'null' does not\n"
             "(default null)", "NAME"),
    )),
    FlagGroup("Several machines, started from this one", HOSTS),
    FlagGroup("Nodes of a Ray cluster, with --on ray", RAY),
    FlagGroup("Several machines, each with its own launcher", (
        Flag("--standalone", "run on one machine, without a rendezvous"),
        Flag("--on", "take missing values from this environment only: slurm, flux,\n"
             "open-mpi, ...; 'here' for none (default: the one recognised, which\n"
             "`rallypoint where` shows); 'ray': start a launcher on --nnodes nodes\n"
             "of a Ray cluster", "PLACE"),
        Flag("--node-rank", "number of this machine, from 0 (default 0)", "N",
             elsewhere=("--machine-rank", "--rank")),
        Flag("--master-addr", "address of machine 0 (default 127.0.0.1)", "ADDRESS",
             elsewhere=("--main-process-ip", "--master", "--master-address")),
        Flag("--master-port", "port of the workers' store on machine 0 (default 29500; any free\n"
             "port on one machine)", "PORT", elsewhere=("--main-process-port",)),
        Flag("--local-addr", "name or address at which other machines reach this one", "ADDRESS"),
        Flag("--rdzv-backend", "how machines find each other: static (default), c10d, etcd",
             "NAME"),
        Flag("--rdzv-endpoint", "where they meet; static: machine 0's address and port; others:\n"
             "one or more endpoints, tried in order; c10d also takes a directory\n"
             "that all machines share: file:///PATH", "HOST:PORT,..."),
        Flag("--rdzv-id", "the job's name, the same on all machines", "ID"),
        Flag("--rdzv-conf", "more options for the backend, as in timeout=60", "KEY=VALUE,..."),
        TOKEN_FLAG,
        Flag("--require-token", "refuse to run on several machines without a token"),
        Flag("--port-range", "listen only on free ports from A to B, also in the workers", "A-B"),
    )),
    FlagGroup("", (
        Flag("--print-completion", "print a script that completes these flags in a shell:\n"
             "bash, zsh or tcsh", "SHELL"),
        HELP,
    )),
)  # fmt: skip

FLAGS = tuple(flag for group in GROUPS for flag in group.flags)

USAGE = """\
usage: rallypoint run [FLAGS] SCRIPT [ARGUMENTS...]

Start SCRIPT in several processes that work together. Each gets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT and torchrun's other variables. When one fails, the launcher stops the
others and reports the first failure. When the launcher ends, for any reason, so do all processes.

Four workers on this machine; one worker for each GPU, or for each CPU without GPUs:
  rallypoint run --nproc-per-node 4 train.py --epochs 10
  rallypoint run --nproc-per-node auto -m my_package.train

Output in files, and rank 0's here as well; up to three restarts of all workers after a failure:
  rallypoint run --nproc-per-node 8 --log-dir logs -r 3 -t 0:3 --max-restarts 3 train.py

Two machines, each with its own --node-rank, and both with the same token:
  RALLYPOINT_TOKEN=... rallypoint run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 \\
      --nproc-per-node 8 train.py

Three machines with one command, over ssh; when it ends, for any reason, all of them end:
  rallypoint run --hosts node1,node2,node3:4 --nproc-per-node 8 train.py

Two to four nodes of a Ray cluster, from one of them or with `ray job submit`:
  rallypoint run --on ray --nnodes 2:4 --nproc-per-node 8 train.py

Everything after SCRIPT is passed to it unchanged, except that ${local_rank} is replaced.
"""

ENDINGS = """
Each flag can also be spelled with '_', or set by a variable, as in PET_NPROC_PER_NODE=4.
PYTHON_EXEC names the Python that runs SCRIPT (default: this one). With several workers,
OMP_NUM_THREADS is 1 unless you set it. If TORCHELASTIC_ERROR_FILE is set here, the error of the
worker that failed first is written to that file as JSON.

Exit status: 0 if every worker succeeded; 1 if one failed; 2 if the command line is wrong;
3 if the job succeeded before this machine had a place in it;
128 + the signal's number if a signal stopped the launcher (a second Ctrl-C kills at once).

Unlike torchrun: flags cannot be abbreviated, $$ and $local_rank in arguments stay unchanged, each
restart has an empty store, SIGUSR1 and SIGUSR2 are forwarded and stop nothing unless they are in
--signals-to-handle, and logs are written only if you ask for them.
"""
