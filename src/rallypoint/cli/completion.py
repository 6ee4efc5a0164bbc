"""Shell completion scripts for the flags of `rallyrun`, generated from the table in flags.py."""

from __future__ import annotations

from collections.abc import Collection

from rallypoint.cli.options import Flag

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
    values = sorted((flag.name, flag.completes) for flag in flags if flag.completes)
    match shell:
        case "bash":
            cases = (f'    {name}) words="{words}" ;;' for name, words in values)
            return _BASH.format(cases="\n".join(cases), flags=_names(flags))
        case "zsh":
            return _ZSH.format(flags="\n".join(f"  '{_zsh_of(flag)}' \\" for flag in flags))
        case _:
            told = " ".join(f"'n/{name}/({words})/'" for name, words in values)
            return _TCSH.format(values=told, flags=_names(flags).replace("--", ""))


def _names(flags: Collection[Flag[object, object]]) -> str:
    return " ".join(flag.name for flag in flags)


def _zsh_of(flag: Flag[object, object]) -> str:
    text = flag.help.partition("\n")[0].translate(str.maketrans("[]:'\\", "()-  ")).rstrip(" ;,(")
    if not flag.takes_value:
        return f"{flag.name}[{text}]"
    words = f"({flag.completes})" if flag.completes else "_files"
    return f"{flag.name}=[{text}]:{flag.value.replace(':', ' ')}:{words}"
