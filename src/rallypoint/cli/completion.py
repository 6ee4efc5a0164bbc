"""`rallypoint completion`: prints a script by which a shell completes commands, their flags, the
flags' values, and the names of running jobs.

The script is generated from the tables of flags of all commands. `rallypoint run
--print-completion` prints the same, and for tcsh one that completes the flags of `rallyrun`.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping, Sequence

from rallypoint.base.record import Record
from rallypoint.cli import GROUPS, command_of
from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import HELP, Flag, Options, UsageError, one_of, perform

PROGRAM = "rallypoint completion"
_USAGE = f"""\
usage: {PROGRAM} bash|zsh|fish

Print a script by which a shell completes the commands of rallypoint, their flags, the flags'
values, and the names of running jobs.

For bash, in ~/.bashrc; for zsh, in ~/.zshrc, after compinit:
  source <(rallypoint completion bash)
  source <(rallypoint completion zsh)

For fish, in ~/.config/fish/config.fish:
  rallypoint completion fish | source
"""

_SUMMARIES = {name: text for group in GROUPS.values() for name, text in group.items()}
_ABOUT_JOBS = ("explain", "logs", "page", "stacks", "status", "stop", "top", "trace")
_OPERATIONS = (
    "all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all barrier"
)
# By command, its possible first words.
_FIRST_WORDS = {
    "bench": f"{_OPERATIONS} send",
    "completion": "bash fish zsh",
    "help": " ".join(_SUMMARIES),
    "script": "jobset slurm",
    "simulate": _OPERATIONS,
}
# The modules with tables of flags, where that is not the command's own.
_MODULES = {"script": ("rallypoint.lab.script.jobset", "rallypoint.lab.script.sbatch")}


class CompletionOptions(Options):
    """The flags of `rallypoint completion`."""

    help = HELP


class _Command(Record):
    """What can follow the name of a command."""

    name: str
    flags: tuple[Flag[object, object], ...]
    first_words: str = ""

    @property
    def is_about_jobs(self) -> bool:
        """Whether a job's name can follow."""
        return self.name in _ABOUT_JOBS


def completion(words: Sequence[str]) -> int:
    """Run `rallypoint completion WORDS`; returns the exit status."""
    return perform(PROGRAM, words, CompletionOptions, _print, usage=_USAGE)


def _print(_: CompletionOptions, rest: list[str]) -> int:
    if len(rest) != 1:
        raise UsageError(f"name one shell, as in: {PROGRAM} bash")
    print(script_for(one_of("bash", "zsh", "fish")(rest[0], "the shell")), end="")
    return 0


def script_for(shell: str) -> str:
    """The script for that shell: bash, zsh, fish or tcsh."""
    if shell == "tcsh":
        return _tcsh(RunOptions.flags)
    commands = [
        _Command(name, _flags_of(name), _FIRST_WORDS.get(name, ""))
        for name in ("help", *_SUMMARIES)
    ]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def _flags_of(command: str) -> tuple[Flag[object, object], ...]:
    """All flags of a command, which are in the tables of its own modules."""
    if command == "help":
        return ()
    if command == "run":
        return tuple(RunOptions.flags.values())
    found: dict[str, Flag[object, object]] = {}
    for name in _MODULES.get(command, (command_of(command).__module__,)):
        for table in vars(importlib.import_module(name)).values():
            is_table = isinstance(table, type) and issubclass(table, Options)
            if is_table and table.__module__.startswith(name):  # others are imported
                found.update(table.flags)
    return tuple(found.values())


def _names(flag: Flag[object, object]) -> list[str]:
    return [name for name in (flag.name, flag.short) if name]


def _summary(flag: Flag[object, object]) -> str:
    """The first line of its help."""
    return flag.help.partition("\n")[0].rstrip(" ;,(")


_BASH = """\
_rallypoint() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=run at=$COMP_CWORD words="" name
  COMPREPLY=()
  if [[ ${{COMP_WORDS[0]##*/}} == rallypoint ]]; then
    command=${{COMP_WORDS[1]}} at=$((COMP_CWORD - 1))
  fi
  if [[ $word == = ]]; then  # bash takes --flag=value as three words
    word=""
  elif [[ $before == = ]]; then
    before=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  if ((at == 0)); then
    words="{commands} --help --version"
  else
    case "$command $before" in
{values}
    esac
  fi
  if [[ -z $words && $word == -* ]]; then
    case $command in
{flags}
    esac
  fi
  if [[ -z $words ]] && ((at == 1)); then
    case $command in
{first_words}
    esac
  fi
  if [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  elif [[ " {about_jobs} " == *" $command "* ]]; then
    while IFS= read -r name; do
      [[ $name == "$word"* ]] && COMPREPLY+=("$(printf %q "$name")")
    done < <(rallypoint ps --quiet 2> /dev/null)
  fi
}}
complete -o default -F _rallypoint rallypoint rallyrun
"""


def _bash(commands: Sequence[_Command]) -> str:
    values, others = [], []
    for command in commands:
        for flag in command.flags:
            names = " | ".join(f'"{command.name} {name}"' for name in _names(flag))
            if flag.completes:
                values.append(_bash_case(names, flag.completes))
            elif flag.takes_value:
                others.append(names)
    flags = [
        _bash_case(command.name, " ".join(flag.name for flag in command.flags))
        for command in commands
        if command.flags
    ]
    first_words = [_bash_case(name, words) for name, words in _FIRST_WORDS.items()]
    return _BASH.format(
        commands=" ".join(command.name for command in commands),
        values="\n".join([*values, f"      {' | '.join(others)}) return ;;"]),
        flags="\n".join(flags),
        first_words="\n".join(first_words),
        about_jobs=" ".join(_ABOUT_JOBS),
    )


def _bash_case(pattern: str, words: str) -> str:
    return f'      {pattern}) words="{words}" ;;'


_ZSH = """\
#compdef rallypoint rallyrun
_rallypoint_jobs() {{
  local -a names=(${{(f)"$(rallypoint ps --quiet 2> /dev/null)"}})
  compadd -a names
}}
_rallypoint() {{
  local command=run
  if [[ ${{words[1]:t}} == rallypoint ]]; then
    if ((CURRENT == 2)); then
      local -a commands=(
{commands}
      )
      _describe command commands
      return
    fi
    command=$words[2]
    shift words
    ((CURRENT--))
  fi
  case $command in
{cases}
  esac
}}
if [[ ${{funcstack[1]}} == _rallypoint ]]; then
  _rallypoint "$@"
else
  compdef _rallypoint rallypoint rallyrun
fi
"""


def _zsh(commands: Sequence[_Command]) -> str:
    cases = []
    for command in commands:
        specs = [spec for flag in command.flags for spec in _zsh_flag(flag)]
        if command.is_about_jobs:
            specs.append("1:job:_rallypoint_jobs")
        elif command.first_words:
            specs.append(f"1:subject:({command.first_words})")
        rest = [] if command.is_about_jobs else ["*::argument:_files"]
        start = "    _arguments -S" + (" -A '-*'" if command.name == "run" else "")
        lines = [start, *(f"      '{spec}'" for spec in [*specs, *rest])]
        cases.append(f"  {command.name})\n" + " \\\n".join(lines) + " ;;")
    described = [f"        {shlex.quote(f'{name}:{text}')}" for name, text in _SUMMARIES.items()]
    return _ZSH.format(commands="\n".join(described), cases="\n".join(cases))


def _zsh_flag(flag: Flag[object, object]) -> list[str]:
    text = _summary(flag).translate(str.maketrans("[]:'\\", "()-  "))
    if not flag.takes_value:
        return [f"{name}[{text}]" for name in _names(flag)]
    words = f"({flag.completes})" if flag.completes else "_files"
    value = f"[{text}]:{flag.value.replace(':', ' ')}:{words}"
    return [f"{name}{'=' if name == flag.name else '+'}{value}" for name in _names(flag)]


_FISH = """\
function __rallypoint_command
    set -l words (commandline -opc)
    if string match -q '*rallyrun' -- $words[1]
        contains -- run $argv
    else if test (count $argv) -eq 0
        test (count $words) -eq 1
    else
        test (count $words) -gt 1; and contains -- $words[2] $argv
    end
end
function __rallypoint_first_word
    test (count (commandline -opc)) -eq 2; and __rallypoint_command $argv
end
complete -c rallypoint -f
"""


def _fish(commands: Sequence[_Command]) -> str:
    lines = [
        f"complete -c rallypoint -n __rallypoint_command -a {name} -d {shlex.quote(text)}"
        for name, text in _SUMMARIES.items()
    ]
    for command in commands:
        programs = ("rallypoint", "rallyrun") if command.name == "run" else ("rallypoint",)
        for program in programs:
            start = f"complete -c {program} -n '__rallypoint_command {command.name}'"
            lines += [f"{start} {_fish_flag(flag)}" for flag in command.flags]
            if not command.is_about_jobs and not command.first_words:
                lines.append(f"{start} -F")
        if command.first_words:
            first = f"complete -c rallypoint -n '__rallypoint_first_word {command.name}'"
            lines.append(f"{first} -a {shlex.quote(command.first_words)}")
    jobs = "(rallypoint ps --quiet 2> /dev/null)"
    about_jobs = f"__rallypoint_command {' '.join(_ABOUT_JOBS)}"
    lines.append(f"complete -c rallypoint -n '{about_jobs}' -a '{jobs}'")
    return _FISH + "\n".join(lines) + "\n"


def _fish_flag(flag: Flag[object, object]) -> str:
    words = [f"-l {flag.name[2:]}"]
    words += [f"-s {flag.short[1:]}"] if flag.short else []
    if flag.completes:
        words.append(f"-x -a {shlex.quote(flag.completes)}")
    elif flag.takes_value:
        words.append("-r -F")
    return " ".join([*words, f"-d {shlex.quote(_summary(flag))}"])


def _tcsh(flags: Mapping[str, Flag[object, object]]) -> str:
    values = sorted((flag.name, flag.completes) for flag in flags.values() if flag.completes)
    told = " ".join(f"'n/{name}/({words})/'" for name, words in values)
    names = " ".join(flags).replace("--", "")
    return f"complete rallyrun {told} 'c/--/({names})/' 'p/*/f/'\n"
