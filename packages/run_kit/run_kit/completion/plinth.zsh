#compdef plinth
# Completion of the plinth command, printed by `plinth completion zsh`. Print it again after an upgrade:
#   @place@
_plinth_words() { # sets `found` to the words of a command; fails if there is no such command
    case $1 in
@cases@
    *) return 1 ;;
    esac
}
_plinth() {
    local cur=$PREFIX node='' found word rest head
    local -a known whole parts
    _plinth_words ''
    known=(${=found})
    for word in ${words[2,CURRENT-1]}; do
        [[ $word == *=* || $word == -* ]] && continue
        if _plinth_words "${node:+$node }$word"; then
            node=${node:+$node }$word
            known=(${=found})
        elif _plinth_words "$word"; then # the app of `plinth slurm APP`
            known+=(${=found})
        fi
    done
    for word in $known; do
        [[ $word == "$cur"* ]] || continue
        rest=${word#"$cur"}
        head=${rest%%[.=]*}
        if [[ $cur == *=* || $head == "$rest" ]]; then
            whole+=("$word")
        else # up to the next dot or equals sign
            parts+=("$cur${rest[1,$#head+1]}")
        fi
    done
    if (($#whole + $#parts == 0)); then
        compset -P '*='
        _files
        return
    fi
    (($#whole)) && compadd -- $whole
    (($#parts)) && compadd -S '' -- ${(u)parts}
    return 0
}
if [[ $funcstack[1] == _plinth ]]; then
    _plinth "$@"
else
    compdef _plinth plinth
fi
