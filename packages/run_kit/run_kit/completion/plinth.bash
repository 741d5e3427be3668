# Completion of the plinth command, printed by `plinth completion bash`. Print it again after an upgrade:
#   @place@
_plinth_words() { # sets `found` to the words of a command; fails if there is no such command
    case $1 in
@cases@
    *) return 1 ;;
    esac
}
_plinth() {
    local IFS=$' \t\n' line=${COMP_LINE:0:COMP_POINT} cur='' node='' last='' prefix='' found words word rest head i count
    local -a typed
    read -ra typed <<<"$line"
    count=${#typed[@]}
    if [[ $line != *[[:space:]] ]]; then
        cur=${line##*[[:space:]]}
        count=$((count - 1))
    fi
    _plinth_words ''
    words=$found
    for ((i = 1; i < count; i++)); do
        word=${typed[i]}
        [[ $word == *=* || $word == -* ]] && continue
        if _plinth_words "${node:+$node }$word"; then
            node=${node:+$node }$word
            words=$found
        elif _plinth_words "$word"; then # the app of `plinth slurm APP`
            words="$words $found"
        fi
    done
    # Readline replaces only what follows the equals sign.
    [[ $cur == *=* && $COMP_WORDBREAKS == *=* ]] && prefix=${cur%"${cur##*=}"}
    COMPREPLY=()
    for word in $words; do
        [[ $word == "$cur"* ]] || continue
        if [[ $cur != *=* ]]; then # up to the next dot or equals sign
            rest=${word#"$cur"}
            head=${rest%%[.=]*}
            word=$cur${rest:0:${#head}+1}
        fi
        [[ $word == "$last" ]] || COMPREPLY+=("${word#"$prefix"}")
        last=$word
    done
    [[ $last == *[.=] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _plinth plinth
