"""The flags of `rallypoint run`: torchrun's, and ours, as a table in the order of the help text.

What they mean is read in run.py, nodes.py and workers.py; where a meaning differs from torchrun's,
docs/torchrun-differences.md says so.
"""

from __future__ import annotations

from rallypoint.cli.options import HELP, Flag, Group
from rallypoint.cli.token import TOKEN_FLAG

# What a launcher does that starts others; see cli/remote/.
HOSTS = (
    Flag("--hosts", "start a launcher on each of these, by ssh; names that they know each other\n"
         "by, each maybe with its --nproc-per-node, as in a,user@b:4", "A,B:N,..."),
    Flag("--hostfile", "the same from a file: in a line HOST, HOST:N or HOST slots=N", "FILE"),
    Flag("--rsh", "starts a command on a host, whose name follows it or replaces {host}\n"
         "(default: ssh)", "COMMAND"),
    Flag("--env", "pass on this variable of here, too, to the workers on all hosts; may be\n"
         "given again (always: RALLYPOINT_*, OMP_*, NCCL_* and others; see the guide)", "NAME",
         repeats=True),
)  # fmt: skip

# What agents on Ray take of its nodes; see cli/ray/.
RAY = (
    Flag("--cpus-per-node", "CPUs to reserve on each node (default: one for each worker)", "N"),
    Flag("--gpus-per-node", "GPUs to reserve on each node (default: one for each worker, if the\n"
         "cluster has GPUs)", "N"),
)  # fmt: skip

GROUPS = (
    Group("How many", (
        Flag("--nproc-per-node", "workers on this machine: a number; 'cpu' for one per CPU that\n"
             "may be used; 'gpu' or 'xpu' for one per device; 'auto' for one\n"
             "per device, or else per CPU (default 1)", "N"),
        Flag("--nnodes", "machines, or the fewest and the most of them (default 1; with --hosts\n"
             "all, and MIN: is enough)", "N|MIN:MAX"),
        Flag("--role", "a name for what the workers do, in ROLE_NAME (default 'default')", "NAME"),
    )),
    Group("What runs", (
        Flag("--module", "SCRIPT is a module, as in python -m", short="-m"),
        Flag("--no-python", "SCRIPT is a program of its own, not Python's"),
        Flag("--run-path", "run SCRIPT by runpy.run_path inside the interpreter"),
        Flag("--as-gloo", "process groups of PyTorch that ask for gloo run on Rallypoint's\n"
             "engine; the same on all machines (RALLYPOINT_AS_GLOO=1)"),
        Flag("--virtual-local-rank", "each worker sees only one device, as device 0, and has\n"
             "LOCAL_RANK=0"),
        Flag("--numa-binding", "CPUs near each worker's GPU: node, socket, exclusive (a share\n"
             "of the node's cores) or core-complex (cores with one cache)", "MODE"),
        Flag("--start-method", "for torchrun's sake: workers are always new interpreters",
             "METHOD"),
    )),
    Group("Failures and the end", (
        Flag("--max-restarts", "how often all workers are started again when one fails\n"
             "(default 0)", "N"),
        Flag("--shutdown-timeout", "from asking workers to end until they are killed (default 30)",
             "SECONDS"),
        Flag("--on-hang", "when the job hangs: 'report' says why, in a line (default); 'restart'\n"
             "ends the workers as if one had failed; 'stop' ends the job; 'off'\n"
             "looks for nothing", "WHAT"),
        Flag("--hang-after", "ranks wait at least for this long, and for ten times as long as\n"
             "before, when a job hangs (default 30)", "SECONDS"),
        Flag("--signals-to-handle", "these stop the job, and are passed on to the workers\n"
             "(default SIGTERM,SIGINT,SIGHUP,SIGQUIT)", "NAMES"),
        Flag("--monitor-interval", "for torchrun's sake: workers are watched, not polled",
             "SECONDS"),
    )),
    Group("Output and logs", (
        Flag("--log-dir", "keep logs below DIR, in RUN-ID_RANDOM/attempt_N/LOCAL-RANK/", "DIR"),
        Flag("--redirects", "which streams go to stdout.log and stderr.log instead of here:\n"
             "0 none, 1 stdout, 2 stderr, 3 both, or by local rank, as in 0:1,1:3", "WHICH",
             short="-r"),
        Flag("--tee", "which go to files and also, with a prefix, here (as --redirects)", "WHICH",
             short="-t"),
        Flag("--log-prefix", "begin each line that is shown here with FORMAT, which may use\n"
             "{rank}, {local_rank}, {role} and {host}, as in '{host}:{rank}: '", "FORMAT"),
        Flag("--log-line-prefix-template", "begin teed lines with TEMPLATE, which may use\n"
             "${rank}, ${local_rank}, ${role_name} and ${hostname}, as in\n"
             "'${hostname}:${rank}: '\n"
             "(default '[${role_name}${local_rank}]:')", "TEMPLATE"),
        Flag("--local-ranks-filter", "show only the output of these local ranks, as in 0,1",
             "RANKS"),
        Flag("--duplicate-stdout-filters", "teed lines of stdout with one of these texts go to\n"
             "attempt_N/filtered_stdout.log too; ',,' is a comma", "TEXTS"),
        Flag("--duplicate-stderr-filters", "the same for stderr", "TEXTS"),
        Flag("--logs-specs", "for torchrun's sake: only 'default' is known", "NAME"),
        Flag("--quiet", "say nothing but what ended the job", short="-q"),
        Flag("--verbose", "tell each decision and its reason", short="-v"),
        Flag("--json-events", "append what happens to FILE, one JSON object in a line", "FILE"),
        Flag("--event-log-handler", "'console' prints these objects on stderr; 'null' does not\n"
             "(default null)", "NAME"),
    )),
    Group("Several machines, started from this one", HOSTS),
    Group("Nodes of a Ray cluster, with --on ray", RAY),
    Group("Several machines, each with its own launcher", (
        Flag("--standalone", "one machine, nothing to agree on with others"),
        Flag("--on", "take what is not said here from that place only: slurm, flux, open-mpi,\n"
             "...; 'here' for none; `rallypoint where` shows it (default: what is\n"
             "recognised); 'ray': start a launcher on --nnodes nodes of Ray's", "PLACE"),
        Flag("--node-rank", "which of the machines this is, from 0 (default 0)", "N"),
        Flag("--master-addr", "machine 0's address (default 127.0.0.1)", "ADDRESS"),
        Flag("--master-port", "machine 0's port for the workers' store (default 29500; on one\n"
             "machine any free one)", "PORT"),
        Flag("--local-addr", "this machine's name or address, as others know it", "ADDRESS"),
        Flag("--rdzv-backend", "how machines find each other: static (default), c10d, etcd",
             "NAME"),
        Flag("--rdzv-endpoint", "where; with static, machine 0's address and port; with others\n"
             "maybe several, in the order in which to try; with c10d also a\n"
             "directory that all machines share: file:///PATH", "HOST:PORT,..."),
        Flag("--rdzv-id", "the job's name, the same on all machines", "ID"),
        Flag("--rdzv-conf", "more for the backend, as in timeout=60", "KEY=VALUE,..."),
        TOKEN_FLAG,
        Flag("--require-token", "refuse to run on several machines without a token"),
        Flag("--port-range", "listen at free ports from A to B only, the workers' too", "A-B"),
    )),
    Group("", (
        Flag("--print-completion", "print a script by which a shell completes these flags: bash,\n"
             "zsh or tcsh", "SHELL"),
        HELP,
    )),
)  # fmt: skip

FLAGS = tuple(flag for group in GROUPS for flag in group.flags)

USAGE = """\
usage: rallypoint run [FLAGS] SCRIPT [ARGUMENTS...]

Start SCRIPT in several processes that work together. Each gets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT and torchrun's other variables. When one fails, the rest are stopped and
the first failure is told; when the launcher ends, however it ends, nothing is left running.

Four workers on this machine, and one for each GPU, or else each CPU:
  rallypoint run --nproc-per-node 4 train.py --epochs 10
  rallypoint run --nproc-per-node auto -m my_package.train

Their output in files, and rank 0's here too; start all again up to three times if one fails:
  rallypoint run --nproc-per-node 8 --log-dir logs -r 3 -t 0:3 --max-restarts 3 train.py

Two machines, each with its own --node-rank, and the same token on both:
  RALLYPOINT_TOKEN=... rallypoint run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 \\
      --nproc-per-node 8 train.py

Three machines by one command, which reaches them by ssh; whatever ends it ends all of them:
  rallypoint run --hosts node1,node2,node3:4 --nproc-per-node 8 train.py

Two to four nodes of a Ray cluster, from one of them or by `ray job submit`:
  rallypoint run --on ray --nnodes 2:4 --nproc-per-node 8 train.py

Everything after SCRIPT is SCRIPT's, word for word, but for ${local_rank}, which is replaced.
"""

ENDINGS = """
Each flag can also be spelled with '_', and be set by a variable, as in PET_NPROC_PER_NODE=4.
PYTHON_EXEC names the Python that runs SCRIPT (default: this one). With several workers,
OMP_NUM_THREADS is 1 unless you set it. TORCHELASTIC_ERROR_FILE, if set here, is where the error of
the worker that failed first is written, as JSON.

Exit status: 0 if every worker succeeded; 1 if one failed; 2 if the command line is wrong;
3 if the job succeeded before this machine had a place in it;
128 + the signal's number if a signal stopped the launcher (a second Ctrl-C kills at once).

Other than torchrun: flags are not abbreviated, $$ and $local_rank in arguments stay as they are,
each restart has an empty store, SIGUSR1 and SIGUSR2 are passed on and stop nothing unless they are
in --signals-to-handle, and logs exist only if you ask for them.
"""
