"""Shell completion scripts for the flags of `rallyrun`, generated from the table in flags.py."""

from __future__ import annotations

from collections.abc import Collection

from rallypoint.cli.options import Flag

_VALUES = {
    "--event-log-handler": "null console",
    "--nproc-per-node": "auto cpu gpu xpu",
    "--numa-binding": "node socket exclusive core-complex",
    "--print-completion": "bash zsh tcsh",
    "--rdzv-backend": "static c10d etcd",
    "--redirects": "0 1 2 3",
    "--start-method": "spawn fork forkserver",
    "--tee": "0 1 2 3",
}

_BASH = """\
_rallyrun() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local words=""
  case $before in
{cases}
  esac
  [[ -z $words && $word == -* ]] && words="{flags}"
  [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _rallyrun rallyrun
"""
_ZSH = """\
#compdef rallyrun
_arguments -S -A '-*' \\
{flags}
  '1:script:_files' '*::argument:_files'
"""
_TCSH = """\
complete rallyrun {values} 'c/--/({flags})/' 'p/*/f/'
"""


def completion(shell: str, flags: Collection[Flag[object, object]]) -> str:
    """The script for that shell: bash, zsh or tcsh."""
    match shell:
        case "bash":
            cases = (f'    {name}) words="{_VALUES[name]}" ;;' for name in _VALUES)
            return _BASH.format(cases="\n".join(cases), flags=_names(flags))
        case "zsh":
            return _ZSH.format(flags="\n".join(f"  '{_zsh_of(flag)}' \\" for flag in flags))
        case _:
            values = (f"'n/{name}/({words})/'" for name, words in _VALUES.items())
            names = _names(flags).replace("--", "")
            return _TCSH.format(values=" ".join(values), flags=names)


def _names(flags: Collection[Flag[object, object]]) -> str:
    return " ".join(flag.name for flag in flags)


def _zsh_of(flag: Flag[object, object]) -> str:
    text = flag.help.partition("\n")[0].translate(str.maketrans("[]:'\\", "()-  ")).rstrip(" ;,(")
    if not flag.takes_value:
        return f"{flag.name}[{text}]"
    words = f"({_VALUES[flag.name]})" if flag.name in _VALUES else "_files"
    return f"{flag.name}=[{text}]:{flag.value.replace(':', ' ')}:{words}"
